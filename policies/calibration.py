"""From a head's logit to a probability that means what it says: identity, temperature or isotonic."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import PolicyError

KINDS = ("identity", "temperature", "isotonic")


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
        if not temperature > 0:
            raise PolicyError(f"calibration: expected a temperature above 0, not {temperature}")
        self.kind, self.temperature = kind, temperature
        self.knots = torch.zeros(2, 0) if knots is None else knots
        if kind == "isotonic":
            ok = self.knots.dim() == 2 and self.knots.shape[0] == 2 and self.knots.shape[1] >= 2
            if not ok or bool((self.knots.diff(dim=1) < 0).any()) or not bool(self.knots.isfinite().all()):
                raise PolicyError("calibration: expected increasing knots [2, n] with n of 2 or more")

        self._bounds, self._slope, self._shift = _segments(self.knots) if kind == "isotonic" else [self.knots] * 3

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the probabilities, same shape as `logits`."""
        if self.kind != "isotonic":
            return torch.sigmoid(logits if self.temperature == 1.0 else logits / self.temperature)
        at = torch.searchsorted(self._bounds, logits.contiguous())
        return self._shift[at] + self._slope[at] * logits


def _segments(knots: Tensor) -> list[Tensor]:
    """Return (bounds [n], slope [n + 1], shift [n + 1]) of the piecewise linear map, level outside its knots."""
    x, y = knots.double()
    slope = (y.diff() / x.diff().clamp_min(1e-9)).clamp(0.0, 1e6)
    shift = y[:-1] - slope * x[:-1]
    zero = torch.zeros(1, dtype=torch.float64)
    pieces = (x, torch.cat([zero, slope, zero]), torch.cat([y[:1], shift, y[-1:]]))
    return [piece.float().contiguous() for piece in pieces]
