"""Whether a policy was trained for what a run does; apart from the modes, which replay knows without any model library."""

from __future__ import annotations

from ...policies.contract import StopPolicy
from ...policies.learned.conditions import Conditions, tell_other_conditions
from ..settings import Settings
from .lossy import TargetInit
from .modes import resolve_mode
from .sampling import told


def tell_if_untrained(policy: StopPolicy, settings: Settings) -> None:
    """Warn where a learned policy was trained for another temperature, filter or verification than a run has."""
    temperature, shaping = told(settings.shaping, settings.temperature)
    name = resolve_mode(settings.verification, policy, settings.topology, temperature)
    greedy = temperature == 0.0 and name != TargetInit.name  # then all others accept alike
    tell_other_conditions(policy, Conditions(temperature, shaping, "" if greedy else name), "this run")
