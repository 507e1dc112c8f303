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

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the probabilities, same shape as `logits`."""
        if self.kind != "isotonic":
            return torch.sigmoid(logits / self.temperature)
        x, y = self.knots[0].contiguous(), self.knots[1]
        right = torch.searchsorted(x, logits.contiguous()).clamp(1, len(x) - 1)
        x0, y0 = x[right - 1], y[right - 1]
        share = ((logits - x0) / (x[right] - x0).clamp_min(1e-12)).clamp(0.0, 1.0)
        return y0 + share * (y[right] - y0)
