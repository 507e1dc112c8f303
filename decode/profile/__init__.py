"""Measuring the latency profile, through the round loop."""

from .calibration import CalibrationRun, measure_profile
from .decisions import add_decisions, loop_decisions, measure_decision, missing_decisions, profile_device

__all__ = [
    "CalibrationRun",
    "add_decisions",
    "loop_decisions",
    "measure_decision",
    "measure_profile",
    "missing_decisions",
    "profile_device",
]
