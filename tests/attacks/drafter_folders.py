"""Damaged folders of drafters, as `policy_folders` damages policies: each is refused in one line, or proposes as before.

A forgery that is read as another drafter must propose without failing: whatever it proposes, the target decides.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from specstop.decode.drafters import find_drafter
from specstop.decode.drafters.folder import TrainedDrafter, load_drafter, save_drafter
from specstop.decode.drafters.networks import KINDS, Shape
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength
from specstop.train.drafters.fit import initialize
from transformers import LlamaConfig, LlamaForCausalLM

from .folders import damage_folders

COUNT, QUICK = 1000, 100
"""Damaged folders in a full run, and in a quick one."""

HIDDEN, VOCABULARY = 8, 12


def small_target() -> Pair:
    """Return a target of a few hundred weights, without a draft."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        return join(LlamaForCausalLM(config).eval(), None)


def good_folders(pair: Pair, room: Path) -> list[Path]:
    """Write a small drafter of each kind."""
    folders = []
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for kind in KINDS:
            network: Any = KINDS[kind](Shape(HIDDEN, VOCABULARY, 2, 8, 2))
            initialize(network, pair.target.lm_head.weight)
            made = TrainedDrafter(
                kind, network, pair.fingerprint["target"], {"prompts": 3}, {"acceptance": [0.5, 0.25]}
            )
            folders.append(save_drafter(made, room / f"good-{kind}"))
    return folders


def drafted(pair: Pair, folder: Path) -> str:
    """Return a fingerprint of what a drafter says of itself, proposes and makes of a text."""
    read = load_drafter(folder)
    assert read.kind in KINDS
    drafter = find_drafter(f"{read.kind}:{folder}", pair)
    if hasattr(drafter, "keep_states"):
        drafter.keep_states()
    made = Speculator(pair, FixedLength(2), Settings(0.0, 6, 2), drafter=drafter).generate([3, 1, 4])
    rounds = [(r.drafted, r.verified, r.accepted) for r in made.rounds]
    return repr((read.kind, read.target, read.provenance, read.metrics, rounds, made.tokens))


def attack(count: int, seed: int, room: Path) -> tuple[Counter[str], list[str]]:
    """Damage `count` folders; return how often what happened, and the faults found."""
    pair = small_target()
    folders = good_folders(pair, room)
    return damage_folders(folders, lambda folder: drafted(pair, folder), InputError, count, seed, room)
