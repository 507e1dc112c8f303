"""The latency profile, measured through the round loop: `measuring` times, the others say what."""

from .alone import measure_decision
from .calibration import CalibrationRun, measure_profile
from .decisions import add_decisions, device_of, is_asked, loop_decisions, streams_of

__all__ = [
    "CalibrationRun",
    "add_decisions",
    "device_of",
    "is_asked",
    "loop_decisions",
    "measure_decision",
    "measure_profile",
    "streams_of",
]  # fmt: skip
