"""Rounds drawn given a text have the law of the live loop's; completions and mixed texts are read as the target's own."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case
from conftest import EOS, NEW, make_prompts
from contract_policies import DEPTH, TEST_POLICIES
from drawn_law import drawn_traces, replay_law
from enumeration import EXACT, distance, enumerate_texts, target_texts
from reference_features import Rows, compute
from scipy import stats
from specstop.collect.completions import given_noise, sampled_rows, sampling_balance, target_rows
from specstop.collect.given_text import KeyedDraws, gumbel_given
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.decode.drafters import with_drafter
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.decode.verify.sampling import MODEL_DEFAULTS, SamplingParams
from specstop.policies import Confidence
from specstop.policies.errors import InputError, PolicyError, SpecstopWarning, TraceError
from specstop.policies.features import CHAIN_FEATURES, HISTORY_FEATURES
from specstop.policies.fixed import FixedLength
from specstop.train.fit.run import train
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from torch import Tensor
from trace_helpers import Carrying, assert_replay_is_live, by_anchor, same_rows

FALSE_ALARM = 1e-5
"""Significance level of each statistical test; the seeds are fixed."""

DRAWS, FLOAT32 = 40_000, 2e-6
TEMPERATURE = 0.7
TOP_P = SamplingParams(top_p=0.8, repetition_penalty=1.2)
LOGITS = torch.tensor([1.0, 0.2, -0.5, -2.0, -math.inf, 0.9], dtype=torch.float64)
OPTIONS: dict[str, Any] = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "shards": 2}


@pytest.mark.parametrize(
    ("mode", "tree", "decider", "kind"),
    [
        ("rejection", "chain:3", "confidence", "dense"), ("rejection", "chain:3", "from-anchor", "mixed"),
        ("rejection", "chain:3", "selects-by-round", "mixed"), ("block", "chain:3", "confidence", "dense"),
        ("block", "chain:3", "trims-unsure", "mixed"), ("block", "chain:3", "adaptive", "mixed"),
        ("rejection", "2,1", "from-anchor", "mixed"), ("rejection", "2,2", "confidence", "mixed"),
        ("rejection_replace", "1,2", "from-anchor", "mixed"),
    ],
)  # fmt: skip
def test_replay_has_the_joint_law_of_the_live_loop(mode, tree, decider, kind):
    """Every random choice is enumerated, of the loop and of what the collector draws given each text."""
    case = Case(mode, tree, decider, kind, 1, eos=kind == "mixed")
    live = enumerate_texts(case).joint
    assert math.isclose(sum(live.values()), 1.0) and len(live) > 15
    assert distance(live, replay_law(case)) <= EXACT


def test_replay_of_point_drafts_is_the_live_loop(pair, prompts, profile, tmp_path):
    settings = Settings(TEMPERATURE, NEW, DEPTH, verification="point")
    policies = [FixedLength(DEPTH), Confidence(0.3, DEPTH), TEST_POLICIES["adaptive"]]
    assert len(assert_replay_is_live(pair, prompts, policies, settings, profile, tmp_path)) > 100


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_chances_are_those_of_acceptance_given_prefix_and_token(mode):
    """Over texts and draws, the share of accepted tokens among those that look alike."""
    case = Case(mode, "chain:2", "fixed", "dense", 4)
    sums: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for text, probability in target_texts(case).items():
        arrays, weights = drawn_traces(case, text)
        row = arrays.offset
        tokens, accepted = arrays.tokens[row].tolist(), arrays.accepted[row].tolist()
        chance, before = (arrays.extra[name][row].tolist() for name in ("accept_chance", "next_chance"))
        for at, weight in enumerate((weights * probability).tolist()):
            for depth in range(2):  # deeper ones are beyond what the draws of a short text go through
                if accepted[at] < depth:
                    break
                prefix, hit = tuple(tokens[at][:depth]), float(accepted[at] > depth)
                for key in ((prefix, tokens[at][depth], chance[at][depth]), (prefix, before[at][depth])):
                    sums[key][0] += weight
                    sums[key][1] += weight * hit
    assert len(sums) >= 16
    for key, (weight, kept) in sums.items():
        assert kept / weight == pytest.approx(key[-1], abs=2e-7)  # type: ignore[index]  # chances are kept as float32


def test_keyed_draws_have_the_law_of_their_weights():
    count = 40_000
    weights = torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    draws = KeyedDraws(7, 0, torch.arange(count), torch.full((count,), 3))
    tokens = draws.tokens(5.0 * weights.expand(count, -1), 0)
    accepted = draws.accepts(torch.full((count,), 0.3, dtype=torch.float64), 0)
    joint = [[int(((tokens == token) & (accepted == hit)).sum()) for hit in (True, False)] for token in (0, 2, 3)]
    expected = count * np.outer([0.2, 0.5, 0.3], [0.3, 0.7])  # independent of each other
    assert np.sum(joint) == count and stats.chisquare(np.ravel(joint), expected.ravel()).pvalue > FALSE_ALARM


@pytest.fixture(scope="module")
def drawn(pair, prompts, tmp_path_factory):
    """A trace of two draws by verification."""
    folder = tmp_path_factory.mktemp("drawn")
    return {
        name: collect(pair, prompts, folder / name, verification=name, draws=2, **OPTIONS)
        for name in ("rejection", "block")
    }


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "block"), ({"temperature": 0.0}, "match"), ({"tree": "2,1"}, "match"), ({"mix": 0.3, "depth": 1}, "match"),
        ({"collector": "live"}, "match"), ({"drafter": "lookup"}, "match"), ({"verification": "rejection"}, "rejection"),
        ({"verification": "block", "temperature": 0.0}, "match"),
    ],
)  # fmt: skip
def test_by_default_rounds_are_those_of_the_fastest_verification_that_can_be_replayed(pair, prompts, options, mode):
    chosen = with_drafter(pair, options.pop("drafter")) if "drafter" in options else pair
    assert plan_run(chosen, prompts, **{**OPTIONS, **options}).header.verification == mode


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_draws_are_sequences_of_one_text(pair, prompts, prompt_ids, drawn, traces, tmp_path, name):
    header, plain = drawn[name].header, trace_arrays(traces[0.7])
    arrays = trace_arrays(
        drawn[name], extra=("accept_chance", "next_chance", "overlap", "draft_prob", "target_prob", "observed")
    )
    assert (header.exactness, header.draws) == ("law", 2)
    assert arrays.prompt_ids == [prompt for prompt in plain.prompt_ids for _ in range(2)]
    assert arrays.text_tokens.tolist() == plain.text_tokens.repeat_interleave(2).tolist(), "the texts are the same"
    assert arrays.keys.tolist()[1] == stream_key(0, arrays.prompt_ids[1], 1)
    first, second = (arrays.subset(range(draw, arrays.sequences, 2)) for draw in (0, 1))
    assert (first.tokens != second.tokens).any() and (first.accepted != second.accepted).any()
    columns, known = arrays.extra, arrays.extra["observed"]
    assert not columns["accept_chance"][arrays.accepted[:, None] < torch.arange(DEPTH)].any()
    if name == "rejection":
        ratio = (columns["target_prob"] / columns["draft_prob"].clamp_min(1e-30)).clamp_max(1.0)
        np.testing.assert_allclose(columns["accept_chance"][known], ratio[known], rtol=1e-5)
        np.testing.assert_allclose(columns["next_chance"][known], columns["overlap"][known], rtol=1e-5)
    # Given as completions the texts have the anchors with labels to full depth, and the same draws.
    texts = plain_texts(pair, prompt_ids, [stream_key(0, p.id) for p in prompts], NEW + DEPTH, 0.7).tokens
    completions = {p.id: text for p, text in zip(prompts, texts, strict=True)}
    given = collect(pair, prompts, tmp_path, verification=name, draws=2, completions=completions, **OPTIONS)
    assert (given.header.texts, given.header.exactness) == ("sampled", "law")
    given_arrays = trace_arrays(given)
    for sequence in range(arrays.sequences):
        one, other = given_arrays.subset([sequence]), arrays.subset([sequence])
        assert one.tokens.tolist() == other.tokens[: int(one.rows[0])].tolist()
        assert one.accepted.tolist() == other.accepted[: int(one.rows[0])].tolist()


def test_replay_refuses_policies_that_would_change_the_law(drawn, profile):
    class Trims(Confidence):
        trims = True

    class Noisy(FixedLength):
        features = ("noisy_margin",)

    arrays = trace_arrays(drawn["rejection"])
    for policy, feature in ((Trims(0.3, DEPTH), "drawn_prob"), (Noisy(2), "noisy_margin")):
        with pytest.raises(PolicyError, match=feature):
            replay(arrays, policy, profile)
    with pytest.raises(TraceError, match="candidates"):
        replay_law(Case("rejection", "2,1", "trims-by-place", "dense", 1))


def test_a_policy_that_carries_state_decodes_all_texts_of_one_draw_in_order(drawn, profile):
    arrays = trace_arrays(drawn["block"])
    both = replay(arrays, Carrying(), profile)
    for draw in range(2):
        part = arrays.subset(range(draw, arrays.sequences, 2))
        single = dataclasses.replace(part, header=dataclasses.replace(part.header, draws=1))
        rows = both.sequence % 2 == draw
        assert replay(single, Carrying(), profile).log[:, 1:].tolist() == both.log[rows, 1:].tolist()
    assert both.log[:, 2].unique().numel() > 3


def test_of_greedy_answers_the_anchors_with_the_targets_own_continuation_are_kept(
    pair, prompts, prompt_ids, profile, tmp_path
):
    """The answers are the target's own texts but for token 8. Rows at other anchors are those of the dense trace."""
    texts = plain_texts(pair, prompt_ids, [0] * len(prompts), NEW + 3).tokens
    answers = {p.id: [7 + (t == 7) if at == 8 else t for at, t in enumerate(text)]
               for p, text in zip(prompts, texts, strict=True)}  # fmt: skip
    options: dict[str, Any] = {"depth": 3, "max_new_tokens": NEW, "hidden": ["draft_hidden", "target_hidden"]}
    dense = by_anchor(collect(pair, prompts, tmp_path / "dense", **options))
    trace = collect(pair, prompts, tmp_path / "given", completions=answers, **options)
    rows = {key: row for key, row in by_anchor(trace).items() if key[1] <= 8}
    assert set(rows) == {(s, at) for s, at in dense if at <= 5 or (at <= 8 and len(texts[s]) <= 8)} and len(rows) > 25
    for key, row in rows.items():
        for name in (*CHAIN_FEATURES, "tokens", "accepted", "observed", "target_prob", "overlap", "anchor_entropy"):
            np.testing.assert_allclose(row[name], dense[key][name], rtol=FLOAT32, atol=FLOAT32, err_msg=name)
        for name in ("draft_hidden", "target_hidden"):
            np.testing.assert_allclose(row[name], dense[key][name], rtol=1e-3, atol=1e-3, err_msg=name)
    arrays = trace_arrays(trace)
    assert trace.header.texts == "completions" and arrays.only_positions
    with pytest.raises(TraceError, match="completions"):
        replay(arrays, FixedLength(2), profile)
    with pytest.raises(TraceError, match="position"):
        train(trace, profile)
    result = train(trace, profile, rule="survival", threshold=0.4)
    assert not set(result.policy.features) & set(HISTORY_FEATURES), "earlier rounds are not known"
    assert result.metrics["rows"] > 0 and "held_out_tokens_per_s" not in result.metrics


