"""What a stop policy is: features, rules, heads, baselines, the folder on disk, plugins.

Names are imported when they are first used: errors and file helpers must not cost the import of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .baselines.fixed import Confidence, FixedLength
    from .contract import DraftStep, DraftTree, RoundOutcome, StopPolicy
    from .errors import InputError, PairError, PolicyError, SpecstopError, SpecstopWarning, TraceError
    from .latency.profile import CostTable, Profile
    from .learned.policy import LearnedPolicy
    from .storage.folder import from_pretrained, load_policy_folder, save_policy, save_pretrained
    from .storage.registry import load_policy

__all__ = [
    "Confidence",
    "CostTable",
    "DraftStep",
    "DraftTree",
    "FixedLength",
    "InputError",
    "LearnedPolicy",
    "PairError",
    "PolicyError",
    "Profile",
    "RoundOutcome",
    "SpecstopError",
    "SpecstopWarning",
    "StopPolicy",
    "TraceError",
    "from_pretrained",
    "load_policy",
    "load_policy_folder",
    "save_policy",
    "save_pretrained",
]

_HOME = {
    "Confidence": "baselines.fixed",
    "CostTable": "latency.profile",
    "DraftStep": "contract",
    "DraftTree": "contract",
    "FixedLength": "baselines.fixed",
    "InputError": "errors",
    "LearnedPolicy": "learned.policy",
    "PairError": "errors",
    "PolicyError": "errors",
    "Profile": "latency.profile",
    "RoundOutcome": "contract",
    "SpecstopError": "errors",
    "SpecstopWarning": "errors",
    "StopPolicy": "contract",
    "TraceError": "errors",
    "from_pretrained": "storage.folder",
    "load_policy": "storage.registry",
    "load_policy_folder": "storage.folder",
    "save_policy": "storage.folder",
    "save_pretrained": "storage.folder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
