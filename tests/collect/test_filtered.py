"""Traces of filtered and structured sampling: replay is the live loop, the header says what was sampled from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_pair import PERSON, byte_pair
from conftest import NEW, make_prompts
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.schema import NO_TOKEN, Header
from specstop.decode.benchmark import bench
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.run import decode
from specstop.decode.verify.conditions import warn_if_untrained
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.features import CHAIN_FEATURES
from specstop.policies.fixed import FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.policies.storage import load_policy_folder
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.run import train
from specstop.train.replay.arrays import joined_arrays, trace_arrays
from specstop.train.replay.run import replay
from trace_rows import by_anchor
from transformers.generation.logits_process import LogitsProcessor

TREE = "3,2,1,1,1"
TOP_P = SamplingParams(top_p=0.8)
FILTERS = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}
ALL = {"top_k": 3, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.4, "no_repeat_ngram": 2, "min_new_tokens": 9}


class Banning(LogitsProcessor):
    """Bans the token after the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, (input_ids[:, -1:] + 1) % scores.shape[1], -torch.inf)


class ByNoise(StopPolicy):
    """Reads what the filters change: margins, the chance of the drawn token, its path; and trims by it."""

    name, trims, max_depth = "by-noise", True, DEPTH
    features = ("noisy_margin", "noisy_lead", "drawn_prob", "path_logprob", "mean_accepted")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        margin, lead, chance, path, mean = np.moveaxis(step.features, -1, 0)
        return step.alive & (margin > 0.2) & (lead > -1.5) & (chance > 0.05) & (path > -5.0 - mean), state


def compared_rounds(
    pair: Pair, prompts: Sequence[Prompt], tokens: int, sampling: SamplingParams, temperature: float, tree: str | None,
    profile: Profile, folder: Path,
) -> int:  # fmt: skip
    """Assert that replay of a dense trace gives the rounds of the live loop under several policies; return their number."""
    assert pair.tokenizer is not None
    options: dict[str, Any] = {"tree": tree, "sampling": sampling, "verification": "match"}
    trace = collect(pair, prompts, folder, depth=DEPTH, temperature=temperature, max_new_tokens=tokens, **options)
    arrays, rounds = trace_arrays(trace), 0
    assert all(torch.isfinite(values).all() for values in arrays.columns.values())
    policies = [
        FixedLength(0),
        FixedLength(2),
        FixedLength(DEPTH),
        ByNoise(),
        *map(load_policy, ("confidence:0.2", "online:0.4")),
    ]
    for policy in policies:
        policy = policy.limited(DEPTH)
        speculator = Speculator(pair, policy, Settings(temperature, tokens, DEPTH, **options), profile)
        log = replay(arrays, policy, profile).log.tolist()
        at = {name: number for number, name in enumerate(arrays.prompt_ids)}
        for prompt in prompts:
            live = speculator.generate(list(pair.tokenizer(prompt.text)["input_ids"]), stream_key(0, prompt.id)).rounds
            replayed = [line[1:] for line in log if line[0] == at.get(prompt.id)]
            assert [[r.anchor, r.drafted, r.verified, r.accepted] for r in live] == replayed, policy.name
            rounds += len(live)
    return rounds


@pytest.mark.parametrize(
    ("name", "temperature", "tree"),
    [*((name, (0.5, 0.7, 1.0)[at % 3], (None, TREE)[at % 2]) for at, name in enumerate(FILTERS)), ("top_p", 1.0, TREE),
     ("repetition_penalty", 0.7, None)],
)  # fmt: skip
def test_replay_of_filtered_traces_is_the_live_loop(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path, name: str, temperature: float, tree: str | None
) -> None:
    sampling = SamplingParams(**{name: FILTERS[name]})
    assert compared_rounds(pair, prompts[::2], NEW, sampling, temperature, tree, profile, tmp_path / "t") > 100


