"""Checks of model outputs: logits must be finite. Hidden states that policies read are rounded to float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...policies.errors import PairError, PolicyError
from ...policies.features import DRAFT_HIDDEN
from .device import Copy
from .pair import Pair
from .view import hidden_width


def check_rows(logits: Tensor, role: str = "target") -> None:
    """Raise `PairError` if the best score of a row of raw logits [..., V] is not finite. Single tokens may be at -inf."""
    start_check(logits, role)()


def start_check(logits: Tensor, role: str = "target") -> Callable[[], None]:
    """Check logits as `check_rows` does, on the CPU at once, on a device when the returned function is called.

    The result is copied meanwhile, so that a caller that waits for the device anyway waits once.
    """
    best = Copy(logits.amax(-1))  # NaN if the row contains one

    def check() -> None:
        if not all(map(math.isfinite, best.wait().flatten().tolist())):
            raise nonfinite_error(role)

    if logits.is_cpu:
        check()
        return lambda: None
    return check


def nonfinite_error(role: str) -> PairError:
    """Return the error of a model with logits that are not finite."""
    return PairError(
        f"the {role}'s logits are not finite: expected scores of tokens, not NaN or infinity; its weights or its config "
        "are damaged, or too large for --dtype: try float32, or get the model again"
    )


def hidden_widths(
    pair: Pair,
    names: Sequence[str],
    drafter: object = None,
    user: str = "--hidden",
    instead: str = "leave the draft's states out",
) -> dict[str, int]:
    """Return the width of each of the hidden states that `user` reads, by its name in `features.HIDDEN_STATES`.

    The states of a drafter, which keeps them from now on, replace those of the draft model.

    Raises:
        PolicyError: The drafter has none; the message ends with what to do `instead`.
    """
    widths = {name: hidden_width(pair.target) for name in names}
    if DRAFT_HIDDEN in widths and drafter is None:
        widths[DRAFT_HIDDEN] = hidden_width(pair.draft_model)
    elif DRAFT_HIDDEN in widths:
        if (keep_states := getattr(drafter, "keep_states", None)) is None:
            raise PolicyError(
                f"{user}: reads {DRAFT_HIDDEN}, which {type(drafter).__name__} has not; draft with a model, medusa, hydra "
                f"or layer, or {instead}"
            )
        widths[DRAFT_HIDDEN] = int(keep_states())
    return widths


def stored(states: Tensor) -> Tensor:
    """Return hidden states [..., H] as a trace stores them: float16, clipped to its range."""
    largest = torch.finfo(torch.float16).max
    return states.clamp(-largest, largest).to(torch.float16)


def round_states(states: Tensor) -> Tensor:
    """Return hidden states [..., H] as a policy sees them: float32, rounded to float16."""
    return stored(states).float()
