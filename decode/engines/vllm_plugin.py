"""Initial coefficients and costs for vLLM's adaptive verification (entry point `vllm.general_plugins`).

vLLM (Model Runner V2, `adaptive_verification`) verifies the tokens of a batch that are most likely accepted: sigmoid(slope x
log-odds of the largest draft probability + intercept of the position). It fits both while serving, with the same initial
values for all models. The environment variable `SPECSTOP_VLLM_ACCEPTANCE` names a file `acceptance.json` of `specstop deploy
--to vllm` with other initial values. `SPECSTOP_VLLM_COSTS` names its file `cost_curves.json`, which replaces the costs that
vLLM measures at start-up. Without them, this module does nothing.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

from ...policies.errors import InputError, SpecstopWarning
from ...policies.files import strict_loads

SWITCH, COSTS = "SPECSTOP_VLLM_ACCEPTANCE", "SPECSTOP_VLLM_COSTS"

Curve = list[tuple[int, float]]


def register() -> None:
    """Set what the named files hold; vLLM may call this more than once in a process."""
    if costs := os.environ.get(COSTS):
        curves = read_curves(Path(costs))
        try:
            from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
        except ImportError as error:
            text = f"{COSTS}: this vLLM has no adaptive verification as 0.33 has it ({error}); {costs} is not used"
            warnings.warn(text, SpecstopWarning, stacklevel=2)
        else:
            set_curves(AdaptiveVerificationManager, *curves)
    path = os.environ.get(SWITCH)
    if not path:
        return
    slope, intercepts = read_coefficients(Path(path))
    try:
        from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator
    except ImportError as error:
        text = f"{SWITCH}: this vLLM has no adaptive verification as 0.32 has it ({error}); {path} is not used"
        warnings.warn(text, SpecstopWarning, stacklevel=2)
        return
    set_coefficients(OnlineAcceptanceEstimator, slope, intercepts)


def read_coefficients(path: Path) -> tuple[float, list[float]]:
    """Return the slope and the intercepts by position. Raises `InputError` if the file is missing or invalid."""
    try:
        raw = strict_loads(path.read_text(encoding="utf-8"))
        slope, intercepts = float(raw["slope"]), [float(value) for value in raw["intercepts"]]
        if not intercepts or not all(abs(value) < 1e6 for value in (slope, *intercepts)):  # false for NaN
            raise ValueError("expected a slope and at least one intercept, all finite")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{SWITCH}: expected acceptance.json of `specstop deploy --to vllm`, but {path}: {type(error).__name__}: {error}"
        ) from None
    return slope, intercepts


def read_curves(path: Path) -> tuple[Curve, Curve]:
    """Return (requests, ms) of drafts and (tokens, ms) of calls. Raises `InputError` if the file is missing or invalid."""
    curves: list[Curve] = []
    try:
        raw = strict_loads(path.read_text(encoding="utf-8"))
        for name in ("draft_curve", "verify_curve"):
            curve = [(int(count), float(ms)) for count, ms in raw[name]]
            counts = [0, *(count for count, _ in curve)]
            if not curve or counts != sorted(set(counts)) or not all(0 <= ms < 1e6 for _, ms in curve):
                raise ValueError(f"expected ascending counts and ms from 0 on in {name}")
            curves.append(curve)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{COSTS}: expected cost_curves.json of `specstop deploy --to vllm`, but {path}: {type(error).__name__}: {error}"
        ) from None
    return curves[0], curves[1]


def set_curves(manager: Any, drafts: Curve, calls: Curve) -> None:
    """Let a class of managers take these costs instead of those that it measures at start-up."""
    manager.set_initial_cost_curves = lambda self, samples: self.set_cost_curves(drafts, calls)


def set_coefficients(estimator: Any, slope: float, intercepts: list[float]) -> None:
    """Set the initial coefficients of a class of estimators. The last intercept holds for all later positions too."""
    initialize = getattr(estimator.__init__, "__wrapped__", estimator.__init__)  # not wrapped a second time

    @functools.wraps(initialize)
    def with_coefficients(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        self.slope.fill_(slope)
        for position in range(len(self.intercepts)):
            self.intercepts[position] = intercepts[min(position, len(intercepts) - 1)]

    estimator.__init__ = with_coefficients
