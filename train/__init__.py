"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report.

Names are imported when they are first used: replay must not cost the import of what fits heads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fit.run import train
    from .fit.trained import Trained
    from .heads.classifiers import StopClassifier
    from .heads.fitting import FitOptions
    from .heads.mlp import StopHeadModule, TraceDataModule
    from .logged.offpolicy import estimate_offline
    from .replay.arrays import TraceArrays, trace_arrays
    from .replay.bounds import oracle_seconds
    from .replay.run import Replayed
    from .report.compare import compare
    from .report.evaluate import evaluate
    from .report.records import Line, Ratio, Report
    from .report.transfer import transfer
    from .report.whatif import sweep

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
    "sweep",
    "trace_arrays",
    "train",
    "transfer",
]

_HOME = {
    "FitOptions": "heads.fitting",
    "Line": "report.records",
    "Ratio": "report.records",
    "Replayed": "replay.run",
    "Report": "report.records",
    "StopClassifier": "heads.classifiers",
    "StopHeadModule": "heads.mlp",
    "TraceArrays": "replay.arrays",
    "TraceDataModule": "heads.mlp",
    "Trained": "fit.trained",
    "compare": "report.compare",
    "estimate_offline": "logged.offpolicy",
    "evaluate": "report.evaluate",
    "oracle_seconds": "replay.bounds",
    "sweep": "report.whatif",
    "trace_arrays": "replay.arrays",
    "train": "fit.run",
    "transfer": "report.transfer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
