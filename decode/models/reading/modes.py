"""How a model can be read (see `self_check`)."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass

from transformers import PreTrainedModel

from ....policies.errors import SpecstopWarning

ENDLESS = 1 << 30
"""Tokens that a model reads whose positions nothing limits."""

_WARNED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


@dataclass(frozen=True)
class Reading:
    """What a model reads right.

    Attributes:
        masked: under masks [B, 1, n, slots] that it is given; else only chains, under the mask that it makes itself.
        tree: candidates of one depth beside each other.
        side_by_side: several texts in one call; else they are read one after the other.
    """

    masked: bool = True
    tree: bool = True
    side_by_side: bool = True


READS_ALL = Reading()


def readable(model: PreTrainedModel) -> int:
    """Return the longest text that a model reads."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else ENDLESS


def warn_one_at_a_time(model: PreTrainedModel) -> None:
    """Warn, once a model, that the texts of a batch are read one after the other."""
    if model not in _WARNED:
        _WARNED.add(model)
        warnings.warn(
            f"{type(model).__name__}: several texts in one call get other logits than each alone, so the texts of a batch "
            "are read one at a time; larger batches are no faster",
            SpecstopWarning,
            stacklevel=4,
        )
