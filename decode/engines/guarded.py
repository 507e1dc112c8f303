"""The drafter of an engine, timed, and kept from ending the engine."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...policies.errors import InputError, SpecstopWarning
from ...policies.validation import error_text
from .source import DraftRows


@dataclass
class Spent:
    """Steps, their requests and the tokens drafted for them; seconds of all that is done here, of the draft model, and of
    decisions with what is read for them."""

    steps: int = 0
    requests: int = 0
    drafted: int = 0
    all_s: float = 0.0
    model_s: float = 0.0
    asked_s: float = 0.0


class Guarded:
    """A drafter whose calls are timed; one that raises an error is named once, and knows of no token from then on.

    Attributes:
        failed: why it is not asked any more; empty while it is.
    """

    def __init__(self, draft: DraftRows, spent: Spent) -> None:
        self._draft: DraftRows | None = draft
        self._spent, self.failed = spent, ""

    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """See `DraftRows`; no token is known where the drafter has failed."""
        begin = time.perf_counter()
        logits = None
        try:
            if self._draft is not None:
                logits = self._draft.read(rows, tokens, depth)
        except Exception as error:  # a plugin may raise anything; the engine must live
            self._fail(error)
        self._spent.model_s += time.perf_counter() - begin
        return torch.full((len(rows), 1), -math.inf) if logits is None else logits

    def roll_back(self, row: int, length: int) -> None:
        """See `DraftRows`."""
        try:
            if self._draft is not None:
                self._draft.roll_back(row, length)
        except Exception as error:  # a plugin may raise anything; the engine must live
            self._fail(error)

    def check(self) -> None:
        """Raise `InputError` if it has failed."""
        if self.failed:
            raise InputError(f"the drafter failed ({self.failed}); nothing was recorded from there on")

    def _fail(self, error: Exception) -> None:
        self._draft, self.failed = None, error_text(error)
        text = f"the drafter failed ({self.failed}); nothing is drafted from here on"
        warnings.warn(text, SpecstopWarning, stacklevel=3)
