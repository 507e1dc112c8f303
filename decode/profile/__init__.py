"""Measuring the latency profile, through the round loop."""

from .calibration import CalibrationRun, measure_profile
from .decisions import add_decisions, device_of, is_asked, loop_decisions, measure_decision

__all__ = [
    "CalibrationRun",
    "add_decisions",
    "device_of",
    "is_asked",
    "loop_decisions",
    "measure_decision",
    "measure_profile",
]
