"""Hidden states that policies read: how wide they are, and who has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...policies.errors import PolicyError
from ...policies.features import DRAFT_HIDDEN, MAX_HALF
from .pair import Pair


@runtime_checkable
class KeepsStates(Protocol):
    """A drafter that scores by hidden states and can hand them over with its proposals."""

    def keep_states(self) -> int:
        """Hand over the states with every proposal from now on, and return their width H."""


def hidden_width(model: PreTrainedModel) -> int:
    """Return H, the numbers that a model's output layer reads."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    # The output layer of a compact model is a `Product`, which has no `in_features`.
    return int(getattr(head, "in_features", None) or model.config.get_text_config().hidden_size)


def hidden_widths(pair: Pair, names: Sequence[str], drafter: object = None) -> dict[str, int]:
    """Return the width of each of these hidden states, which are to be recorded.

    Args:
        pair: target and draft.
        names: of `features.hidden_states`.
        drafter: whose states stand in the place of the draft model's, and which keeps them from now on; None = that model.

    Raises:
        PolicyError: the drafter has none.
    """

    def width(name: str) -> int:
        if name != DRAFT_HIDDEN:
            return hidden_width(pair.target)
        if drafter is None:
            return hidden_width(pair.draft_model)
        return ask_for_states(drafter, "--hidden", "leave the draft's states out")

    return {name: width(name) for name in names}


def ask_for_states(drafter: object, who: str, instead: str = "use another policy") -> int:
    """Have a drafter keep its hidden states and return their width.

    Args:
        drafter: to be asked.
        who: reads them.
        instead: what to do without them.

    Raises:
        PolicyError: it has none.
    """
    if not isinstance(drafter, KeepsStates):
        raise PolicyError(
            f"{who}: reads {DRAFT_HIDDEN}, which {type(drafter).__name__} has not; draft with a model, medusa, hydra or "
            f"layer, or {instead}"
        )
    return drafter.keep_states()


def stored(states: Tensor) -> Tensor:
    """Return hidden states [..., H] as a trace keeps them: float16, what is beyond its range at its ends."""
    return states.clamp(-MAX_HALF, MAX_HALF).to(torch.float16)


def seen(states: Tensor) -> Tensor:
    """Return hidden states [..., H], of a model or of a trace, as a policy sees them: float32, rounded to float16."""
    return stored(states).float()
