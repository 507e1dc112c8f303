"""Texts decoded side by side: each is what it is alone, under every verification, whatever is beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cases import Case
from conftest import NEW, VOCABULARY, build_model
from enumeration import EXACT, prove_within
from small_drafters import DRAFTERS, small_drafter
from specstop.decode.drafters import find_drafter
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair, join
from specstop.decode.records import Generation
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from specstop.policies.registry import load_policy

MODES = [
    ("match", None), ("match", "3,2,1"), ("rejection", None), ("rejection", "2,2"), ("rejection_replace", "2,2"),
    ("block", None), ("typical", "2,2"),
]  # fmt: skip


def requests(prompt_ids: Sequence[list[int]]) -> list[Request]:
    return [Request(prompt, 7 * at - 3) for at, prompt in enumerate(prompt_ids)]


def rounds(generation: Generation) -> list[tuple[int, ...]]:
    """What is counted of a text's rounds; its seconds are its own."""
    return [(r.anchor, r.context, r.drafted, r.verified, r.accepted, r.committed, r.decisions, r.backlog, r.cut)
            for r in generation.rounds]  # fmt: skip


def same_in_batches(
    pair: Pair, prompt_ids: Sequence[list[int]], policy: StopPolicy, settings: Settings, drafter: str = "model"
) -> list[Generation]:
    """Decode alone and in batches of several sizes, with others in other places, and compare texts and rounds.

    Every size in one order of the texts, one of them in both: other neighbours, and the loop is used again.
    """
    asked = requests(prompt_ids)
    alone = Speculator(pair, policy, settings, drafter=find_drafter(drafter, pair)).run(asked)
    for batch, orders in ((2, (1,)), (3, (1, -1)), (len(asked), (-1,))):
        loop = Speculator(pair, policy, settings, drafter=find_drafter(drafter, pair), batch=batch)
        for order in orders:
            made = loop.run(asked[::order])[::order]
            assert [g.tokens for g in made] == [g.tokens for g in alone]
            assert [rounds(g) for g in made] == [rounds(g) for g in alone]
    return alone


GREEDY = (("match", None), ("match", "3,2,1"), ("rejection", "2,2"), ("block", None))


@pytest.mark.parametrize(
    ("mode", "tree", "temperature"), [*((*mode, 0.7) for mode in MODES), *((*mode, 0.0) for mode in GREEDY)]
)
def test_a_text_is_the_same_in_any_batch(
    pair: Pair, prompt_ids: list[list[int]], mode: str, tree: str | None, temperature: float
) -> None:
    settings = Settings(temperature, NEW, 4, verification=mode, tree=tree)
    made = same_in_batches(pair, prompt_ids[:5], FixedLength(3), settings)
    assert len({len(g.tokens) for g in made}) > 1  # they end at different times, and others take their places


@pytest.mark.parametrize(
    ("spec", "tree"),
    [("confidence:0.3", None), ("confidence:0.3", "3,2,1"), ("adaedl", None), ("product:0.2", "3,2,1")],
)
def test_policies_that_stop_streams_at_different_depths_and_remember(
    pair: Pair, prompt_ids: list[list[int]], spec: str, tree: str | None
) -> None:
    policy = load_policy(spec)
    assert not policy.carries  # or what it remembers of a text would be the next one's in its stream
    same_in_batches(pair, prompt_ids[:4], policy, Settings(0.7, NEW, 4, tree=tree, verification="match"))


def test_lookup_needs_no_draft_in_a_batch_either(pair: Pair, prompt_ids: list[list[int]]) -> None:
    prompts = [ids * 3 for ids in prompt_ids[:4]]
    made = same_in_batches(pair, prompts, FixedLength(3), Settings(0.0, NEW), "lookup")
    assert sum(r.accepted for g in made for r in g.rounds) > 0


