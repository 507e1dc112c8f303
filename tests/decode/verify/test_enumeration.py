"""The rejection family is exact: every sequence of choices of the shipped loop, compared with the target's own texts."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import Case, all_cases, other_cases
from deciders import DECIDERS
from enumeration import EXACT, Enumerator, Proof, distance, prove, prove_within
from oracle import KINDS, Law, oracle_pair
from small_drafters import DRAFTERS
from specstop.decode.verify.noise import Purpose

LEAVES = 600
"""So many at most in each case here; `benchmarks/exactness.py` goes through all cases with more."""
LOSSY = 0.05
"""Mean total variation over random tables that a lossy mode exceeds."""


def sample(decider: str, count: int) -> list[Case]:
    """Return some cases of a policy, of different modes and shapes."""
    cases = [case for case in all_cases() if case.decider == decider]
    return random.Random(decider).sample(cases, count)


def check(case: Case, most: int = LEAVES) -> Proof:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # policies that fail say so, once each
        case, proof = prove_within(case, most)
    assert proof.reused == 0, f"{case}: a random number was used twice"
    assert proof.distance <= EXACT, f"{case}: {proof.distance:.1e} from the target's distribution"
    return proof


@pytest.mark.parametrize("decider", DECIDERS)
def test_texts_have_the_targets_distribution_under_any_policy(decider: str) -> None:
    proofs = [check(case, LEAVES // 4) for case in sample(decider, 2)]
    assert sum(proof.leaves for proof in proofs) > 30
    assert sum(proof.accepted for proof in proofs) > 0


@pytest.mark.parametrize("case", random.Random(1).sample(list(other_cases()), 8), ids=str)
def test_other_drafters_vocabularies_and_masks(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("mode", "tree"),
    [("rejection", "chain:2"), ("rejection", "2,1"), ("rejection_replace", "2,1"), ("block", "chain:2")],
)
def test_a_draft_may_know_fewer_tokens_than_the_target(mode: str, tree: str) -> None:
    """As of models of one family whose vocabularies are padded to different sizes."""
    for seed, eos in ((1, False), (2, True)):
        case = Case(mode, tree, "trims-unsure", "dense", seed, eos=eos, vocabulary=4, new=3, draft_knows=3)
        assert check(case).accepted > 0


LEAVING = ("trims-unsure", "trims-by-place", "trims-as-rounds-went", "selects-by-round")


@pytest.mark.parametrize(
    ("mode", "tree", "decider"),
    [
        *(("rejection", "2,1", decider) for decider in LEAVING),
        *(("rejection_replace", "2,1", decider) for decider in ("trims-by-place", "selects-by-round")),
        *(("block", "chain:2", decider) for decider in LEAVING),
    ],
)
def test_a_token_that_ends_the_text_is_left_out_like_any_other(mode: str, tree: str, decider: str) -> None:
    proof = check(Case(mode, tree, decider, "mixed", 2, eos=True))
    assert 0 < proof.dropped < proof.drafted


def test_a_policy_cannot_tell_an_end_of_text_by_the_branches_it_is_asked_about() -> None:
    for seed in (1, 2):
        check(Case("rejection", "2,1", "trims-by-alive", "mixed", seed, eos=True))


@pytest.mark.parametrize(
    ("mode", "deciders"),
    [  # each policy, and a chain is one for both rejection modes
        ("rejection", ("trims-unsure", "selects-by-round")),
        ("rejection_replace", ("trims-as-rounds-went", "selects-unsure")),
        ("block", ("trims-as-rounds-went", "selects-unsure")),
    ],
)
def test_policies_that_leave_tokens_out_do(mode: str, deciders: tuple[str, ...]) -> None:
    for decider in deciders:
        proof = check(Case(mode, "chain:2", decider, "mixed", 2, new=4))
        assert 0 < proof.dropped < proof.drafted, decider


@pytest.mark.parametrize("drafter", [*DRAFTERS, "suffix"])
@pytest.mark.parametrize(("mode", "tree"), [("rejection", "2,1"), ("rejection_replace", "2,1"), ("block", "chain:2")])
def test_drafters_without_a_draft_model(mode: str, tree: str, drafter: str) -> None:
    """Those on the target's states, the CTC-drafter among them, whose scores after a path are a distribution as well."""
    said = (0, 1, 0, 2, 0, 1)
    decider = "fixed" if mode == "rejection" else "trims-unsure"
    proof = check(Case(mode, tree, decider, "mixed", 4, drafter=drafter, prompt=said, eos=True, new=3))
    assert proof.accepted > 0 and proof.leaves > 10


