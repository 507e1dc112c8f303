"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report."""

from .bounds import clairvoyant_seconds
from .data import TraceArrays, trace_arrays
from .evaluate import evaluate
from .records import Line, Ratio, Report
from .replay import Replayed, replay
from .run import Trained, train

__all__ = [
    "Line",
    "Ratio",
    "Replayed",
    "Report",
    "TraceArrays",
    "Trained",
    "clairvoyant_seconds",
    "evaluate",
    "replay",
    "trace_arrays",
    "train",
]
