"""The speculative decoder: trees, caches, drafters, verification, the round loop, latency profile, Hugging Face surface.

Names are imported when they are first used: a topology must not cost the import of transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare.bench import bench
    from .drafters import LookupDrafter, ModelDrafter
    from .hf import PolicyStoppingCriteria, specstop_generate
    from .loop import Speculator
    from .noise import stream_key
    from .pair import Pair, join, load_pair, with_engine
    from .plain import plain_texts
    from .profile import measure_profile
    from .records import Generation, Round, Tally
    from .run import decode
    from .sampling import Shaping
    from .settings import Settings
    from .topology import Topology, parse_tree

__all__ = [
    "Generation",
    "LookupDrafter",
    "ModelDrafter",
    "Pair",
    "PolicyStoppingCriteria",
    "Round",
    "Settings",
    "Shaping",
    "Speculator",
    "Tally",
    "Topology",
    "bench",
    "decode",
    "join",
    "load_pair",
    "measure_profile",
    "parse_tree",
    "plain_texts",
    "specstop_generate",
    "stream_key",
    "with_engine",
]

_HOME = {
    "Generation": "records",
    "LookupDrafter": "drafters",
    "ModelDrafter": "drafters",
    "Pair": "pair",
    "PolicyStoppingCriteria": "hf",
    "Round": "records",
    "Settings": "settings",
    "Shaping": "sampling",
    "Speculator": "loop",
    "Tally": "records",
    "Topology": "topology",
    "bench": "compare.bench",
    "decode": "run",
    "join": "pair",
    "load_pair": "pair",
    "measure_profile": "profile",
    "parse_tree": "topology",
    "plain_texts": "plain",
    "specstop_generate": "hf",
    "stream_key": "noise",
    "with_engine": "pair",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
