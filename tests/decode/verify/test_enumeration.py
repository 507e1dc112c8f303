"""The rejection family is lossless: all random choices of the loop are enumerated and its texts compared with theory."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, all_cases, other_cases
from deciders import DECIDERS
from enumeration import EXACT, Proof, prove, prove_within
from joint_policies import JOINT
from small_drafters import DRAFTERS
from specstop.decode import model_source
from specstop.decode.model_source import ModelSource
from specstop.decode.models.cache import KVCache
from specstop.decode.round_state import RoundState
from specstop.decode.topology import Topology
from specstop.decode.verify import modes
from specstop.decode.verify.modes import Block, Rejection, RejectionReplace
from specstop.decode.verify.noise import Choices, Purpose
from specstop.policies.published.tetris import Tetris

LEAVES = 600
"""Limit of each case; `benchmarks/exactness.py` enumerates all cases with more."""
MODES = [("rejection", "chain:2"), ("rejection", "2,1"), ("rejection_replace", "2,1"), ("block", "chain:2")]


def check(case: Case, most: int = LEAVES, beside: int = 0) -> Proof:
    """Prove a case, alone or in a batch with other streams."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # policies that fail
        case, proof = prove_within(case, most, beside)
    assert proof.reused == 0, f"{case}: a random number was used twice"
    assert proof.distance <= EXACT, f"{case}: {proof.distance:.1e} from the target's distribution"
    return proof