def test_later_rounds_draft_and_accept() -> None:
    proof = prove(Case("rejection", "2,1", "fixed", "sparse", 1, new=5))
    assert proof.distance <= EXACT
    assert proof.later > 100


def test_a_lossy_mode_is_far_from_the_target() -> None:
    far = [prove(Case("typical", "2,1", "fixed", "dense", seed, new=3)).distance for seed in range(3)]
    assert sum(far) / len(far) > LOSSY


def test_the_enumerator_goes_through_all_answers_and_knows_what_depends() -> None:
    source = Enumerator()
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)

    def independent() -> tuple[int, bool]:
        return source.categorical(probs, 1, 0, Purpose.DRAFT), source.bernoulli(0.25, 1, 0, Purpose.ACCEPT)

    law = {run: source.probability for run in source.runs(independent)}
    assert set(law) == {(token, answer) for token in (0, 2, 3) for answer in (True, False)}
    assert law[2, True] == pytest.approx(0.3 * 0.25) and sum(law.values()) == pytest.approx(1.0)
    assert source.reused == 0

    def dependent() -> tuple[bool, int]:
        return source.bernoulli(0.25, 1, 0, Purpose.ACCEPT), source.categorical(probs, 1, 0, Purpose.ACCEPT)

    law = {run: source.probability for run in source.runs(dependent)}
    assert law == pytest.approx({(True, 0): 0.25, (False, 0): 0.25, (False, 2): 0.3, (False, 3): 0.2})
    assert source.reused > 0
    assert distance(law, {}) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_have_what_their_kind_says(kind: str) -> None:
    law = Law(3, 0, kind)
    rows = [law.rows((0, *divmod(at, 3))) for at in range(9)] + [law.rows((at,)) for at in range(40)]
    p, q = (torch.softmax(torch.stack(side), -1) for side in zip(*rows, strict=True))
    if kind == "dense":
        assert bool((p > 0).all() and (q > 0).all())
    elif kind == "sparse":
        assert bool(((p > 0).sum(-1) == 2).all() and ((q > 0).sum(-1) == 2).all())
    else:
        assert bool(((q > 0).sum(-1) == 1).any() and ((p > 0).sum(-1) == 1).any())
        assert bool((p == q).all(-1).any())
        assert bool(((p == 0) & (q > 0)).any() and ((p > 0) & (q == 0)).any())
    assert torch.equal(torch.stack(law.rows((1, 2))), torch.stack(Law(3, 0, kind).rows((1, 2))))


def test_an_oracle_tells_positions_and_masks_apart() -> None:
    law = Law(4, 0, "dense")
    model = oracle_pair(law).target

    def read(positions: list[int], mask: torch.Tensor | None) -> torch.Tensor:
        class Slots:
            update = staticmethod(lambda keys, values, layer: (keys, values))
            layers = (SimpleNamespace(kv=SimpleNamespace(call=None)),)

        ids = torch.tensor([[2, 0, 1]])
        return model(ids, mask, torch.tensor([positions]), Slots(), 1).logits[0, -1]

    causal = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    right = law.rows((2, 0, 1))[0]
    assert torch.equal(read([0, 1, 2], None), right) and torch.equal(read([0, 1, 2], causal), right)
    assert not torch.equal(read([0, 1, 3], causal), right)
    blind = causal.clone()
    blind[..., 2, 1] = False
    assert not torch.equal(read([0, 1, 2], blind), right)
    assert torch.equal(read([0, 2, 1], causal), law.rows((2, 1, 0))[0])


def test_cases_are_as_many_as_they_should_be() -> None:
    cases = list(all_cases())
    assert len(cases) == len(set(cases)) == len(DECIDERS) * (9 + 9 + 3) * 3 * 2
    assert {replace(case, seed=0, decider="fixed").eos for case in cases} == {False, True}
