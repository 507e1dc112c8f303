"""Completions above temperature 0: noise given a text has the law of plain sampling, every position is an exact anchor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EOS, make_prompts
from contract_policies import TEST_POLICIES
from scipy import stats
from specstop.collect.completions import given_noise, sampled_rows, sampling_balance, target_rows
from specstop.collect.given_text import gumbel_given
from specstop.collect.prompts import Prompt, read_prompts
from specstop.collect.run import collect
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays
from torch import Tensor
from trace_rows import numpy_rows

FALSE_ALARM = 1e-5
"""Of each statistical test here, some thirty in all; seeds are fixed, so that what passes goes on passing."""

DRAWS = 40_000
DEPTH, NEW, TEMPERATURE = 5, 24, 0.7
TOP_P = SamplingParams(top_p=0.8, repetition_penalty=1.2)


def drawn(logits: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return [R] tokens drawn from rows of logits without our noise, and [R, V] noise given them."""
    rows = logits.expand(DRAWS, -1)
    tokens = torch.multinomial(torch.softmax(rows, -1), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
    return tokens, gumbel_given(stream_key(seed, "a"), torch.arange(DRAWS), rows, tokens)


LOGITS = torch.tensor([1.0, 0.2, -0.5, -2.0, -math.inf, 0.9], dtype=torch.float64)


def test_the_token_given_is_the_best_one() -> None:
    tokens, noise = drawn(LOGITS, 1)
    assert (torch.log_softmax(LOGITS, -1) + noise).argmax(-1).equal(tokens)
    assert torch.isfinite(noise).all()


def test_noise_given_a_sample_has_the_law_of_plain_noise() -> None:
    """Each token's noise is Gumbel; so are its joint law with the sample's and with any other token's."""
    _, noise = drawn(LOGITS, 2)
    plain = gumbel(stream_key(3, "b"), torch.arange(DRAWS), len(LOGITS), torch.float64)
    for token in range(len(LOGITS)):
        assert stats.kstest(noise[:, token].numpy(), "gumbel_r").pvalue > FALSE_ALARM
    for one, two in ((0, 1), (0, 5), (2, 3), (1, 4)):
        cells = []
        for made in (noise, plain):
            edges = [0.0, 1.0, 2.0]
            at = [
                torch.bucketize(made[:, token].contiguous(), torch.tensor(edges, dtype=torch.float64))
                for token in (one, two)
            ]
            cells.append(torch.bincount(at[0] * 4 + at[1], minlength=16).numpy())
        assert stats.chi2_contingency(np.stack(cells)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_draft_that_shares_the_noise_is_accepted_as_often_as_under_plain_sampling(temperature: float) -> None:
    """The chance that both choose the same: sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x)."""
    p = torch.log_softmax(LOGITS[[0, 1, 2, 3, 5]] / temperature, -1)
    q = torch.log_softmax(torch.tensor([0.3, 0.9, -1.0, -0.4, 1.2], dtype=torch.float64) / temperature, -1)
    tokens, noise = drawn(p, 4)
    same = float(((q + noise).argmax(-1) == tokens).double().mean())
    ratios = torch.maximum(p[None, :] - p[:, None], q[None, :] - q[:, None]).exp()
    expected = float((1.0 / ratios.sum(1)).sum())
    assert abs(same - expected) < stats.norm.isf(FALSE_ALARM / 2) * math.sqrt(expected * (1 - expected) / DRAWS)


def test_the_noise_is_not_that_which_the_same_key_samples_with() -> None:
    """A text that this very stream has sampled: its uniforms are those of the best scores, noise given it has fresh ones."""
    at, key = torch.arange(DRAWS), stream_key(5, "c")
    rows = LOGITS.expand(DRAWS, -1)
    own = (torch.log_softmax(rows, -1) + gumbel(key, at, len(LOGITS), torch.float64)).argmax(-1)
    noise = gumbel_given(key, at, rows, own)
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


@pytest.fixture(scope="module")
def asked() -> list[Prompt]:
    return make_prompts(8, "given", 31)


@pytest.fixture(scope="module")
def written(pair: Pair, asked: list[Prompt]) -> dict[str, dict[str, list[int]]]:
    assert pair.tokenizer is not None
    made: dict[str, dict[str, list[int]]] = {}
    for name, sampling in (("plain", SamplingParams()), ("filtered", TOP_P)):
        made[name] = {
            p.id: write(pair, pair.tokenizer(p.text)["input_ids"], NEW + DEPTH, TEMPERATURE, sampling, at)
            for at, p in enumerate(asked)
        }
    return made


class GivenSource:
    """The random source of a stream whose noise is known up to some position, and keyed beyond."""

    def __init__(self, key: int, start: int, noise: Tensor) -> None:
        self.key, self.start, self.noise = key, start, noise

    def gumbel(self, position: int, count: int) -> Tensor:
        at = torch.arange(position, position + count)
        out = gumbel(self.key, at, self.noise.shape[1], torch.float64)
        known = (at >= self.start) & (at < self.start + len(self.noise))
        out[known] = self.noise[at[known] - self.start]
        return out


def live_rounds(
    pair: Pair, prompt: list[int], text: list[int], key: int, policy: Any, settings: Settings, profile: Profile
) -> tuple[list[int], list[list[int]]]:
    """Return text and rounds of the loop whose noise is that which was drawn given a text."""
    with torch.inference_mode():
        rows = target_rows(pair, prompt, text)[0]
        noise = given_noise(pair, sampled_rows(pair, settings, prompt, text, rows), len(prompt), text, key)
    source = GivenSource(key, len(prompt), noise)
    made = Speculator(pair, policy, settings, profile, source=lambda _key, _window: source).generate(prompt, key)
    return list(made.tokens), [[r.anchor, r.drafted, r.verified, r.accepted] for r in made.rounds]


@pytest.mark.parametrize(("kind", "sampling"), [("plain", SamplingParams()), ("filtered", TOP_P)])
@pytest.mark.parametrize("tree", [None, "3,2,1,1,1"])
def test_every_position_is_an_anchor_and_replay_is_a_live_loop_that_writes_the_given_text(
    pair: Pair, asked: list[Prompt], written: dict[str, dict[str, list[int]]], profile: Profile, tmp_path: Path,
    kind: str, sampling: SamplingParams, tree: str | None,
) -> None:  # fmt: skip
    assert pair.tokenizer is not None
    texts = written[kind]
    options = {"depth": DEPTH, "tree": tree, "temperature": TEMPERATURE, "max_new_tokens": NEW, "sampling": sampling}
    trace = collect(pair, asked, tmp_path / "trace", completions=texts, verification="match", **options)
    assert trace.header.has_every_anchor
    arrays = trace_arrays(trace)
    lengths = [min(len(texts[name]), NEW) for name in arrays.prompt_ids]
    assert arrays.rows.tolist() == [length - 1 for length in lengths], "all but the token that prefill gives"
    assert arrays.anchors is None
    settings = Settings(TEMPERATURE, NEW, DEPTH, tree=tree, sampling=sampling, verification="match")
    rounds = 0
    for policy in (FixedLength(DEPTH), TEST_POLICIES["trimming"]):
        log = replay(arrays, policy, profile).log
        for at, name in enumerate(arrays.prompt_ids):
            prompt = pair.tokenizer(next(p.text for p in asked if p.id == name))["input_ids"]
            key = stream_key(0, name)
            text, live = live_rounds(pair, prompt, texts[name], key, policy, settings, profile)
            assert text == texts[name][:NEW]
            assert log[log[:, 0] == at, 1:].tolist() == live
            rounds += len(live)
    assert rounds > 80


def test_what_follows_a_token_that_cannot_be_drawn_is_left_out_and_counted(
    pair: Pair, asked: list[Prompt], written: dict[str, dict[str, list[int]]], tmp_path: Path
) -> None:
    assert pair.tokenizer is not None
    few, options = SamplingParams(top_k=6), {"depth": 3, "temperature": TEMPERATURE, "max_new_tokens": NEW}
    named = [(p.id, pair.tokenizer(p.text)["input_ids"]) for p in asked]
    settings = Settings(TEMPERATURE, NEW, sampling=few, verification="match")
    hole, impossible = {}, 0
    with torch.inference_mode():
        for name, prompt in named:
            text = written["plain"][name][: NEW + 3]
            kept = sampled_rows(pair, settings, prompt, text, target_rows(pair, prompt, text)[0]) > -torch.inf
            there = [bool(kept[at, token]) for at, token in enumerate(text)]
            hole[name] = [*there, False].index(False)
            impossible += there.count(False)
    assert impossible > 5
    with pytest.warns(SpecstopWarning, match=r"% of the tokens cannot be drawn at temperature 0.7, top-k 6"):
        trace = collect(pair, asked, tmp_path / "a", completions=written["plain"], sampling=few, **options)
    assert trace.header.facts["completions"]["impossible"] == impossible
    rows = {}
    for row in numpy_rows(trace):
        rows.setdefault(str(row["prompt_id"]), []).append(int(row["anchor"]))
    for name, _ in named:
        text = written["plain"][name][: NEW + 3]
        ended = hole[name] == len(text) and text[-1] == EOS
        last = min(NEW, hole[name] if ended else hole[name] - 2)
        assert rows.get(name, []) == list(range(1, last))


def test_texts_of_another_temperature_are_refused_and_right_ones_are_not(pair: Pair, tmp_path: Path) -> None:
    assert pair.tokenizer is not None
    many = make_prompts(60, "many", 41)
    named = [(p.id, pair.tokenizer(p.text)["input_ids"]) for p in many]
    settings = Settings(TEMPERATURE, NEW, verification="match")
    found = {}
    for temperature in (0.4, TEMPERATURE, 1.4):
        texts = {name: write(pair, ids, NEW, temperature, SamplingParams(), at) for at, (name, ids) in enumerate(named)}
        found[temperature] = sampling_balance(
            pair, settings, list(zip(many, [ids for _, ids in named], strict=True)), texts, NEW
        )
        if temperature != TEMPERATURE:
            words = {name: pair.tokenizer.decode(text) for name, text in texts.items()}
            with pytest.raises(InputError, match=r"completions: these texts were not sampled .* at temperature 0.7: "):
                collect(pair, many, tmp_path / "a", depth=2, temperature=TEMPERATURE, max_new_tokens=NEW,
                        completions=words)  # fmt: skip
    assert not (tmp_path / "a").exists(), "refused before anything is written"
    errors = {at: abs(one["mean"]) / one["standard_error"] for at, one in found.items()}
    assert errors[TEMPERATURE] < 4 < min(errors[0.4], errors[1.4])
    assert found[0.4]["mean"] > 0 > found[1.4]["mean"], "colder texts surprise less"
    assert found[TEMPERATURE]["texts"] == 60 and found[TEMPERATURE]["impossible"] == 0


def test_the_mean_and_its_error_are_those_of_a_plain_loop(plain_pair: Pair) -> None:
    assert plain_pair.tokenizer is not None
    prompts = make_prompts(9, "loop", 51)
    named = [(p.id, plain_pair.tokenizer(p.text)["input_ids"]) for p in prompts]
    texts = {name: write(plain_pair, ids, 12, 0.9, TOP_P, at) for at, (name, ids) in enumerate(named)}
    parts = []
    for name, prompt in named:
        for at, token in enumerate(texts[name]):
            ids = torch.tensor([[*prompt, *texts[name][:at]]])
            with torch.no_grad():
                logits = plain_pair.target(ids).logits[:, -1]
                scores = TOP_P.build(0.9, prompt, (EOS,), torch.device("cpu"))(ids, logits)
            p = torch.softmax(scores[0], -1)
            there = p[p > 0]
            parts.append((name, float(p[token].log() - (there * there.log()).sum())))
    values = np.array([value for _, value in parts])
    off = values - values.mean()
    sums = np.array([off[[owner == name for owner, _ in parts]].sum() for name, _ in named])
    error = math.sqrt((sums**2).sum() * 9 / 8) / len(values)
    encoded = list(zip(prompts, [ids for _, ids in named], strict=True))
    found = sampling_balance(plain_pair, Settings(0.9, 12, sampling=TOP_P, verification="match"), encoded, texts, 12)
    assert (found["mean"], found["standard_error"]) == pytest.approx((values.mean(), error), rel=1e-9)
    assert (found["texts"], found["tokens"]) == (9, len(values))


def test_few_texts_are_taken_with_a_warning_and_odd_ids_are_not(
    pair: Pair, asked: list[Prompt], tmp_path: Path
) -> None:
    options = {"depth": 2, "temperature": TEMPERATURE, "max_new_tokens": 8}
    with pytest.warns(SpecstopWarning, match="3 texts are too few to tell whether they were sampled"):
        collect(pair, asked[:3], tmp_path / "a", completions={p.id: [7, 8, 9, 10, 11] for p in asked[:3]}, **options)
    with pytest.raises(InputError, match=r"completions: prompt 'given0' has the token 99; expected ids below 48"):
        collect(pair, asked[:3], tmp_path / "b", completions={p.id: [7, 99] for p in asked[:3]}, **options)
    with pytest.raises(InputError, match=r"completions: prompt 'given1' has none"):
        collect(pair, asked[:3], tmp_path / "b", completions={"given0": [7, 8, 9]}, **options)


def test_completions_are_read_as_text_or_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"id": "a", "prompt": "w7", "out": "w8 w9"}\n{"id": "b", "prompt": "w7", "out": [8, 9]}\n')
    read = read_prompts(file, completion="out")
    assert [p.completion for p in read] == ["w8 w9", (8, 9)]
    file.write_text('{"id": "a", "prompt": "w7", "out": [8, "w9"]}\n')
    with pytest.raises(InputError, match=r"completions: .*line 1: .*a list of token ids"):
        read_prompts(file, completion="out")
