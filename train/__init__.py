"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report.

Names are imported when they are first used: replay must not cost the import of what fits heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies.lazy import attach

if TYPE_CHECKING:
    from .drafters.run import train_drafter as train_drafter
    from .fit.run import train as train
    from .fit.trained import Trained as Trained
    from .heads.classifiers import StopClassifier as StopClassifier
    from .heads.fitting import FitOptions as FitOptions
    from .heads.mlp import StopHeadModule as StopHeadModule, TraceDataModule as TraceDataModule
    from .logged.offpolicy import estimate_offline as estimate_offline
    from .replay.arrays import TraceArrays as TraceArrays, trace_arrays as trace_arrays
    from .replay.bounds import oracle_seconds as oracle_seconds
    from .replay.run import Replayed as Replayed
    from .report.compare import compare as compare
    from .report.evaluate import evaluate as evaluate
    from .report.records import Line as Line, Ratio as Ratio, Report as Report
    from .report.transfer import transfer as transfer
    from .report.whatif import sweep as sweep

__getattr__, __all__ = attach(
    __name__,
    {
        "drafters.run": "train_drafter",
        "fit.run": "train",
        "fit.trained": "Trained",
        "heads.classifiers": "StopClassifier",
        "heads.fitting": "FitOptions",
        "heads.mlp": "StopHeadModule TraceDataModule",
        "logged.offpolicy": "estimate_offline",
        "replay.arrays": "TraceArrays trace_arrays",
        "replay.bounds": "oracle_seconds",
        "replay.run": "Replayed",
        "report.compare": "compare",
        "report.evaluate": "evaluate",
        "report.records": "Line Ratio Report",
        "report.transfer": "transfer",
        "report.whatif": "sweep",
    },
)
