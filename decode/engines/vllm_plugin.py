"""Initial coefficients for vLLM's adaptive verification, fitted on traces (entry point `vllm.general_plugins`).

vLLM (Model Runner V2, `adaptive_verification`) verifies the tokens of a batch that are most likely accepted: sigmoid(slope x
log-odds of the largest draft probability + intercept of the position). It fits both while serving, with the same initial
values for all models. The environment variable `SPECSTOP_VLLM_ACCEPTANCE` names a file `acceptance.json` of `specstop deploy
--to vllm` with other initial values. Without it, this module does nothing.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

from ...policies.errors import InputError, SpecstopWarning
from ...policies.files import strict_loads

SWITCH = "SPECSTOP_VLLM_ACCEPTANCE"


def register() -> None:
    """Set the coefficients of the named file; vLLM may call this more than once in a process."""
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
