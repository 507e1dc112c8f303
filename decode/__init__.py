"""The speculative decoder: caches, drafting, verification, the round loop, latency profile."""

from .loop import Speculator
from .noise import stream_key
from .pair import Pair, join, load_pair
from .plain import plain_texts
from .profile import measure_profile
from .records import Generation, Round, Tally
from .run import decode
from .settings import Settings

__all__ = [
    "Generation",
    "Pair",
    "Round",
    "Settings",
    "Speculator",
    "Tally",
    "decode",
    "join",
    "load_pair",
    "measure_profile",
    "plain_texts",
    "stream_key",
]
