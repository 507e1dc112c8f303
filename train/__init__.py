"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .bounds import clairvoyant_seconds
from .compare import compare
from .data import TraceArrays, trace_arrays
from .evaluate import evaluate
from .fitting import FitOptions
from .records import Line, Ratio, Report
from .replay import Replayed, replay
from .run import train
from .trained import Trained
from .transfer import transfer
from .whatif import sweep

if TYPE_CHECKING:
    from .classifiers import StopClassifier
    from .mlp import StopHeadModule, TraceDataModule
    from .offpolicy import estimate_offline

_LAZY = {
    "StopClassifier": "classifiers",
    "estimate_offline": "offpolicy",
    "StopHeadModule": "mlp",
    "TraceDataModule": "mlp",
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
    "clairvoyant_seconds",
    "compare",
    "estimate_offline",
    "evaluate",
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