@pytest.mark.parametrize("kind", DRAFTERS)
def test_heads_are_told_of_each_streams_own_states(plain_pair: Pair, prompt_ids: list[list[int]], kind: str) -> None:
    asked = requests(prompt_ids[:4])
    settings = Settings(0.7, NEW, tree="2,1,1", verification="match")
    one, several = (
        Speculator(plain_pair, FixedLength(3), settings, drafter=small_drafter(kind, plain_pair), batch=n)
        for n in (1, 3)
    )
    alone, made = one.run(asked), several.run(asked)
    assert [g.tokens for g in made] == [g.tokens for g in alone]
    assert [rounds(g) for g in made] == [rounds(g) for g in alone]


def test_processors_see_each_texts_own_prefix(pair: Pair, prompt_ids: list[list[int]]) -> None:
    for sampling in (
        SamplingParams(repetition_penalty=1.3, top_p=0.9),
        SamplingParams(no_repeat_ngram=2, min_new_tokens=4),
    ):
        same_in_batches(
            pair, prompt_ids[:4], FixedLength(2), Settings(0.7, NEW, sampling=sampling, verification="match")
        )


class Likely(StopPolicy):
    """Goes on after tokens that were likely where they were drawn, and well ahead of others."""

    name, max_depth, features = "likely", 4, ("drawn_prob", "noisy_lead")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & ((step.depth == 0) | (step.features > (0.15, 0.5)).all(-1)), state


def test_texts_of_a_batch_may_be_filtered_each_in_its_own_way(pair: Pair, prompt_ids: list[list[int]]) -> None:
    samplings = [None, SamplingParams(top_p=0.6), SamplingParams(repetition_penalty=1.3), None, SamplingParams(top_k=3)]
    asked = [Request(own, at, sampling=some) for at, (own, some) in enumerate(zip(prompt_ids, samplings, strict=False))]
    settings = Settings(0.7, NEW, verification="match")
    alone = Speculator(pair, Likely(), settings).run(asked)
    assert len({r.drafted for g in alone for r in g.rounds}) > 2
    for batch in (2, 5):
        made = Speculator(pair, Likely(), settings, batch=batch).run(asked)
        assert [g.tokens for g in made] == [g.tokens for g in alone]
        assert [rounds(g) for g in made] == [rounds(g) for g in alone]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_of_fewer_tokens_than_the_target_has(tokenizer: object, temperature: float) -> None:
    """Backlogs of streams differ, so that of some a packed call wants one row of several."""
    pair = join(build_model(vocab_size=VOCABULARY + 8), build_model(1), tokenizer)  # type: ignore[arg-type]
    assert pair.vocabulary == VOCABULARY + 8
    prompts = [[7, 8], [9], [VOCABULARY + 1, 7], [8, 9, 10]]
    same_in_batches(pair, prompts, FixedLength(3), Settings(temperature, 14, ignore_eos=True, verification="match"))


@pytest.mark.parametrize(
    ("mode", "tree"),
    [("rejection", "chain:2"), ("rejection", "2,1"), ("rejection_replace", "2,1"), ("block", "chain:2")],
)
@pytest.mark.parametrize("decider", ["trims-unsure", "selects-by-round"])
def test_one_stream_enumerated_among_others(mode: str, tree: str, decider: str) -> None:
    """Whatever the streams beside it draw, and whenever they end, its text has the target's distribution."""
    case, proof = prove_within(Case(mode, tree, decider, "mixed", 3, eos=True, new=3), 400, beside=1)
    assert proof.distance <= EXACT and proof.reused == 0 and proof.leaves > 5, case
    case, proof = prove_within(Case(mode, tree, decider, "mixed", 3, new=3), 400, beside=1)
    assert proof.distance <= EXACT and proof.reused == 0 and proof.shared > 5, case


class Counting(StopPolicy):
    """Counts its rounds in its state, and drafts as many tokens as there have been."""

    name, max_depth, features = "counting", 3, ()

    def __init__(self, carries: bool) -> None:
        self.carries = carries

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth <= state)[:, None], state

    def observe(self, outcome: object, state: State) -> State:
        return state + 1


