"""The speculative decoder: trees, caches, drafters, verification, the round loop, latency profile, Hugging Face surface.

Names are imported when they are first used: a topology must not cost the import of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import attach

if TYPE_CHECKING:
    from .benchmark import bench as bench
    from .drafters import (
        LookupDrafter as LookupDrafter,
        ModelDrafter as ModelDrafter,
        SuffixDrafter as SuffixDrafter,
        find_drafters as find_drafters,
        load_drafter as load_drafter,
        save_drafter as save_drafter,
        with_drafter as with_drafter,
    )
    from .hf.generate import specstop_generate as specstop_generate
    from .hf.stopping import PolicyStoppingCriteria as PolicyStoppingCriteria
    from .loop import Speculator as Speculator
    from .models.pair import Pair as Pair, join as join, load_pair as load_pair, with_engine as with_engine
    from .plain import plain_texts as plain_texts
    from .profile import measure_profile as measure_profile
    from .records import Generation as Generation, Round as Round, Tally as Tally
    from .run import decode as decode
    from .settings import Settings as Settings
    from .topology import Topology as Topology, parse_tree as parse_tree
    from .verify.grammar import Grammar as Grammar
    from .verify.noise import stream_key as stream_key
    from .verify.sampling import SamplingParams as SamplingParams

__getattr__, __all__ = attach(
    __name__,
    {
        "benchmark": "bench",
        "drafters": "LookupDrafter ModelDrafter SuffixDrafter find_drafters load_drafter save_drafter with_drafter",
        "hf.generate": "specstop_generate",
        "hf.stopping": "PolicyStoppingCriteria",
        "loop": "Speculator",
        "verify.grammar": "Grammar",
        "verify.noise": "stream_key",
        "models.pair": "Pair join load_pair with_engine",
        "plain": "plain_texts",
        "profile": "measure_profile",
        "records": "Generation Round Tally",
        "run": "decode",
        "verify.sampling": "SamplingParams",
        "settings": "Settings",
        "topology": "Topology parse_tree",
    },
    is_callable=True,
)