@pytest.mark.parametrize("decider", DECIDERS)
def test_texts_have_the_distribution_of_the_target_under_any_policy(decider):
    cases = [case for case in all_cases() if case.decider == decider]
    proofs = [check(case, LEAVES // 4) for case in random.Random(decider).sample(cases, 2)]
    assert sum(proof.leaves for proof in proofs) > 30
    assert sum(proof.accepted for proof in proofs) > 0


@pytest.mark.parametrize("case", random.Random(1).sample(list(other_cases()), 8), ids=str)
def test_prompt_lookup_larger_vocabularies_and_eager_masks(case):
    check(case)


@pytest.mark.parametrize(("mode", "tree"), MODES)
def test_a_draft_may_know_fewer_tokens_than_the_target(mode, tree):
    """As in model families whose vocabularies are padded to different sizes."""
    for seed, eos in ((1, False), (2, True)):
        case = Case(mode, tree, "trims-unsure", "dense", seed, eos=eos, vocabulary=4, new=3, draft_knows=3)
        assert check(case).accepted > 0


@pytest.mark.parametrize("decider", ["trims-unsure", "trims-by-place", "trims-as-rounds-went", "selects-by-round"])
@pytest.mark.parametrize(("mode", "tree"), MODES[1:])
def test_policies_may_exclude_a_token_that_ends_the_text(mode, tree, decider):
    proof = check(Case(mode, tree, decider, "mixed", 2, eos=True))
    assert 0 < proof.dropped < proof.drafted


@pytest.mark.parametrize("seed", [1, 2])
def test_the_mask_of_branches_does_not_reveal_an_end_of_text(seed):
    check(Case("rejection", "2,1", "trims-by-alive", "mixed", seed, eos=True))


@pytest.mark.parametrize("drafter", [*DRAFTERS, "suffix"])
@pytest.mark.parametrize(("mode", "tree"), MODES[1:])
def test_drafters_without_a_draft_model(mode, tree, drafter):
    decider = "fixed" if mode == "rejection" else "trims-unsure"
    case = Case(mode, tree, decider, "mixed", 4, drafter=drafter, prompt=(0, 1, 0, 2, 0, 1), eos=True, new=3)
    proof = check(case)
    assert proof.accepted > 0 and proof.leaves > 10


def test_later_rounds_draft_and_accept():
    proof = prove(Case("rejection", "2,1", "fixed", "sparse", 1, new=5))
    assert proof.distance <= EXACT
    assert proof.later > 100


@pytest.mark.parametrize(("mode", "tree"), MODES)
@pytest.mark.parametrize("decider", ["trims-unsure", "selects-by-round"])
def test_a_stream_of_a_batch_has_the_distribution_of_the_target(mode, tree, decider):
    """Regardless of what the streams beside it draw, and of when they end."""
    assert check(Case(mode, tree, decider, "mixed", 3, eos=True, new=3), 400, beside=1).leaves > 5
    assert check(Case(mode, tree, decider, "mixed", 3, new=3), 400, beside=1).shared > 5


@pytest.mark.parametrize(
    ("decider", "mode", "tree"),
    [
        *((name, "rejection", "chain:3") for name in JOINT if name != "tetris"),
        *((name, *shape) for name in ("adaptive linear", "batch best stepped")
          for shape in (("block", "chain:2"), ("rejection", "2,1"))),
    ],
)  # fmt: skip
def test_policies_that_weigh_streams_against_each_other(decider, mode, tree):
    assert check(Case(mode, tree, decider, "mixed", 3, new=4), 60, beside=1).shared > 5


def test_tetris_would_bias_rejection(monkeypatch):
    """`check_mode` refuses it: it sends tokens because of their probability."""
    monkeypatch.setattr("specstop.decode.loop.check_mode", lambda *args: None)
    monkeypatch.setattr("specstop.decode.model_source.is_trimming", lambda policy: False)
    monkeypatch.setitem(JOINT, "tetris", lambda: Tetris(0.5, 1))
    _, proof = prove_within(Case("rejection", "chain:2", "tetris", "mixed"), 200, beside=1)
    assert proof.distance > 1e-3 and proof.dropped > 0 and proof.shared > 5


def test_a_lossy_mode_is_far_from_the_target():
    distances = [prove(Case("typical", "2,1", "fixed", "dense", seed, new=3)).distance for seed in range(3)]
    assert sum(distances) / len(distances) > 0.05


# Faults put into the product code are detected

CHAIN = Case("rejection", "chain:2", kind="dense", seed=1, new=3)
TREE = Case("rejection", "2,1", kind="dense", seed=1, eos=True, new=3)
BLOCK = replace(CHAIN, mode="block")
BY_PREFIX = Case("rejection", "2,1", kind="sparse", seed=4, sampling="by-prefix")


def accept_with(kind: type[Rejection], change: Callable[..., tuple[Any, ...]]) -> tuple[Any, str, Any]:
    """Return a fault that calls `accept_one` with changed arguments (mode, round, stream, sent, sampled)."""
    original = kind.accept_one
    return kind, "accept_one", lambda *args: original(*change(*args))


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return a fault whose method calls `change(original, *args)`."""
    original = getattr(owner, name)
    return owner, name, lambda *args, **options: change(original, *args, **options)


def target_rows_shifted(mode: Any, round: RoundState, stream: int, sent: Any, sampled: torch.Tensor) -> Any:
    return mode, round, stream, sent, sampled[[sent.index(max(round.topology.parent[row], 0)) for row in sent]]


def draft_rows_shifted(mode: Any, round: RoundState, *args: Any) -> Any:
    moved, parent = copy.copy(round), round.topology.parent
    moved.draft_probs = {(s, row): round.draft_probs[s, max(parent[row], 0)] for s, row in round.draft_probs}
    return mode, moved, *args


def ends_are_kept(original: Any, source: ModelSource, *args: Any, **options: Any) -> None:
    original(source, *args, **options)
    source.decides_ended = False


NO_RESIDUAL = (modes, "residual", lambda p, q, otherwise=None: p if otherwise is None else otherwise)
FAULTS: dict[str, tuple[Case, tuple[Any, str, Any]]] = {
    "no residual in a chain": (CHAIN, NO_RESIDUAL),
    "no residual in a tree": (TREE, NO_RESIDUAL),
    "no residual in a block": (BLOCK, NO_RESIDUAL),
    "target rows of the grandparent in a tree": (TREE, accept_with(Rejection, target_rows_shifted)),
    "target rows of the grandparent in a block": (BLOCK, accept_with(Block, target_rows_shifted)),
    "draft rows of the grandparent": (replace(CHAIN, new=4), accept_with(Rejection, draft_rows_shifted)),
    "selects once everything is drafted": (
        replace(TREE, new=4, decider="selects-by-token"), (model_source, "is_trimming", lambda policy: False),
    ),
    "never drops an end of text": (
        Case("rejection", "chain:2", "trims-unsure", "mixed", 2, eos=True),
        wrapped(ModelSource, "__init__", ends_are_kept),
    ),
    "first token from a sharper distribution": (
        CHAIN, wrapped(Rejection, "start", lambda original, mode, sampled, choices: original(mode, 1.1 * sampled, choices)),
    ),
    "rounds share their numbers": (
        CHAIN,
        wrapped(Choices, "__init__", lambda original, self, source, n, *args: original(self, source, min(n, 1), *args)),
    ),
    "siblings without replacement": (
        replace(TREE, tree="2"), accept_with(Rejection, lambda mode, *args: (RejectionReplace(), *args)),
    ),
    "siblings in reverse order": (
        replace(TREE, tree="2"),
        wrapped(RoundState, "drawn_below", lambda original, round, stream, row: original(round, stream, row)[::-1]),
    ),
    "a path that is not compacted": (BY_PREFIX, (KVCache, "move", lambda self, stream, slots, to: None)),
    "siblings see each other": (
        BY_PREFIX, (Topology, "sees", property(lambda self: torch.ones(len(self), len(self), dtype=torch.bool).tril())),
    ),
    "processors see siblings": (
        BY_PREFIX, (RoundState, "path_tokens", lambda self, stream, row: self.tokens[stream, : row + 1].tolist()),
    ),
}  # fmt: skip

is_exact = functools.cache(lambda case: prove(case).distance <= EXACT)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_biases_the_texts(name, monkeypatch):
    case, fault = FAULTS[name]
    assert is_exact(case)
    monkeypatch.setattr(*fault)
    assert prove(case).distance > 1e-3


def test_a_random_number_that_is_used_twice_is_detected(monkeypatch):
    """The number that accepted a token also draws the one after it."""
    original = Choices.draw

    def shared(self: Choices, probs: torch.Tensor, node: int, purpose: Purpose) -> int:
        return original(self, probs, node, Purpose.ACCEPT if purpose is Purpose.RESIDUAL else purpose)

    monkeypatch.setattr(Choices, "draw", shared)
    proof = prove(CHAIN)
    assert proof.distance > 1e-3 and proof.reused > 0
