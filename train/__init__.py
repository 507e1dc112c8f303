"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report.

Names are imported when they are first used: replay must not cost the import of what fits heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import attach

if TYPE_CHECKING:
    from ..decode.benchmark import Ratio as Ratio
    from .drafters.choice import SureChoice as SureChoice, choose_sure as choose_sure
    from .drafters.fit import train_drafter as train_drafter
    from .export.deploy import deploy as deploy
    from .fit.run import Trained as Trained, train as train
    from .heads import head_class as head_class, make_head as make_head
    from .heads.base import HeadEstimator as HeadEstimator
    from .off_policy.estimate import estimate_offline as estimate_offline
    from .replay.bounds.oracle import oracle_seconds as oracle_seconds
    from .replay.run import Replayed as Replayed
    from .replay.traces.arrays import TraceArrays as TraceArrays, trace_arrays as trace_arrays
    from .report.comparing.compare import compare as compare
    from .report.comparing.drafters import BothChoice as BothChoice, choose_both as choose_both
    from .report.evaluate import evaluate as evaluate
    from .report.records import Line as Line, Report as Report
    from .report.whatif.sweep import sweep as sweep
    from .report.whatif.transfer import transfer as transfer

__getattr__, __all__ = attach(
    __name__,
    {
        "drafters.choice": "SureChoice choose_sure",
        "drafters.fit": "train_drafter",
        "export.deploy": "deploy",
        "fit.run": "Trained train",
        "heads": "head_class make_head",
        "heads.base": "HeadEstimator",
        "off_policy.estimate": "estimate_offline",
        "replay.traces.arrays": "TraceArrays trace_arrays",
        "replay.bounds.oracle": "oracle_seconds",
        "replay.run": "Replayed",
        "report.comparing.compare": "compare",
        "report.comparing.drafters": "BothChoice choose_both",
        "report.evaluate": "evaluate",
        "report.records": "Line Ratio Report",
        "report.whatif.transfer": "transfer",
        "report.whatif.sweep": "sweep",
    },
)
