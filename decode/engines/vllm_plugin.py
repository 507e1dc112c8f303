"""vLLM's adaptive verification begins with coefficients that were fitted on traces (entry point `vllm.general_plugins`).

vLLM (Model Runner V2, `adaptive_verification`) spends a batch's tokens where acceptance is likeliest: sigmoid(slope x
log-odds of the draft's largest probability + intercept of the position), fitted while it serves from one cold start for all
models. The environment variable `SPECSTOP_VLLM_ACCEPTANCE` names a file `acceptance.json` of `specstop deploy --to vllm`;
without it nothing here does anything. vLLM fits on from there.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

from ...policies.errors import InputError, SpecstopWarning
from ...policies.safe_loading import strict_loads

SWITCH = "SPECSTOP_VLLM_ACCEPTANCE"


def register() -> None:
    """Have estimators begin with the coefficients of the file that is named; vLLM may call this more than once a process."""
    path = os.environ.get(SWITCH)
    if not path:
        return
    slope, intercepts = read_coefficients(Path(path))
    try:
        from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator
    except ImportError as error:
        warnings.warn(
            f"{SWITCH}: this vLLM has no adaptive verification as 0.32 has it ({error}); it goes on without {path}",
            SpecstopWarning,
            stacklevel=2,
        )
        return
    begin_with(OnlineAcceptanceEstimator, slope, intercepts)


def read_coefficients(path: Path) -> tuple[float, list[float]]:
    """Return the slope and the intercepts by position.

    Raises:
        InputError: the file is not there, or is no such file.
    """
    try:
        raw = strict_loads(path.read_text(encoding="utf-8"))
        slope, intercepts = float(raw["slope"]), [float(value) for value in raw["intercepts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{SWITCH}: expected acceptance.json of `specstop deploy --to vllm`, but {path}: {type(error).__name__}: {error}"
        ) from None
    # NaN is below nothing.
    if not intercepts or not all(abs(value) < 1e6 for value in (slope, *intercepts)):
        raise InputError(f"{SWITCH}: {path}: expected a slope and at least one intercept, all finite")
    return slope, intercepts


def begin_with(estimator: Any, slope: float, intercepts: list[float]) -> None:
    """Have a class of estimators begin with coefficients; positions beyond the last intercept begin with that one."""
    # Registered a second time, the original is wrapped, not the wrapper.
    begin = getattr(estimator.__init__, "__wrapped__", estimator.__init__)

    @functools.wraps(begin)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.slope.fill_(slope)
        for position in range(len(self.intercepts)):
            self.intercepts[position] = intercepts[min(position, len(intercepts) - 1)]

    estimator.__init__ = made