def test_mixed_rows_are_those_of_a_loop_over_positions(plain_pair, prompts, prompt_ids, profile, tmp_path):
    """Labels are those of the text; features those of the draft after what `mixed` says that it read."""
    texts = plain_texts(plain_pair, prompt_ids, [stream_key(0, p.id) for p in prompts], NEW, TEMPERATURE).tokens
    options: dict[str, Any] = {"depth": 1, "temperature": TEMPERATURE, "verification": "match", "max_new_tokens": NEW}
    plain = by_anchor(collect(plain_pair, prompts, tmp_path / "plain", **options))
    trace = collect(plain_pair, prompts, tmp_path / "mixed", mix=0.3, hidden=["draft_hidden"], **options)
    rows = by_anchor(trace)
    assert set(plain) == set(rows)
    for key, row in rows.items():
        for name in ("tokens", "accepted", "observed", "target_prob", "draft_prob", "overlap", "accepted_length"):
            assert np.array_equal(row[name], plain[key][name]), name
    read: list[int] = []
    for (s, anchor), row in sorted(rows.items()):
        if anchor == 1:
            read = [*prompt_ids[s], texts[s][0]]
        else:
            read.append(int(rows[s, anchor - 1]["tokens"][0]) if row["mixed"] else texts[s][anchor - 1])
        with torch.no_grad():
            out = plain_pair.draft(torch.tensor([read]), output_hidden_states=True)
        logits, token = out.logits[0, -1:], torch.tensor([int(row["tokens"][0])])
        noise = gumbel(stream_key(0, prompts[s].id), torch.tensor([len(read)]), plain_pair.vocabulary, torch.float64)
        scores, zero = torch.log_softmax(logits / TEMPERATURE, -1) + noise, torch.zeros(1, dtype=torch.float64)
        slow = compute(
            CHAIN_FEATURES, Rows(logits, TEMPERATURE, scores, token, zero, 1, None, 0 * token, 0 * token + 1)
        )[0]
        np.testing.assert_allclose([row[n][0] for n in CHAIN_FEATURES], slow, rtol=FLOAT32, atol=FLOAT32)
        np.testing.assert_allclose(row["draft_hidden"][0], out.hidden_states[-1][0, -1], rtol=1e-3, atol=1e-7)
    assert 0.55 < np.mean([bool(row["mixed"]) for key, row in rows.items() if key[1] > 1]) < 0.85
    with pytest.raises(TraceError, match="mix"):
        replay(trace_arrays(trace), FixedLength(1), profile)


