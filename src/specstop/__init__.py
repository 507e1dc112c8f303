"""specstop: learn when to stop drafting in speculative decoding, and predict what it gains.

>>> import specstop as ss
>>> trace, profile = ss.load_trace("held-out"), ss.load_profile("profile.json")
>>> ss.evaluate(trace, profile, ["fixed:3", "confidence:0.4"]).table

Names are imported when they are first used, so that `import specstop` takes milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .policies import attach

if TYPE_CHECKING:
    from .collect.prompts import Prompt as Prompt, read_prompts as read_prompts
    from .collect.run import collect as collect
    from .collect.store import Trace as Trace, load_trace as load_trace
    from .decode.benchmark import bench as bench
    from .decode.hf.generate import specstop_generate as specstop_generate
    from .decode.loop import Speculator as Speculator
    from .decode.models.pair import Pair as Pair, load_pair as load_pair
    from .decode.profile import measure_profile as measure_profile
    from .decode.run import decode as decode
    from .decode.settings import Settings as Settings
    from .decode.topology import parse_tree as parse_tree
    from .policies.contract import (
        DraftStep as DraftStep,
        DraftTree as DraftTree,
        RoundOutcome as RoundOutcome,
        StopPolicy as StopPolicy,
    )
    from .policies.errors import SpecstopError as SpecstopError, SpecstopWarning as SpecstopWarning
    from .policies.features import custom_feature as custom_feature
    from .policies.learned import LearnedPolicy as LearnedPolicy
    from .policies.profile import Profile as Profile, load_profile as load_profile
    from .policies.registry import load_policy as load_policy
    from .policies.storage import save_policy as save_policy
    from .train.drafters.fit import train_drafter as train_drafter
    from .train.evaluate.evaluate import evaluate as evaluate
    from .train.evaluate.records import Report as Report
    from .train.export.deploy import deploy as deploy
    from .train.fit.run import train as train
    from .train.replay.run import replay as replay
    from .train.shipped_pair import shipped_pair as shipped_pair

_import, _names = attach(
    __name__,
    {
        "collect": "Prompt Trace load_trace read_prompts",
        "decode": "Pair Settings Speculator bench load_pair measure_profile parse_tree specstop_generate",
        "policies": "DraftStep DraftTree LearnedPolicy Profile RoundOutcome SpecstopError SpecstopWarning StopPolicy "
        "custom_feature load_policy load_profile save_policy",
        "train": "Report deploy train_drafter",
        "train.evaluate.evaluate": "evaluate",
        "train.shipped_pair": "shipped_pair",
        "train.replay.run": "replay",
    },
)
_CALLABLE = ("collect", "decode", "train")
"""Packages that can be called like their function of the same name."""

__all__ = sorted([*_names, *_CALLABLE, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name, or return the installed version."""
    if name == "__version__":
        from importlib.metadata import version  # takes 20 ms

        return version("specstop")
    return importlib.import_module(f".{name}", __name__) if name in _CALLABLE else _import(name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