def test_replay_where_a_filter_leaves_fewer_tokens_than_siblings(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    """And where one of the user's own reads the tokens before."""
    sampling, tree = SamplingParams(top_k=2, processors=(Banning(),)), "3,3,1,1,1"
    compared_rounds(pair, prompts[::2], NEW, sampling, 0.7, tree, profile, tmp_path / "a")
    again = collect(
        pair, prompts[::2], tmp_path / "b", tree=tree, temperature=0.7, max_new_tokens=NEW, sampling=sampling
    )
    arrays = trace_arrays(again)
    missing = (arrays.tokens == NO_TOKEN).numpy()
    third = [2, 5, 8, 9, 10, 11]  # the third of each three siblings, and all below that of the first level
    assert missing[:, third].all()
    assert not missing[:, [0, 1, 3, 4, 6, 7]].any()
    assert missing[:, 12:].sum(1).tolist() == [15] * len(missing), "and what would be drawn after those of depth 2"
    assert not any(values.numpy()[missing].any() for values in arrays.columns.values() if values.dim() == 2)


def test_plain_texts_are_those_of_the_loop_whatever_is_sampled_from(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]]
) -> None:
    keys = [stream_key(0, p.id) for p in prompts]
    bare = plain_texts(pair, prompt_ids, keys, NEW, 0.7).tokens
    filters = [SamplingParams(**{name: value}) for name, value in FILTERS.items()]
    for sampling in (*filters, SamplingParams(**ALL, processors=(Banning(),))):
        for temperature in (0.0, 0.7):
            texts = plain_texts(pair, prompt_ids, keys, NEW, temperature, sampling=sampling).tokens
            loop = Speculator(pair, FixedLength(0), Settings(temperature, NEW, sampling=sampling, verification="match"))
            assert texts == [list(loop.generate(i, k).tokens) for i, k in zip(prompt_ids, keys, strict=True)]
            assert temperature == 0.0 or texts != bare