def test_noise_given_a_sample_has_the_law_of_plain_noise():
    """The token is the best one. Each token's noise is Gumbel; so is its joint law with others."""
    rows = LOGITS.expand(DRAWS, -1)
    tokens = torch.multinomial(torch.softmax(rows, -1), 1, generator=torch.Generator().manual_seed(2))[:, 0]
    noise = gumbel_given(stream_key(2, "a"), torch.arange(DRAWS), rows, tokens)
    assert (torch.log_softmax(LOGITS, -1) + noise).argmax(-1).equal(tokens) and torch.isfinite(noise).all()
    plain = gumbel(stream_key(3, "b"), torch.arange(DRAWS), len(LOGITS), torch.float64)
    for token in range(len(LOGITS)):
        assert stats.kstest(noise[:, token].numpy(), "gumbel_r").pvalue > FALSE_ALARM
    edges = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    for one, two in ((0, 1), (0, 5), (2, 3), (1, 4)):
        cells = []
        for values in (noise, plain):
            first, second = (torch.bucketize(values[:, token].contiguous(), edges) for token in (one, two))
            cells.append(torch.bincount(first * 4 + second, minlength=16).numpy())
        assert stats.chi2_contingency(np.stack(cells)).pvalue > FALSE_ALARM


def encoded(pair: Pair, prompts: list[Prompt]) -> list[tuple[Prompt, list[int]]]:
    assert pair.tokenizer is not None
    return [(prompt, pair.tokenizer(prompt.text)["input_ids"]) for prompt in prompts]


