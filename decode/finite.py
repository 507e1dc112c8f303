"""Logits that no token can be drawn from: a broken model ends the run in one line instead of writing nonsense."""

from __future__ import annotations

import math

from torch import Tensor

from ..policies.errors import PairError


def check_rows(logits: Tensor, role: str = "target", void: Tensor | None = None) -> None:
    """Refuse raw logits [..., V] with a row whose best score is NaN or infinite; single tokens may be at -inf.

    Args:
        logits: as the model gives them.
        role: of the model, for the message.
        void: [...] rows that nothing is drawn from.

    Raises:
        PairError: a row is broken.
    """
    best = logits.amax(-1)  # NaN where the row has one
    if void is not None:
        best = best.masked_fill(void, 0.0)
    if not all(map(math.isfinite, best.flatten().tolist())):
        raise broken(role)


def broken(role: str) -> PairError:
    """Return the error of a model whose logits are not finite."""
    return PairError(
        f"the {role}'s logits are not finite: expected scores of tokens, not NaN or infinity; its weights or its config "
        "are damaged, or too large for --dtype: try float32, or get the model again"
    )
