"""Kinds of calls that a model supports (see `self_check`)."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass

from transformers import PreTrainedModel

from ....policies.errors import SpecstopWarning

ENDLESS = 1 << 30
"""Maximum text length of a model without a limit on positions."""

_WARNED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


@dataclass(frozen=True)
class Reading:
    """Calls for which a model returns correct logits.

    Attributes:
        masked: Calls with masks [B, 1, n, slots] of the loop. If False, only chains, with the mask that the model computes.
        tree: Several candidates of the same depth in one call.
        side_by_side: Several texts in one call. If False, the texts of a batch are read one after the other.
        padded: Masked padding on the left has no effect on the logits. If False, the model reads such prompts by itself.
    """

    masked: bool = True
    tree: bool = True
    side_by_side: bool = True
    padded: bool = True


READS_ALL = Reading()


def readable(model: PreTrainedModel) -> int:
    """Return the maximum length in tokens of a text."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else ENDLESS


def warn_one_at_a_time(model: PreTrainedModel) -> None:
    """Warn, once per model, that the texts of a batch are read one after the other."""
    if model not in _WARNED:
        _WARNED.add(model)
        warnings.warn(
            f"{type(model).__name__}: reading several texts in one call changes their logits, so the texts of a batch "
            "are read one at a time; larger batches are no faster",
            SpecstopWarning,
            stacklevel=4,
        )