def sampled_texts(
    pair: Pair, prompts: list[Prompt], limit: int, temperature: float, sampling: SamplingParams = MODEL_DEFAULTS
) -> dict[str, list[int]]:
    """Return texts by prompt id, sampled with random numbers that a collector does not use."""
    keys, ids = [stream_key(99, prompt.id) for prompt in prompts], [ids for _, ids in encoded(pair, prompts)]
    texts = plain_texts(pair, ids, keys, limit, temperature, sampling=sampling).tokens
    return {prompt.id: list(text) for prompt, text in zip(prompts, texts, strict=True)}


class GivenSource:
    """The random source of a stream with noise that is known up to some position, and keyed beyond."""

    def __init__(self, key: int, start: int, noise: Tensor) -> None:
        self.key, self.start, self.noise = key, start, noise

    def gumbel(self, position: int, count: int) -> Tensor:
        at = torch.arange(position, position + count)
        out = gumbel(self.key, at, self.noise.shape[1], torch.float64)
        known = (at >= self.start) & (at < self.start + len(self.noise))
        out[known] = self.noise[at[known] - self.start]
        return out


@pytest.mark.parametrize("sampling", [SamplingParams(), TOP_P], ids=["plain", "filtered"])
@pytest.mark.parametrize("tree", [None, "3,2,1,1,1"])
def test_every_position_is_an_anchor_and_replay_is_a_live_loop_that_writes_the_given_text(
    pair, profile, tmp_path, sampling, tree
):
    prompts = make_prompts(6, "given", 31)
    texts = sampled_texts(pair, prompts, NEW + DEPTH, TEMPERATURE, sampling)
    ids = {p.id: tokens for p, tokens in encoded(pair, prompts)}
    options = {"depth": DEPTH, "tree": tree, "temperature": TEMPERATURE, "max_new_tokens": NEW, "sampling": sampling}
    trace = collect(pair, prompts, tmp_path / "trace", completions=texts, verification="match", **options)
    arrays = trace_arrays(trace)
    lengths = [min(len(texts[name]), NEW) for name in arrays.prompt_ids]
    assert trace.header.has_every_anchor and arrays.anchors is None
    assert arrays.rows.tolist() == [length - 1 for length in lengths], "all but the token that prefill gives"
    settings = Settings(TEMPERATURE, NEW, DEPTH, tree=tree, sampling=sampling, verification="match")
    rounds = 0
    for policy in (FixedLength(DEPTH), TEST_POLICIES["trimming"]):
        log = replay(arrays, policy, profile).log
        for at, name in enumerate(arrays.prompt_ids):
            prompt, key, text = ids[name], stream_key(0, name), texts[name]
            with torch.inference_mode():
                rows = target_rows(pair, prompt, text)[0]
                noise = given_noise(pair, sampled_rows(pair, settings, prompt, text, rows), len(prompt), text, key)
            source = GivenSource(key, len(prompt), noise)
            speculator = Speculator(pair, policy, settings, profile, source=lambda _key, _window, of=source: of)
            live = speculator.generate(prompt, key)
            assert list(live.tokens) == text[:NEW]
            recorded = [[r.anchor, r.drafted, r.verified, r.accepted] for r in live.rounds]
            assert log[log[:, 0] == at, 1:].tolist() == recorded
            rounds += len(recorded)
    assert rounds > 60


