"""Completions and mixed texts: rows agree with the target's own; noise given a text has the law of plain sampling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EOS, make_prompts
from contract_policies import TEST_POLICIES
from reference_features import Rows, compute
from scipy import stats
from specstop.collect.completions import agreeing_anchors, given_noise, sampled_rows, sampling_balance, target_rows
from specstop.collect.given_text import gumbel_given
from specstop.collect.prompts import Prompt, read_prompts
from specstop.collect.run import collect
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.features import CHAIN_FEATURES, HISTORY_FEATURES
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.fit.run import train
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from torch import Tensor
from trace_rows import by_anchor

FALSE_ALARM = 1e-5
"""Of each statistical test; seeds are fixed, so that what passes goes on passing."""

DRAWS, FLOAT32 = 40_000, 2e-6
DEPTH, NEW, TEMPERATURE = 5, 24, 0.7
TOP_P = SamplingParams(top_p=0.8, repetition_penalty=1.2)
LOGITS = torch.tensor([1.0, 0.2, -0.5, -2.0, -math.inf, 0.9], dtype=torch.float64)


def changed(text: list[int], at: int) -> list[int]:
    """Return a text with another token at one place."""
    return [*text[:at], 7 + (text[at] == 7), *text[at + 1 :]] if len(text) > at else text


def test_of_greedy_answers_the_anchors_with_the_targets_own_continuation_are_kept(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile, tmp_path: Path
) -> None:
    """The target's own text, one token of it changed: rows elsewhere are the dense ones, whole texts cannot be replayed."""
    assert pair.tokenizer is not None
    texts = plain_texts(pair, prompt_ids, [0] * len(prompts), NEW + 3).tokens
    answers = {p.id: pair.tokenizer.decode(changed(text, 8)) for p, text in zip(prompts, texts, strict=True)}
    options: dict[str, Any] = {"depth": 3, "max_new_tokens": NEW, "hidden": ["draft_hidden", "target_hidden"]}
    dense = by_anchor(collect(pair, prompts, tmp_path / "dense", **options))
    trace = collect(pair, prompts, tmp_path / "given", completions=answers, **options)
    before = set()
    for (s, anchor), row in by_anchor(trace).items():
        if anchor > 8:
            continue
        assert anchor <= 5 or len(texts[s]) <= 9, "the changed token is not the target's continuation"
        before.add((s, anchor))
        names = (*CHAIN_FEATURES, "tokens", "accepted", "observed", "target_prob", "overlap", "anchor_entropy")
        for name in (*names, "draft_hidden", "target_hidden"):
            near = 1e-3 if name.endswith("hidden") else FLOAT32
            np.testing.assert_allclose(row[name], dense[s, anchor][name], rtol=near, atol=near, err_msg=name)
    assert before == {key for key in dense if key[1] <= 5 or (len(texts[key[0]]) <= 9 and key in before)}
    assert len(before) > 25
    arrays = trace_arrays(trace)
    assert trace.header.texts == "completions" and arrays.only_positions
    with pytest.raises(TraceError, match="completions"):
        replay(arrays, FixedLength(2), profile)
    with pytest.raises(TraceError, match="position"):
        train(trace, profile)
    result = train(trace, profile, rule="survival", threshold=0.4)
    assert not set(result.policy.features) & set(HISTORY_FEATURES), "earlier rounds are not known"
    assert result.metrics["rows"] > 0 and "held_out_tokens_per_s" not in result.metrics


@pytest.mark.parametrize(
    ("agrees", "ended", "anchors"),
    [
        ([1, 1, 1, 1, 1, 1], False, [1, 2, 3, 4]), ([1, 1, 1, 0, 1, 1], False, [1, 4]),
        ([0, 1, 1, 1, 1, 1], True, [1, 2, 3, 4, 5]), ([1, 1, 1, 1, 1, 0], True, [1, 2, 3]), ([1], False, []),
    ],
)  # fmt: skip
def test_anchors_look_two_tokens_ahead(agrees: list[int], ended: bool, anchors: list[int]) -> None:
    assert agreeing_anchors(np.array(agrees, dtype=bool), 2, ended).tolist() == anchors


def test_mixed_rows_are_those_of_a_loop_over_positions(
    plain_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "an older trace"])
