"""Logits that no token can be drawn from: a broken model ends the run in one line instead of writing nonsense."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from ...policies.errors import PairError


def check_rows(logits: Tensor, role: str = "target") -> None:
    """Refuse raw logits [..., V] with a row whose best score is NaN or infinite; single tokens may be at -inf.

    Args:
        logits: as the model gives them.
        role: of the model, for the message.

    Raises:
        PairError: a row is broken.
    """
    with FiniteRows(logits, role):
        pass


class FiniteRows(contextlib.AbstractContextManager[None]):
    """Does what `check_rows` does, by the end of the block that it opens: rows that lie on a device are looked at meanwhile.

    The block waits for the device for its own sake, and so waits once. What it raises over rows that are broken gives way to
    the error that says so.

    Args:
        logits, role: as of `check_rows`. On the CPU it raises at once.
    """

    def __init__(self, logits: Tensor, role: str = "target") -> None:
        self._role = role
        best = logits.amax(-1)  # NaN where the row has one
        self._coming: Tensor | None = None  # what is yet to be looked at
        if best.is_cpu:
            self._check(best)
        else:
            self._coming = best.to("cpu", non_blocking=True)
            self._copied = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None

    def __exit__(self, *error: object) -> None:
        if self._coming is not None:
            if self._copied is not None:
                self._copied.synchronize()
            self._check(self._coming)

    def _check(self, best: Tensor) -> None:
        if not all(map(math.isfinite, best.flatten().tolist())):
            raise broken(self._role)


def broken(role: str) -> PairError:
    """Return the error of a model whose logits are not finite."""
    return PairError(
        f"the {role}'s logits are not finite: expected scores of tokens, not NaN or infinity; its weights or its config "
        "are damaged, or too large for --dtype: try float32, or get the model again"
    )