def test_what_follows_a_token_that_cannot_be_drawn_is_left_out_and_counted(pair, tmp_path):
    prompts, few = make_prompts(6, "given", 31), SamplingParams(top_k=6)
    texts = sampled_texts(pair, prompts, NEW + DEPTH, TEMPERATURE)
    settings, impossible, expected = Settings(TEMPERATURE, NEW, sampling=few, verification="match"), 0, set()
    for s, (p, ids) in enumerate(encoded(pair, prompts)):
        text = texts[p.id][: NEW + 3]
        with torch.inference_mode():
            kept = sampled_rows(pair, settings, ids, text, target_rows(pair, ids, text)[0]) > -torch.inf
        possible = [bool(kept[at, token]) for at, token in enumerate(text)]
        hole = [*possible, False].index(False)
        impossible += possible.count(False)
        ended = hole == len(text) and text[-1] == EOS
        expected |= {(s, anchor) for anchor in range(1, min(NEW, hole if ended else hole - 2))}
    assert impossible > 5
    options: dict[str, Any] = {"depth": 3, "temperature": TEMPERATURE, "max_new_tokens": NEW, "sampling": few}
    with pytest.warns(SpecstopWarning, match="cannot be drawn"):
        trace = collect(pair, prompts, tmp_path / "a", completions=texts, **options)
    assert f" {impossible} of " in trace.header.facts["completions"]
    assert set(by_anchor(trace)) == expected


def test_texts_of_another_temperature_are_refused_before_anything_is_written(pair, tmp_path):
    many = make_prompts(60, "many", 41)
    named, settings = encoded(pair, many), Settings(TEMPERATURE, NEW, verification="match")
    options: dict[str, Any] = {"depth": 2, "temperature": TEMPERATURE, "max_new_tokens": NEW}
    errors = []
    for temperature in (0.4, TEMPERATURE, 1.4):
        texts = sampled_texts(pair, many, NEW, temperature)
        balance = sampling_balance(pair, settings, [ids for _, ids in named], [texts[p.id][:NEW] for p, _ in named])
        errors.append(balance["mean"] / balance["standard_error"])
        if temperature != TEMPERATURE:
            words = {name: pair.tokenizer.decode(text) for name, text in texts.items()}  # type: ignore[union-attr]
            with pytest.raises(InputError, match="completions: these texts were not sampled"):
                collect(pair, many, tmp_path / "a", completions=words, **options)
    assert not (tmp_path / "a").exists()
    assert errors[0] > 4 > abs(errors[1]) and errors[2] < -4, "tokens of colder texts are less surprising"


def test_unusable_completions_are_refused_and_leave_what_was_there(pair, prompts, tmp_path):
    out, options = tmp_path / "deep" / "out", {"depth": 2, "max_new_tokens": 8}
    collect(pair, prompts[:1], out, **options)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    answers, second = [7, 8, 9, 10, 11], prompts[1].id
    with pytest.raises(TraceError, match="prompts"):  # too short for an anchor
        collect(pair, prompts, out, completions={p.id: "w5" for p in prompts}, overwrite=True, **options)
    for completions, message in (
        ({p.id: [7, 99] for p in prompts}, "prompt 'p0' has the token 99"),
        *(({p.id: value for p in prompts}, "prompt 'p0': expected") for value in (5, [1.5], [[7]], b"w7", {7: 8})),
        ({"p0": answers}, f"prompt {second!r}"), ({("p0", "a"): answers}, "prompt 'p0'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"completions: {message}"):
            collect(pair, prompts, out, completions=completions, temperature=0.7, overwrite=True, **options)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    few, traces = prompts[:3], []
    for name, kind in (("list", list), ("array", np.array), ("tensor", torch.tensor)):
        same = {p.id: kind(answers) for p in few}
        with pytest.warns(SpecstopWarning, match="3 texts are too few"):
            traces.append(collect(pair, few, tmp_path / name, completions=same, temperature=0.7, **options))
    assert all(same_rows(trace, traces[0]) and trace.header.facts["completions digest"] ==
               traces[0].header.facts["completions digest"] for trace in traces)  # fmt: skip
