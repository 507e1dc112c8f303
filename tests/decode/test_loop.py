"""The round loop: the text is the target's whatever the policy does, and the records tell what happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import EOS, NEW, VOCABULARY, build_draft, build_model
from contract_policies import DEPTH, TEST_POLICIES, SelectingByToken
from specstop.decode.feature_reader import FeatureReader
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair, join, with_engine
from specstop.decode.plain import plain_texts
from specstop.decode.records import Generation
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, State, StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel


@pytest.fixture(scope="module")
def endless_pair(pair: Pair) -> Pair:
    """The pair without an end of text, under its own forward."""
    return dataclasses.replace(pair, eos=())


@pytest.fixture(scope="module")
def generated(plain_pair: Pair, prompt_ids: list[list[int]]) -> list[list[int]]:
    """What the target's own `generate` writes."""
    return [stock(plain_pair.target, prompt) for prompt in prompt_ids]


def generate(
    pair: Pair,
    policy: StopPolicy,
    prompts: Sequence[list[int]],
    temperature: float = 0.0,
    new: int = NEW,
    **more: object,
) -> list[Generation]:
    speculator = Speculator(pair, policy, Settings(temperature, new, verification="match"), **more)
    return [speculator.generate(prompt, stream_key(0, f"p{i}")) for i, prompt in enumerate(prompts)]


def plain(pair: Pair, prompts: Sequence[list[int]], temperature: float = 0.0, new: int = NEW) -> list[list[int]]:
    keys = [stream_key(0, f"p{i}") for i in range(len(prompts))]
    return plain_texts(pair, prompts, keys, new, temperature).tokens


