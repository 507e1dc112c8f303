"""From a head's logit to a probability that means what it says: identity, temperature or isotonic."""

from __future__ import annotations

import bisect
import math
from array import array

import torch
from torch import Tensor

from .errors import PolicyError

KINDS = ("identity", "temperature", "isotonic")

LEAST_ODDS = -700.0
"""Log-odds below which a probability is 0: their exponential would overflow."""


class Calibrator:
    """A monotone map from logits to probabilities.

    Args:
        kind: "identity", "temperature" (sigmoid of logit / T) or "isotonic" (piecewise linear in the logit).
        temperature: T.
        knots: [2, n], the logits (increasing) and the probabilities (not decreasing) of an isotonic map.
    """

    def __init__(self, kind: str = "identity", temperature: float = 1.0, knots: Tensor | None = None) -> None:
        if kind not in KINDS:
            raise PolicyError(f"unknown calibration {kind!r}; expected one of {', '.join(KINDS)}")
        if not 0 < temperature < math.inf:
            raise PolicyError(f"calibration: expected a temperature above 0, not {temperature}")
        self.kind, self.temperature = kind, temperature
        self.knots = torch.zeros(2, 0) if knots is None else knots
        if kind == "isotonic":
            ok = self.knots.dim() == 2 and self.knots.shape[0] == 2 and self.knots.shape[1] >= 2
            ok = ok and bool(self.knots.isfinite().all()) and not bool((self.knots.diff(dim=1) < 0).any())
            if not ok or bool((self.knots[1] < 0).any()) or bool((self.knots[1] > 1).any()):
                raise PolicyError(
                    "calibration: expected knots [2, n], n of 2 or more, increasing, the second row in [0, 1]"
                )
        pieces = _segments(self.knots) if kind == "isotonic" else [self.knots] * 4
        self._bounds, self._start, self._level, self._slope = pieces
        # Arrays lie together in memory; the numbers of a list lie about, and cold caches make each of them dear.
        self._steps = [array("d", piece.tolist()) for piece in pieces] if kind == "isotonic" else None

    def one(self, logit: float) -> float:
        """Return the probability of one logit."""
        if self._steps is not None:
            bounds, start, level, slope = self._steps
            at = bisect.bisect_left(bounds, logit)
            value: float = level[at] + slope[at] * (logit - start[at])
            return value
        odds = logit / self.temperature
        return 0.0 if odds < LEAST_ODDS else 1.0 / (1.0 + math.exp(-odds))

    @property
    def scale(self) -> float | None:
        """What a sigmoid must multiply the logit with to do the same; None for an isotonic map."""
        return None if self.kind == "isotonic" else 1.0 / self.temperature

    def pieces(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (bounds [n]; start, level, slope [n + 1]) of an isotonic map; see `_segments`."""
        return self._bounds, self._start, self._level, self._slope

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the probabilities, same shape as `logits`."""
        if self.kind != "isotonic":
            return torch.sigmoid(logits if self.temperature == 1.0 else logits / self.temperature)
        bounds, start, level, slope = self._pieces_on(logits.device)
        at = torch.searchsorted(bounds, logits.contiguous())
        return level[at] + slope[at] * (logits - start[at])

    def _pieces_on(self, device: torch.device) -> tuple[Tensor, ...]:
        if self._bounds.device != device:
            self._bounds, self._start, self._level, self._slope = (piece.to(device) for piece in self.pieces())
        return self.pieces()


def _segments(knots: Tensor) -> list[Tensor]:
    """Return (bounds [n]; start, level, slope [n + 1]) of the piecewise linear map, level outside its knots."""
    x, y = knots.double()
    step = x.diff()
    slope = torch.where(step > 0, y.diff() / step.clamp_min(1e-12), 0.0)
    zero = torch.zeros(1, dtype=torch.float64)
    pieces = (x, torch.cat([x[:1], x]), torch.cat([y[:1], y]), torch.cat([zero, slope, zero]))
    return [piece.float().contiguous() for piece in pieces]