def test_answers_without_a_row_are_refused_and_leave_what_was_there(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, there: str
) -> None:
    out = tmp_path / "deep" / "out"
    if there == "an empty folder":
        out.mkdir(parents=True)
    elif there == "an older trace":
        collect(pair, prompts[:1], out, depth=3, max_new_tokens=4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    answers = {p.id: "w5" for p in prompts}  # too short for an anchor
    with pytest.raises(TraceError, match="prompts"):
        collect(pair, prompts, out, depth=3, max_new_tokens=NEW, completions=answers, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def drawn(logits: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return [R] tokens drawn from rows of logits without our noise, and [R, V] noise given them."""
    rows = logits.expand(DRAWS, -1)
    tokens = torch.multinomial(torch.softmax(rows, -1), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
    return tokens, gumbel_given(stream_key(seed, "a"), torch.arange(DRAWS), rows, tokens)


def test_noise_given_a_sample_has_the_law_of_plain_noise() -> None:
    """The token is the best one. Each token's noise is Gumbel; so is its joint law with others."""
    tokens, noise = drawn(LOGITS, 2)
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


def test_the_noise_is_not_that_which_the_same_key_samples_with() -> None:
    """A text that this very stream has sampled: its uniforms are those of the best scores, noise given it has fresh ones."""
    at, key, rows = torch.arange(DRAWS), stream_key(5, "c"), LOGITS.expand(DRAWS, -1)
    sampled = (torch.log_softmax(rows, -1) + gumbel(key, at, len(LOGITS), torch.float64)).argmax(-1)
    noise = gumbel_given(key, at, rows, sampled)
    assert stats.kstest((torch.log_softmax(rows, -1) + noise).amax(-1).numpy(), "gumbel_r").pvalue > FALSE_ALARM


def write(
    pair: Pair, prompt: list[int], limit: int, temperature: float, sampling: SamplingParams, seed: int
) -> list[int]:
    """Return a text as any engine would sample it: token by token, with a generator of its own."""
    generator, text = torch.Generator().manual_seed(seed), list[int]()
    processors = sampling.build(temperature, prompt, (EOS,), torch.device("cpu"))
    with torch.inference_mode():
        model, unread = CachedModel(pair.target, len(prompt) + limit, pair.vocabulary), prompt
        while len(text) < limit and EOS not in text:
            logits = model.read(torch.tensor([unread]), 1)[:, -1]
            ids = torch.tensor([[*prompt, *text]])
            scores = processors(ids, logits) if len(processors) else logits / temperature
            text.append(int(torch.multinomial(torch.softmax(scores[0], -1), 1, generator=generator)))
            unread = text[-1:]
    return text


def encoded(pair: Pair, prompts: list[Prompt]) -> list[tuple[Prompt, list[int]]]:
    assert pair.tokenizer is not None
    return [(prompt, pair.tokenizer(prompt.text)["input_ids"]) for prompt in prompts]


@pytest.fixture(scope="module")
def written(pair: Pair) -> dict[str, dict[str, list[int]]]:
    """Texts of eight prompts by prompt id, sampled plainly and under filters."""
    return {
        name: {
            p.id: write(pair, ids, NEW + DEPTH, TEMPERATURE, sampling, at)
            for at, (p, ids) in enumerate(encoded(pair, make_prompts(8, "given", 31)))
        }
        for name, sampling in (("plain", SamplingParams()), ("filtered", TOP_P))
    }


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


@pytest.mark.parametrize(("kind", "sampling"), [("plain", SamplingParams()), ("filtered", TOP_P)])
@pytest.mark.parametrize("tree", [None, "3,2,1,1,1"])
def test_every_position_is_an_anchor_and_replay_is_a_live_loop_that_writes_the_given_text(
    pair: Pair, written: dict[str, dict[str, list[int]]], profile: Profile, tmp_path: Path, kind: str,
    sampling: SamplingParams, tree: str | None,
) -> None:  # fmt: skip
    prompts = make_prompts(8, "given", 31)
    texts, ids = written[kind], {p.id: tokens for p, tokens in encoded(pair, prompts)}
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
    assert rounds > 80


def test_what_follows_a_token_that_cannot_be_drawn_is_left_out_and_counted(
    pair: Pair, written: dict[str, dict[str, list[int]]], tmp_path: Path
) -> None:
    prompts, few = make_prompts(8, "given", 31), SamplingParams(top_k=6)
    settings, impossible, expected = Settings(TEMPERATURE, NEW, sampling=few, verification="match"), 0, set()
    for s, (p, ids) in enumerate(encoded(pair, prompts)):
        text = written["plain"][p.id][: NEW + 3]
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
        trace = collect(pair, prompts, tmp_path / "a", completions=written["plain"], **options)
    assert f" {impossible} of " in trace.header.facts["completions"]
    assert set(by_anchor(trace)) == expected


def test_texts_of_another_temperature_are_refused_before_anything_is_written(pair: Pair, tmp_path: Path) -> None:
    assert pair.tokenizer is not None
    many = make_prompts(60, "many", 41)
    named, settings, balance = encoded(pair, many), Settings(TEMPERATURE, NEW, verification="match"), {}
    for temperature in (0.4, TEMPERATURE, 1.4):
        texts = {p.id: write(pair, ids, NEW, temperature, SamplingParams(), at) for at, (p, ids) in enumerate(named)}
        balance[temperature] = sampling_balance(pair, settings, named, texts, NEW)
        if temperature != TEMPERATURE:
            words = {name: pair.tokenizer.decode(text) for name, text in texts.items()}
            with pytest.raises(InputError, match="completions: these texts were not sampled"):
                collect(
                    pair, many, tmp_path / "a", depth=2, temperature=TEMPERATURE, max_new_tokens=NEW, completions=words
                )
    assert not (tmp_path / "a").exists()
    errors = {at: abs(one["mean"]) / one["standard_error"] for at, one in balance.items()}
    assert errors[TEMPERATURE] < 4 < min(errors[0.4], errors[1.4])
    assert balance[0.4]["mean"] > 0 > balance[1.4]["mean"], "colder texts surprise less"


def test_the_mean_and_its_error_are_those_of_a_plain_loop(plain_pair: Pair) -> None:
    named = encoded(plain_pair, make_prompts(9, "loop", 51))
    texts = {p.id: write(plain_pair, ids, 12, 0.9, TOP_P, at) for at, (p, ids) in enumerate(named)}
    parts = []
    for p, prompt in named:
        for at, token in enumerate(texts[p.id]):
            ids = torch.tensor([[*prompt, *texts[p.id][:at]]])
            with torch.no_grad():
                logits = plain_pair.target(ids).logits[:, -1]
                probs = torch.softmax(TOP_P.build(0.9, prompt, (EOS,), torch.device("cpu"))(ids, logits)[0], -1)
            possible = probs[probs > 0]
            parts.append((p.id, float(probs[token].log() - (possible * possible.log()).sum())))
    values = np.array([value for _, value in parts])
    off = values - values.mean()
    sums = np.array([off[[owner == p.id for owner, _ in parts]].sum() for p, _ in named])
    error = math.sqrt((sums**2).sum() * 9 / 8) / len(values)
    result = sampling_balance(plain_pair, Settings(0.9, 12, sampling=TOP_P, verification="match"), named, texts, 12)
    assert (result["mean"], result["standard_error"]) == pytest.approx((values.mean(), error), rel=1e-9)
    assert (result["texts"], result["tokens"], result["impossible"]) == (9, len(values), 0)


def test_few_texts_are_taken_with_a_warning_and_missing_texts_or_tokens_are_refused(pair: Pair, tmp_path: Path) -> None:
    prompts, options = make_prompts(8, "given", 31)[:3], {"depth": 2, "temperature": TEMPERATURE, "max_new_tokens": 8}
    with pytest.warns(SpecstopWarning, match="3 texts are too few"):
        collect(pair, prompts, tmp_path / "a", completions={p.id: [7, 8, 9, 10, 11] for p in prompts}, **options)
    for completions, message in (
        ({p.id: [7, 99] for p in prompts}, "prompt 'given0' has the token 99"),
        ({"given0": [7, 8, 9]}, "prompt 'given1'"), ({("given0", "a"): [7, 8, 9]}, "prompt 'given0'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"completions: {message}"):
            collect(pair, prompts, tmp_path / "b", completions=completions, **options)
    assert not (tmp_path / "b").exists()


def test_completions_are_read_as_text_or_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"id": "a", "prompt": "w7", "out": "w8 w9"}\n{"id": "b", "prompt": "w7", "out": [8, 9]}\n')
    assert [p.completion for p in read_prompts(file, completion="out")] == ["w8 w9", (8, 9)]
    file.write_text('{"id": "a", "prompt": "w7", "out": [8, "w9"]}\n')
    with pytest.raises(InputError, match=r"completions: .*line 1"):
        read_prompts(file, completion="out")