def stock(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return what the model's own `generate` adds."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    return [int(token) for token in out[0, len(prompt) :]]


def texts(generations: list[Generation]) -> list[list[int]]:
    return [list(g.tokens) for g in generations]


@pytest.mark.parametrize("policy", [*(FixedLength(k) for k in (0, 1, 4, 8)), Confidence()], ids=lambda p: p.name)
def test_greedy_text_is_that_of_generate(
    plain_pair: Pair, prompt_ids: list[list[int]], generated: list[list[int]], policy: StopPolicy
) -> None:
    assert texts(generate(plain_pair, policy, prompt_ids)) == generated
    assert sum(len(set(text)) > 5 for text in generated) > 4
    assert 1 < sum(text[-1] == EOS for text in generated) < len(generated)


@pytest.fixture(scope="module")
def decoded(pair: Pair, prompt_ids: list[list[int]]) -> dict[float, list[list[int]]]:
    """Plain texts by temperature."""
    return {temperature: plain(pair, prompt_ids, temperature) for temperature in (0.0, 0.7)}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", [*TEST_POLICIES, "selecting-by-token"])
def test_text_is_that_of_plain_decoding_with_the_same_key(
    pair: Pair,
    prompt_ids: list[list[int]],
    decoded: dict[float, list[list[int]]],
    profile: Profile,
    name: str,
    temperature: float,
) -> None:
    policy = TEST_POLICIES.get(name) or SelectingByToken()
    generations = generate(pair, policy, prompt_ids, temperature, profile=profile)
    assert texts(generations) == decoded[temperature]


@pytest.mark.parametrize("policy", [FixedLength(3), TEST_POLICIES["trimming"]], ids=lambda p: p.name)
def test_many_sampled_texts_are_those_of_plain_decoding(pair: Pair, policy: StopPolicy) -> None:
    prompts = [[7 + i % 40, 6 + i * i % 41] for i in range(30)]
    assert texts(generate(pair, policy, prompts, 1.0, 9)) == plain(pair, prompts, 1.0, 9)


def test_the_policies_above_differ_in_their_rounds(pair: Pair, prompt_ids: list[list[int]], profile: Profile) -> None:
    """Otherwise the equalities of texts and of replay would say little."""
    seen = set()
    for policy in TEST_POLICIES.values():
        rounds = [r for g in generate(pair, policy, prompt_ids[:4], 0.7, profile=profile) for r in g.rounds]
        seen.add(tuple((r.drafted, r.verified) for r in rounds))
        if policy.trims or policy.name == "selecting":
            assert any(r.verified < r.drafted for r in rounds)
        if policy.first == 0 and not policy.name.startswith("fixed"):
            assert 0.05 < sum(r.drafted == 0 for r in rounds) / len(rounds) < 0.95
    assert len(seen) == len(TEST_POLICIES)


@pytest.mark.parametrize("policy", [FixedLength(1), FixedLength(4), TEST_POLICIES["trimming"]], ids=lambda p: p.name)
@pytest.mark.parametrize("new", [1, 2, 3, 5, 9])
def test_the_length_limit_is_met_exactly_and_never_drafted_over(
    endless_pair: Pair, prompt_ids: list[list[int]], policy: StopPolicy, new: int
) -> None:
    generations = generate(endless_pair, policy, prompt_ids, 0.7, new)
    assert texts(generations) == plain(endless_pair, prompt_ids, 0.7, new)
    for generation in generations:
        assert len(generation.tokens) == new
        assert all(r.drafted <= new - r.anchor - 1 for r in generation.rounds)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_end_of_text_inside_an_accepted_run_cuts_the_text_there(
    pair: Pair, prompt_ids: list[list[int]], temperature: float
) -> None:
    """The draft is the target itself: every proposal is accepted, EOS too, and none follows EOS."""
    twin = join(pair.target, pair.target)
    generations = generate(twin, FixedLength(6), prompt_ids, temperature)
    assert texts(generations) == plain(pair, prompt_ids, temperature)
    last = [g.rounds[-1] for g in generations if g.tokens[-1] == EOS]
    assert any(1 < r.accepted == r.committed for r in last), "no EOS was accepted in the middle of a round"
    for generation in generations:
        assert EOS not in generation.tokens[:-1]
        assert all(r.accepted == r.verified for r in generation.rounds)


def test_a_padded_verification_stays_within_learned_positions(profile: Profile) -> None:
    """A text may fill a model's position table; a verification filled up to a cheaper size must not leave it."""
    torch.manual_seed(0)
    options = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": None}
    models = [GPT2LMHeadModel(GPT2Config(n_positions=24, **options)).double().eval() for _ in range(2)]
    table = dataclasses.replace(profile.low, verify_s=tuple(9.0 - k for k in range(7)))
    falling = dataclasses.replace(profile, low=table, high=table)
    prompts = [[6, 7, 8, 9]]
    own = texts(generate(join(*models), FixedLength(0), prompts, new=20))
    assert texts(generate(join(*models), FixedLength(2), prompts, new=20)) == own
    assert texts(generate(join(*models), FixedLength(2), prompts, new=20, profile=falling)) == own


def test_a_first_token_that_ends_the_text_leaves_no_round(pair: Pair) -> None:
    other = Pair(pair.target, pair.draft, None, VOCABULARY, (plain(pair, [[7, 9]], new=1)[0][0],))
    generation = Speculator(other, FixedLength(4), Settings(max_new_tokens=9)).generate([7, 9])
    assert len(generation.tokens) == 1
    assert generation.rounds == ()


def test_ignore_eos_goes_on_to_the_limit(pair: Pair, endless_pair: Pair, prompt_ids: list[list[int]]) -> None:
    speculator = Speculator(pair, FixedLength(4), Settings(0.0, NEW, ignore_eos=True))
    assert [list(speculator.generate(p).tokens) for p in prompt_ids] == plain(endless_pair, prompt_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_records_add_up(pair: Pair, prompt_ids: list[list[int]], temperature: float) -> None:
    for prompt, generation in zip(prompt_ids, generate(pair, FixedLength(4), prompt_ids, temperature), strict=True):
        at, unread = 1, len(prompt) + 1
        for r in generation.rounds:
            assert (r.anchor, r.context, r.backlog) == (at, len(prompt) + at, unread)
            assert r.accepted <= r.verified <= r.drafted <= 4
            assert r.committed == r.accepted + 1 or r is generation.rounds[-1]
            at += r.committed
            unread = (
                len(prompt) + at - (r.context + min(r.accepted, r.drafted - 1) if r.drafted else r.context - r.backlog)
            )
        assert at == len(generation.tokens)
        assert [r.cut for r in generation.rounds[-1:]] in ([True], [])


def test_decisions_are_counted_from_the_first_depth_asked(endless_pair: Pair, prompt_ids: list[list[int]]) -> None:
    for policy, expected in (
        (FixedLength(3), 0),
        (TEST_POLICIES["selecting"], DEPTH - 1),
        (Confidence(0.0, 3), 2),
        (Confidence(1.0, 3), 1),
    ):
        rounds = [r for g in generate(endless_pair, policy, prompt_ids[:3]) for r in g.rounds if not r.cut]
        assert {r.decisions for r in rounds} == {expected}, policy.name


def test_where_a_policy_is_not_asked_nothing_is_read(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Confidence(0.4, DEPTH)
    policy.unasked = {1: 3, 2: 9}
    monkeypatch.setattr(FeatureReader, "_read_level", None)
    monkeypatch.setattr(FeatureReader, "_read_base", None)
    for temperature in (0.0, 0.7):
        made = generate(pair, policy, prompt_ids[:4], temperature)
        fixed = generate(pair, FixedLength(3), prompt_ids[:4], temperature)
        for mine, other in zip(made, fixed, strict=True):
            assert mine.tokens == other.tokens
            assert [r[:9] for r in mine.rounds] == [r[:9] for r in other.rounds]  # all but seconds


def test_on_commit_streams_exactly_the_tokens(pair: Pair, prompt_ids: list[list[int]]) -> None:
    speculator = Speculator(pair, FixedLength(4), Settings(0.7, NEW, verification="match"))
    for prompt in prompt_ids:
        parts: list[list[int]] = []
        generation = speculator.generate(prompt, 11, lambda new, parts=parts: parts.append(list(new)))
        assert [t for part in parts for t in part] == list(generation.tokens)
        assert [len(part) for part in parts] == [1, *(r.committed for r in generation.rounds)]


def test_a_speculator_keeps_nothing_from_the_text_before(
    pair: Pair, prompt_ids: list[list[int]], profile: Profile
) -> None:
    speculator = Speculator(pair, TEST_POLICIES["adaptive"], Settings(0.7, NEW, verification="match"), profile)
    first = [speculator.generate(p, 3) for p in prompt_ids]
    again = [speculator.generate(p, 3) for p in reversed(prompt_ids)][::-1]
    counts = [[[(r.drafted, r.verified, r.accepted) for r in g.rounds] for g in run] for run in (first, again)]
    assert texts(first) == texts(again)
    assert counts[0] == counts[1]


def test_a_carrying_policy_keeps_its_state_from_text_to_text(endless_pair: Pair) -> None:
    class Counting(FixedLength):
        carries = True

        def start(self, streams: int, keys: Array) -> State:
            return np.zeros(streams)

        def observe(self, outcome: object, state: State) -> State:
            seen.append(float(state[0]))
            return state + 1

    seen: list[float] = []
    rounds = sum(len(g.rounds) for g in generate(endless_pair, Counting(2), [[7], [8, 9]], new=8))
    assert seen == list(range(rounds))


@pytest.mark.parametrize(("temperature", "engine"), [(0.0, "plain"), (0.0, "auto"), (1.0, "auto")])
def test_a_target_with_strong_padding_rows_says_what_it_says_alone(
    tokenizer: object, temperature: float, engine: str
) -> None:
    """Its own `generate` draws tokens that neither draft nor tokenizer has; so does the loop, and goes on."""
    target, draft = build_model(vocab_size=VOCABULARY + 8), build_model(1)
    with torch.no_grad():
        target.lm_head.weight[VOCABULARY:] *= 2.0
    if engine == "auto":
        target, draft = target.float(), draft.float()
    prompts = [[7, 8], [9], [VOCABULARY + 1, 7]]
    alone = [stock(target, prompt) for prompt in prompts] if temperature == 0.0 else []
    wide = with_engine(join(target, draft, tokenizer), engine)  # type: ignore[arg-type]
    assert (wide.vocabulary, wide.engines) == (
        VOCABULARY + 8,
        ("plain",) * 2 if engine == "plain" else ("compact",) * 2,
    )
    expected = plain(wide, prompts, temperature)
    assert texts(generate(wide, FixedLength(3), prompts, temperature)) == expected
    assert any(max(text) >= VOCABULARY and len(text) > 4 for text in expected)
    if temperature == 0.0:
        assert expected == alone
        tree = Speculator(wide, FixedLength(3), Settings(0.0, NEW, tree="2,2,1"))
        assert [list(tree.generate(prompt).tokens) for prompt in prompts] == alone


def test_the_text_under_eager_attention_is_the_same(eager_pair: Pair, pair: Pair, prompt_ids: list[list[int]]) -> None:
    assert texts(generate(eager_pair, FixedLength(4), prompt_ids, 0.7)) == plain(pair, prompt_ids, 0.7)


def test_a_float32_pair_gives_its_plain_text() -> None:
    target = build_model()
    small = join(target.float(), build_draft(build_model()).float())
    generations = generate(small, FixedLength(4), [[7, 8], [9]], 0.7)
    assert texts(generations) == plain(small, [[7, 8], [9]], 0.7)


def test_a_policy_knows_how_deep_the_rounds_of_a_run_go(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """As in replay, which limits it to the depth of a trace: one that shrinks from 20 would be at 4 after 16 refusals."""
    policy = load_policy("heuristic-transient")
    runs = [Speculator(pair, one, Settings(0.0, NEW, max_depth=4)) for one in (policy, policy.limited(4))]
    made = [[r.drafted for r in run.generate(prompt_ids[4]).rounds] for run in runs]
    assert policy.max_depth == 20 and runs[0].policy.max_depth == 4
    assert made[0] == made[1] and len(set(made[0])) > 1
