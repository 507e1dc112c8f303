"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .fit.run import train
from .fit.trained import Trained
from .heads.fitting import FitOptions
from .report.compare import compare
from .report.evaluate import evaluate
from .report.records import Line, Ratio, Report
from .report.transfer import transfer
from .report.whatif import sweep
from .traces.bounds import oracle_seconds
from .traces.data import TraceArrays, trace_arrays
from .traces.replay import Replayed, replay

if TYPE_CHECKING:
    from .heads.classifiers import StopClassifier
    from .heads.mlp import StopHeadModule, TraceDataModule
    from .logged.offpolicy import estimate_offline

_LAZY = {
    "StopClassifier": "heads.classifiers",
    "estimate_offline": "logged.offpolicy",
    "StopHeadModule": "heads.mlp",
    "TraceDataModule": "heads.mlp",
}
"""Names whose libraries take seconds to import: they come when they are first asked for."""

__all__ = [
    "FitOptions",
    "Line",
    "Ratio",
    "Replayed",
    "Report",
    "StopClassifier",
    "StopHeadModule",
    "TraceArrays",
    "TraceDataModule",
    "Trained",
    "compare",
    "estimate_offline",
    "evaluate",
    "oracle_seconds",
    "replay",
    "sweep",
    "trace_arrays",
    "train",
    "transfer",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