def test_state_belongs_to_the_stream_and_a_new_text_begins_with_a_fresh_one(
    pair: Pair, prompt_ids: list[list[int]]
) -> None:
    asked = requests(prompt_ids[:4])
    fresh = Speculator(pair, Counting(False), Settings(0.0, NEW), batch=2).run(asked)
    assert [[r.drafted for r in g.rounds[:2]] for g in fresh if len(g.rounds) > 2] == [[1, 2]] * sum(
        len(g.rounds) > 2 for g in fresh
    )
    carried = Speculator(pair, Counting(True), Settings(0.0, NEW), batch=2).run(asked)
    assert any(g.rounds[0].drafted == 3 for g in carried[2:] if not g.rounds[0].cut)


class Failing(StopPolicy):
    """Raises when it is asked for the fourth time."""

    name, max_depth, features = "failing", 2, ()

    def __init__(self) -> None:
        self.asked = 0

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.asked += 1
        if self.asked == 4:
            raise ValueError("out of ideas")
        return step.alive, state


def test_a_policy_that_fails_is_replaced_for_all_streams_and_no_text_suffers(
    pair: Pair, prompt_ids: list[list[int]]
) -> None:
    asked = requests(prompt_ids[:4])
    expected = Speculator(pair, FixedLength(2), Settings(0.7, NEW, verification="match")).run(asked)
    with pytest.warns(SpecstopWarning, match="failing failed.*out of ideas") as caught:
        made = Speculator(pair, Failing(), Settings(0.7, NEW, verification="match"), batch=3).run(asked)
    assert [g.tokens for g in made] == [g.tokens for g in expected]
    assert len(caught) == 1


def test_streams_that_have_stopped_are_not_fed(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """The draft reads a token for each stream that goes on, and no more."""

    class ByStream(StopPolicy):
        name, max_depth, features = "by-stream", 4, ()

        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            return step.alive & (step.depth < 1 + np.arange(len(step.alive)))[:, None], state

    loop = Speculator(pair, ByStream(), Settings(0.0, NEW, ignore_eos=True), batch=3)
    calls: list[int] = []
    draft = loop._source.drafter._model  # type: ignore[attr-defined]
    stock = CachedModel.read_parts

    def read_parts(self: CachedModel, parts: Sequence[object]) -> torch.Tensor:
        if self is not loop._source.target:
            calls.append(len(parts))
        return stock(self, parts)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedModel, "read_parts", read_parts)
        loop.run([Request(prompt) for prompt in prompt_ids[:3]])
    assert draft is not None
    assert set(Counter(calls)) == {3, 2, 1} and calls[:3] == [3, 2, 1]


def test_a_batch_ends_early_texts_and_keeps_its_memory(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """Rows of the cache are taken over by the next texts: buffers are made once, however many texts there are."""
    loop = Speculator(pair, FixedLength(2), Settings(0.0, NEW), batch=2)
    loop.run(requests(prompt_ids))
    before = [buffer.data_ptr() for buffer in loop._source.target._kv.shared]
    loop.run(requests(prompt_ids * 3))
    assert [buffer.data_ptr() for buffer in loop._source.target._kv.shared] == before
    assert loop._source.texts == [None, None]


def test_decode_takes_a_batch_and_streams_each_text(pair: Pair, prompts: list, tokenizer: object) -> None:
    import dataclasses

    whole = dataclasses.replace(pair, tokenizer=tokenizer)
    texts = [p.text for p in prompts[:4]]
    seen: Counter[int] = Counter()
    shown = [""] * 4

    def on_text(number: int, new: str) -> None:
        seen[number] += 1
        shown[number] += new

    alone = decode(whole, texts, FixedLength(2), settings=Settings(0.7, NEW, verification="match"))
    made = decode(
        whole, texts, FixedLength(2), settings=Settings(0.7, NEW, verification="match"), batch=3, on_text=on_text
    )
    assert [g.text for g in made] == [g.text for g in alone]
    assert len(seen) == 4 and all(text.strip() for text in shown)
    with pytest.raises(InputError, match="batch: expected"):
        decode(whole, texts, FixedLength(2), batch=0)
