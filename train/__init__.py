"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report.

Names are imported when they are first used: replay must not cost the import of what fits heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import attach

if TYPE_CHECKING:
    from ..decode.benchmark import Ratio as Ratio
    from .drafters.choice import SureChoice as SureChoice, choose_sure as choose_sure
    from .drafters.run import train_drafter as train_drafter
    from .evaluate.places import Place as Place, PlaceTable as PlaceTable, evaluate_places as evaluate_places
    from .evaluate.records import Line as Line, Report as Report
    from .evaluate.report_comparison import compare_reports as compare_reports, read_report as read_report
    from .export.deploy import deploy as deploy
    from .fit.run import train as train
    from .fit.trained import Trained as Trained
    from .heads.fitting import FitOptions as FitOptions
    from .heads.kinds.classifiers import StopClassifier as StopClassifier
    from .heads.kinds.mlp import StopHeadModule as StopHeadModule, TraceDataModule as TraceDataModule
    from .replay.bounds.oracle import oracle_seconds as oracle_seconds
    from .replay.run import Replayed as Replayed
    from .replay.traces.arrays import TraceArrays as TraceArrays, trace_arrays as trace_arrays

__getattr__, __all__ = attach(
    __name__,
    {
        "drafters.choice": "SureChoice choose_sure",
        "drafters.run": "train_drafter",
        "export.deploy": "deploy",
        "fit.run": "train",
        "fit.trained": "Trained",
        "heads.kinds.classifiers": "StopClassifier",
        "heads.fitting": "FitOptions",
        "heads.kinds.mlp": "StopHeadModule TraceDataModule",
        "evaluate.places": "Place PlaceTable evaluate_places",
        "evaluate.report_comparison": "compare_reports read_report",
        "replay.traces.arrays": "TraceArrays trace_arrays",
        "replay.bounds.oracle": "oracle_seconds",
        "replay.run": "Replayed",
        "evaluate.records": "Line Ratio Report",
    },
)
