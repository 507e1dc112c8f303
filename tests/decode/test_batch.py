"""A text in a batch equals the text decoded alone, for every verification mode, drafter and policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from conftest import NEW, VOCABULARY, build_model
from joint_policies import JOINT, MOST
from oracle import Law, oracle_pair
from small_drafters import DRAFTERS, small_drafter
from specstop.decode.drafters import find_drafters
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.records import Generation
from specstop.decode.settings import Settings
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.registry import load_policy

MODES = [
    ("match", None), ("match", "3,2,1"), ("rejection", None), ("rejection", "2,2"), ("rejection_replace", "2,2"),
    ("block", None), ("typical", "2,2"),
]  # fmt: skip
GREEDY = (("match", None), ("match", "3,2,1"), ("rejection", "2,2"), ("block", None))


def counts(generation: Generation) -> list[tuple[int, ...]]:
    """Return the numbers of rounds that do not depend on time."""
    return [(r.anchor, r.context, r.drafted, r.verified, r.accepted, r.committed, r.decisions, r.backlog, r.cut)
            for r in generation.rounds]  # fmt: skip


def same_in_batches(
    pair: Pair, prompts: Sequence[list[int]], policy: StopPolicy, settings: Settings, drafter: str = "model",
    samplings: Sequence[SamplingParams | None] = (),
) -> list[Generation]:  # fmt: skip
    """Compare texts and rounds alone with those in batches of several sizes, in both orders, with loops used again."""
    samplings = samplings or [None] * len(prompts)
    requests = [Request(p, 7 * at - 3, sampling=s) for at, (p, s) in enumerate(zip(prompts, samplings, strict=True))]

    def loop(batch: int) -> Speculator:
        proposers = [small_drafter(drafter, pair)] if drafter in DRAFTERS else find_drafters(drafter, pair)
        return Speculator(pair, policy, settings, drafters=proposers, batch=batch)

    alone = loop(1).run(requests)
    for batch, orders in ((2, (1,)), (3, (1, -1)), (len(requests), (-1,))):
        together = loop(batch)
        for order in orders:
            generations = together.run(requests[::order])[::order]
            assert [g.tokens for g in generations] == [g.tokens for g in alone]
            assert [counts(g) for g in generations] == [counts(g) for g in alone]
    return alone


@pytest.mark.parametrize(
    ("mode", "tree", "temperature"), [*((*mode, 0.7) for mode in MODES), *((*mode, 0.0) for mode in GREEDY)]
)
def test_a_text_is_the_same_in_any_batch(pair, prompt_ids, mode, tree, temperature):
    settings = Settings(temperature, NEW, 4, verification=mode, tree=tree)
    alone = same_in_batches(pair, prompt_ids[:5], FixedLength(3), settings)
    assert len({len(g.tokens) for g in alone}) > 1, "texts end at different times"


@pytest.mark.parametrize(
    ("spec", "tree", "drafter"),
    [*((spec, tree, "model") for spec in ("confidence:0.3", "adaedl") for tree in (None, "3,2,1")),
     *(("fixed:3", "2,1,1", drafter) for drafter in ("lookup", "suffix+model", *DRAFTERS))],
)  # fmt: skip
def test_a_text_is_the_same_in_any_batch_with_every_drafter_and_stopping_policy(
    plain_pair, prompt_ids, spec, tree, drafter
):
    prompts = [ids * 3 for ids in prompt_ids[:4]] if drafter == "lookup" else prompt_ids[:4]
    settings = Settings(0.7, NEW, 4, tree=tree, verification="match")
    alone = same_in_batches(plain_pair, prompts, load_policy(spec), settings, drafter)
    assert sum(r.accepted for g in alone for r in g.rounds) > 0


def test_a_text_is_the_same_in_any_batch_with_processors_of_each_text(pair, prompt_ids):
    settings = Settings(0.7, NEW, verification="match")
    samplings = [None, SamplingParams(top_p=0.6), SamplingParams(repetition_penalty=1.3), None, SamplingParams(top_k=3)]
    same_in_batches(pair, prompt_ids[:5], Confidence(0.3), settings, samplings=samplings)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_text_is_the_same_in_any_batch_with_a_draft_of_fewer_tokens(tokenizer, temperature):
    """Backlogs of streams differ, so that a packed call returns one row of several."""
    pair = join(build_model(vocab_size=VOCABULARY + 8), build_model(1), tokenizer)
    prompts = [[7, 8], [9], [VOCABULARY + 1, 7], [8, 9, 10]]
    same_in_batches(pair, prompts, FixedLength(3), Settings(temperature, 14, ignore_eos=True, verification="match"))


# Policies that weigh the streams of a batch against each other


def run_oracle(policy: StopPolicy, temperature: float, batch: int, ends: bool = True) -> list[Generation]:
    pair = oracle_pair(Law(3, 4, "mixed"), (2,) if ends else ())
    requests = [Request((0, at % 3, 1)[: 1 + at % 3], 11 * at + 2) for at in range(5)]
    return Speculator(pair, policy, Settings(temperature, 9, MOST, verification="match"), batch=batch).run(requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", JOINT)
def test_texts_of_joint_policies_are_those_of_plain_decoding(name, temperature):
    plain, drafted = [g.tokens for g in run_oracle(FixedLength(0), temperature, 1)], 0
    for batch in (1, 2, 3):
        generations = run_oracle(JOINT[name](), temperature, batch)
        assert [g.tokens for g in generations] == plain
        drafted += sum(r.drafted for g in generations for r in g.rounds)
    assert len(set(plain)) > 1 and drafted > 0
