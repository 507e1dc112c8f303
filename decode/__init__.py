"""The speculative decoder: trees, caches, drafters, verification, the round loop, latency profile, Hugging Face surface."""

from .bench import bench
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
