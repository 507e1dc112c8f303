"""The rejection family is lossless: all random choices are enumerated and the law of the texts equals the target's."""

from __future__ import annotations

import random
import warnings

import pytest
from cases import Case, all_cases, other_cases
from deciders import DECIDERS
from enumeration import EXACT, Proof, prove, prove_within
from joint_policies import JOINT
from small_drafters import DRAFTERS
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


@pytest.mark.parametrize(("mode", "tree"), [*MODES[:3], ("block", "chain:3")])
@pytest.mark.parametrize(("kind", "seed", "sampling"), [("dense", 1, "plain"), ("sparse", 4, "by-prefix")])
def test_texts_of_a_fixed_length_have_the_distribution_of_the_target(mode, tree, kind, seed, sampling):
    """Also with a processor that reads the whole prefix, which must be the path of each candidate."""
    new = 3 if kind == "dense" and tree == "2,1" else 4  # two levels of a dense tree have thousands of leaves
    assert check(Case(mode, tree, "fixed", kind, seed, sampling, new=new), 6000).accepted > 0


@pytest.mark.parametrize("case", random.Random(1).sample(list(other_cases()), 8), ids=str)
def test_prompt_lookup_larger_vocabularies_and_eager_masks(case):
    check(case)


@pytest.mark.parametrize(("mode", "tree"), MODES)
def test_a_draft_may_know_fewer_tokens_than_the_target(mode, tree):
    """As in model families whose vocabularies are padded to different sizes."""
    for seed, eos in ((1, False), (2, True)):
        case = Case(mode, tree, "trims-unsure", "dense", seed, eos=eos, vocabulary=4, new=3, draft_knows=3)
        assert check(case).accepted > 0


@pytest.mark.parametrize(("mode", "tree"), MODES[1:])
@pytest.mark.parametrize("decider", ["trims-unsure", "trims-by-place", "selects-by-round"])
def test_policies_may_exclude_a_token_that_ends_the_text(mode, tree, decider):
    proof = check(Case(mode, tree, decider, "mixed", 2, eos=True))
    assert 0 < proof.dropped < proof.drafted


@pytest.mark.parametrize(("mode", "tree"), MODES)
@pytest.mark.parametrize(("decider", "seed"), [("trims-by-alive", 1), ("selects-by-token", 2)])
def test_a_policy_that_looks_for_the_drawn_tokens_finds_none(mode, tree, decider, seed):
    """In the mask of branches, which reveals no end of text, and in the tree that it selects from."""
    check(Case(mode, tree, decider, "mixed", seed, eos=True))


@pytest.mark.parametrize(
    ("mode", "tree", "drafter"), [(*MODES[1 + at % 3], name) for at, name in enumerate([*DRAFTERS, "suffix"])]
)
def test_drafters_without_a_draft_model(mode, tree, drafter):
    decider = "fixed" if mode == "rejection" else "trims-unsure"
    case = Case(mode, tree, decider, "mixed", 4, drafter=drafter, prompt=(0, 1, 0, 2, 0, 1), eos=True, new=3)
    proof = check(case)
    assert proof.accepted > 0 and proof.leaves > 10


@pytest.mark.parametrize(("mode", "tree"), MODES)
@pytest.mark.parametrize("decider", ["trims-unsure", "selects-by-round"])
def test_a_stream_of_a_batch_has_the_distribution_of_the_target(mode, tree, decider):
    """It is independent of the other streams and of when they end."""
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