def test_a_mixed_trace_is_of_the_filtered_distribution(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    """One token is left, so the draft's is sure; and labels are those of the dense trace."""
    options: dict[str, Any] = {
        "depth": 1,
        "temperature": 0.7,
        "max_new_tokens": NEW,
        "sampling": SamplingParams(top_k=1),
    }
    mixed = by_anchor(collect(pair, prompts, tmp_path / "mixed", mix=0.3, **options))
    dense = by_anchor(collect(pair, prompts, tmp_path / "dense", **options))
    assert {key: bool(row["accepted"][0]) for key, row in mixed.items()} == {
        key: bool(row["accepted"][0]) for key, row in dense.items()
    }
    assert all(row["draft_prob"][0] == 1.0 for row in mixed.values())
    chances = {float(row["drawn_prob"][0]) for row in mixed.values()}
    assert chances == {0.0, 1.0}, "after the mixed text another token may be the only one left"
    assert all(np.isfinite(row[name]).all() for row in mixed.values() for name in CHAIN_FEATURES)


@pytest.fixture(scope="module")
def structured() -> tuple[Pair, Any, list[Prompt]]:
    """A pair of bytes, a grammar and prompts."""
    grammars = pytest.importorskip("specstop.decode.verify.grammar")
    pytest.importorskip("llguidance")
    pair = byte_pair()
    prompts = [Prompt(str(at), text) for at, text in enumerate(("the name", '{"age": 4', "a tag", "ok?"))]
    return pair, grammars.Grammar.from_json_schema(PERSON, pair.tokenizer), prompts


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tree", [None, "2,2,1,1,1"])
def test_replay_under_a_grammar_is_the_live_loop(
    structured: tuple[Pair, Any, list[Prompt]], profile: Profile, tmp_path: Path, temperature: float, tree: str | None
) -> None:
    pair, grammar, prompts = structured
    sampling = SamplingParams(processors=(grammar,))
    assert compared_rounds(pair, prompts, 90, sampling, temperature, tree, profile, tmp_path / "trace") > 50


@pytest.mark.parametrize("collector", ["dense", "live"])
def test_the_header_names_the_grammar_and_resuming_requires_the_same(
    structured: tuple[Pair, Any, list[Prompt]], tmp_path: Path, collector: str
) -> None:
    pair, grammar, prompts = structured
    options = {"depth": 3, "max_new_tokens": 40, "temperature": 0.7, "collector": collector, "verification": "match"}
    trace = collect(pair, prompts, tmp_path / "a", sampling=SamplingParams(processors=(grammar,)), **options)
    assert trace.header.sampling == {"processors": [grammar.name]}
    other = type(grammar).from_text("root ::= [a-c]{5}", pair.tokenizer)
    for sampling in (SamplingParams(), SamplingParams(processors=(other,))):
        with pytest.raises(TraceError, match="sampling"):
            collect(pair, prompts, tmp_path / "a", sampling=sampling, resume=True, **options)


def test_the_header_says_what_was_sampled_from_and_traces_of_different_filters_are_not_one(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    sampling = SamplingParams(top_p=0.8, min_new_tokens=3, processors=(Banning(),))
    options = {"depth": 2, "temperature": 0.7, "max_new_tokens": 6}
    traces = [
        collect(pair, prompts[:2], tmp_path / str(at), sampling=s, **options) for at, s in enumerate((sampling, TOP_P))
    ]
    header = traces[0].header
    assert header.sampling == {"top_p": 0.8, "min_new_tokens": 3, "processors": ["Banning"]}
    assert Header.from_json(header.to_json(), "x") == header
    with pytest.raises(TraceError, match="sampling"):
        joined_arrays(traces)


def test_sampling_parameters_come_back_from_their_dictionary() -> None:
    sampling = SamplingParams(**ALL)
    assert SamplingParams.from_dict(sampling.to_dict()).to_dict() == sampling.to_dict()
    assert SamplingParams.from_dict({}).to_dict() == SamplingParams().to_dict() == {}
    for values, noun in (
        ({"colour": 1}, "colour"),
        ({"top_p": 7}, "top_p"),
        ({"processors": ["Banning"]}, "processors"),
    ):
        with pytest.raises(InputError, match=noun):
            SamplingParams.from_dict(values)


def test_a_policy_is_warned_about_under_other_filters_temperatures_and_verifications(
    pair: Pair,
    plain_pair: Pair,
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    full_profile: Profile,
    tmp_path: Path,
) -> None:
    """A policy trained under top-p 0.8 at temperature 0.7."""
    options: dict[str, Any] = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW}
    fit = collect(pair, make_prompts(24, "fit", 21), tmp_path / "fit", sampling=TOP_P, verification="match", **options)
    train(fit, full_profile, head="logistic", out=tmp_path / "policy", cross_fit=False)
    policy = load_policy_folder(tmp_path / "policy")
    assert isinstance(policy, LearnedPolicy) and policy.metadata.sampling == {"top_p": 0.8}
    assert "top-p 0.8" in (tmp_path / "policy" / "README.md").read_text()
    plain, same = (Settings(0.7, 4, sampling=s, verification="match") for s in (SamplingParams(), TOP_P))
    other = collect(pair, prompts, tmp_path / "plain", verification="match", **options)
    explored = collect(
        pair, prompts, tmp_path / "live", collector="live", policy=FixedLength(3), explore=0.5, **options
    )

    def generate(**sampling: object) -> None:
        plain_pair.target.generate(
            torch.tensor([prompt_ids[3]]), custom_generate=specstop_generate, draft_model=plain_pair.draft, max_new_tokens=4,
            do_sample=True, policy=str(tmp_path / "policy"), pad_token_id=0, temperature=0.7, **sampling,
        )  # fmt: skip

    for run, words in (
        (lambda: decode(pair, [prompts[0].text], policy, settings=plain), "another filter"),
        (lambda: bench(pair, [prompt_ids[3]], [policy], settings=plain), "another filter"),
        (lambda: evaluate(other, full_profile, [policy]), "another filter"),
        (lambda: evaluate(explored, full_profile, [policy]), "another filter"),
        (lambda: generate(top_k=7), "another filter"),
        (lambda: warn_if_untrained(policy, Settings(1.0, 4, sampling=TOP_P, verification="match")), "temperature"),
        (lambda: warn_if_untrained(policy, Settings(0.7, 4, sampling=TOP_P, verification="rejection")), "verification"),
        (lambda: decode(pair, [prompts[0].text], policy, settings=same, drafter="lookup"), "another pair"),
    ):
        with pytest.warns(SpecstopWarning, match=words):
            run()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecstopWarning)
        decode(pair, [prompts[0].text], policy, settings=same)
        warn_if_untrained(FixedLength(3), plain)
        generate(top_k=0, top_p=0.8)
