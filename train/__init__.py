"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report.

Names are imported when they are first used: replay must not cost the import of what fits heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import attach

if TYPE_CHECKING:
    from ..decode.benchmark import Ratio as Ratio
    from .drafters.fit import train_drafter as train_drafter
    from .evaluate.records import Line as Line, Report as Report
    from .evaluate.report_comparison import compare_reports as compare_reports, read_report as read_report
    from .export.deploy import deploy as deploy
    from .fit.run import TrainResult as TrainResult, train as train
    from .heads import head_class as head_class, make_head as make_head
    from .heads.base import HeadEstimator as HeadEstimator
    from .replay.arrays import TraceArrays as TraceArrays, trace_arrays as trace_arrays
    from .replay.bounds import oracle_seconds as oracle_seconds
    from .replay.rounds import Rounds as Rounds

__getattr__, __all__ = attach(
    __name__,
    {
        "drafters.fit": "train_drafter",
        "export.deploy": "deploy",
        "fit.run": "TrainResult train",
        "heads": "head_class make_head",
        "heads.base": "HeadEstimator",
        "evaluate.report_comparison": "compare_reports read_report",
        "replay.arrays": "TraceArrays trace_arrays",
        "replay.bounds": "oracle_seconds",
        "replay.rounds": "Rounds",
        "evaluate.records": "Line Ratio Report",
    },
    is_callable=True,
)
