"""Traces of filtered sampling: replay is the live loop, the header says what was sampled from, policies are checked by it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_scripts import part
from conftest import NEW, make_prompts
from specstop.collect.dense import DenseCollector
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.schema import NO_TOKEN, Header, PromptTask
from specstop.decode.benchmark import bench
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.run import decode
from specstop.decode.verify.conditions import warn_if_untrained
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.features import CHAIN_FEATURES
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.run import train
from specstop.train.replay.traces.arrays import trace_arrays
from specstop.train.replay.traces.concatenate import joined_arrays
from trace_rows import numpy_rows
from transformers.generation.logits_process import (
    LogitsProcessor,
)

same_rounds = part("same_rounds", of="filtered")
TOP_P = SamplingParams(top_p=0.8)


class Banning(LogitsProcessor):
    """Bans the token after the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, (input_ids[:, -1:] + 1) % scores.shape[1], -torch.inf)


CASES = [  # each filter once, each temperature and shape several times
    (name, temperature, shape)
    for at, name in enumerate(same_rounds.FILTERS)
    for temperature, shape in [(same_rounds.TEMPERATURES[at % 3], ("chain", "tree")[at % 2])]
] + [("top-p 0.9", 1.0, "tree"), ("repetition penalty 1.2", 0.7, "chain")]


@pytest.mark.parametrize(("name", "temperature", "shape"), CASES)
def test_replay_of_filtered_traces_is_the_live_loop(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, name: str, temperature: float, shape: str
) -> None:
    sampling, tree = same_rounds.FILTERS[name], same_rounds.SHAPES[shape]
    found = same_rounds.same_rounds(pair, prompts[::2], NEW, sampling, temperature, tree, tmp_path / "trace")
    assert found.rounds > 150
    assert (found.wrong, found.not_finite) == (0, 0)


def test_replay_where_a_filter_leaves_fewer_tokens_than_siblings(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    """And where one of the user's own reads the tokens before."""
    sampling, tree = SamplingParams(top_k=2, processors=(Banning(),)), "3,3,1,1,1"
    found = same_rounds.same_rounds(pair, prompts[::2], NEW, sampling, 0.7, tree, tmp_path / "trace")
    assert (found.wrong, found.not_finite) == (0, 0)
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
    samplings = (
        *same_rounds.FILTERS.values(),
        SamplingParams(
            top_k=3,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.4,
            no_repeat_ngram=2,
            min_new_tokens=9,
            processors=(Banning(),),
        ),
    )
    bare = plain_texts(pair, prompt_ids, keys, NEW, 0.7).tokens
    for sampling in samplings:
        for temperature in (0.0, 0.7):
            texts = plain_texts(pair, prompt_ids, keys, NEW, temperature, sampling=sampling).tokens
            loop = Speculator(pair, FixedLength(0), Settings(temperature, NEW, sampling=sampling, verification="match"))
            assert texts == [list(loop.generate(i, k).tokens) for i, k in zip(prompt_ids, keys, strict=True)]
            assert temperature == 0.0 or texts != bare


def test_a_mixed_trace_is_of_the_filtered_distribution(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path
) -> None:
    """One token is left, so the draft's is sure; and labels are those of the dense trace."""
    options = {"depth": 1, "temperature": 0.7, "max_new_tokens": NEW, "sampling": SamplingParams(top_k=1)}
    mixed = numpy_rows(collect(pair, prompts, tmp_path / "mixed", mix=0.3, **options))
    work = [PromptTask(n, str(n), "", ids, stream_key(0, str(n))) for n, ids in enumerate(prompt_ids)]
    settings = Settings(0.7, NEW, 1, sampling=SamplingParams(top_k=1), verification="match")
    alone, together = (DenseCollector(pair, settings, memory_bytes=size, mix=0.3).rows(work) for size in (1, 1 << 28))
    for one, other in zip(alone, together, strict=True):  # one text at a time, or all side by side
        columns = {name: value for name, value in one.items() if isinstance(value, np.ndarray)}
        assert {"tokens", "accepted", "top1"} <= set(columns)
        assert all(np.allclose(value, other[name], atol=1e-6) for name, value in columns.items())
    dense = numpy_rows(collect(pair, prompts, tmp_path / "dense", **options))
    key = lambda row: (int(row["sequence"]), int(row["anchor"]))  # noqa: E731
    labels = {key(row): bool(row["accepted"][0]) for row in dense}
    assert {key(row): bool(row["accepted"][0]) for row in mixed} == labels
    assert all(row["draft_prob"][0] == 1.0 for row in mixed)
    chances = {float(row["drawn_prob"][0]) for row in mixed}
    assert chances == {0.0, 1.0}, "after the mixed text another token may be the only one left"
    assert all(np.isfinite(row[name]).all() for row in mixed for name in CHAIN_FEATURES)


def test_the_header_says_what_was_sampled_from(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    sampling = SamplingParams(top_p=0.8, min_new_tokens=3, processors=(Banning(),))
    header = collect(pair, prompts[:2], tmp_path / "a", depth=2, max_new_tokens=6, sampling=sampling).header
    assert header.sampling == {"top_p": 0.8, "min_new_tokens": 3, "processors": ["Banning"]}
    assert Header.from_json(header.to_json(), "x") == header
    with pytest.raises(TraceError, match="a run with another sampling"):
        collect(pair, prompts[:2], tmp_path / "a", depth=2, max_new_tokens=6, resume=True)


def test_traces_of_different_filters_are_not_one(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    made = [collect(pair, prompts[:2], tmp_path / str(len(s.options)), depth=2, temperature=0.7, max_new_tokens=6, sampling=s)
            for s in (SamplingParams(), TOP_P)]  # fmt: skip
    with pytest.raises(TraceError, match=r"differ in sampling \(\{\}, \{'top_p': 0.8\}\)"):
        joined_arrays(made)


def test_options_come_back_from_their_facts() -> None:
    sampling = SamplingParams(
        top_k=3, top_p=0.9, min_p=0.01, repetition_penalty=1.4, no_repeat_ngram=2, min_new_tokens=9
    )
    assert SamplingParams.from_dict(sampling.to_dict()).to_dict() == sampling.to_dict()
    assert SamplingParams.from_dict({}).to_dict() == SamplingParams().to_dict() == {}
    for facts, message in (({"colour": 1}, "colour"), ({"top_p": 7}, "top_p"),
                           ({"processors": ["Banning"]}, "processors.*restored")):  # fmt: skip
        with pytest.raises(InputError, match=message):
            SamplingParams.from_dict(facts)


@pytest.fixture(scope="module")
def learned(pair: Pair, full_profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy trained under top-p 0.8 at temperature 0.7."""
    room = tmp_path_factory.mktemp("learned")
    traces = collect(pair, make_prompts(24, "fit", 21), room / "traces", depth=5, temperature=0.7, max_new_tokens=NEW,
                     sampling=TOP_P, verification="match")  # fmt: skip
    train(traces, full_profile, head="logistic", out=room / "policy", cross_fit=False)
    return room / "policy"


def test_a_policy_keeps_what_it_was_trained_for(learned: Path) -> None:
    assert load_policy_folder(learned).metadata.sampling == {"top_p": 0.8}
    assert "top-p 0.8" in (learned / "README.md").read_text()


def test_other_filters_and_temperatures_are_told_of(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], full_profile: Profile, learned: Path, tmp_path: Path
) -> None:
    policy = load_policy_folder(learned)
    filtered = "another filter \\(top-p 0.8\\) than this run \\(none\\)"
    plain = Settings(0.7, 4, verification="match")
    with pytest.warns(SpecstopWarning, match=filtered):
        decode(pair, [prompts[0].text], policy, settings=plain)
    with pytest.warns(SpecstopWarning, match=filtered):
        bench(pair, [prompt_ids[3]], [policy], settings=plain)
    with pytest.warns(SpecstopWarning, match="another temperature \\(0.7\\) than this run \\(1.0\\)"):
        warn_if_untrained(policy, Settings(1.0, 4, sampling=TOP_P, verification="match"))
    with pytest.warns(SpecstopWarning, match="another verification \\(match\\) than this run \\(rejection\\)"):
        warn_if_untrained(policy, Settings(0.7, 4, sampling=TOP_P, verification="rejection"))
    other = collect(pair, prompts, tmp_path / "plain", depth=5, temperature=0.7, max_new_tokens=NEW,
                    verification="match")  # fmt: skip
    with pytest.warns(SpecstopWarning, match="another filter \\(top-p 0.8\\) than these traces \\(none\\)"):
        evaluate(other, full_profile, [policy])
    explored = collect(pair, prompts, tmp_path / "live", depth=5, temperature=0.7, max_new_tokens=NEW, collector="live",
                       policy=FixedLength(3), explore=0.5)  # fmt: skip
    with pytest.warns(SpecstopWarning, match="another filter \\(top-p 0.8\\) than these traces \\(none\\)"):
        evaluate(explored, full_profile, [policy])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(pair, [prompts[0].text], policy, settings=Settings(0.7, 4, sampling=TOP_P, verification="match"))
        warn_if_untrained(FixedLength(3), plain)
    with pytest.warns(SpecstopWarning, match="trained for another pair .* than this run .*'draft': 'lookup'"):
        decode(
            pair,
            [prompts[0].text],
            policy,
            settings=Settings(0.7, 4, sampling=TOP_P, verification="match"),
            drafter="lookup",
        )


def test_generate_tells_of_a_filter_that_a_policy_was_not_trained_for(
    plain_pair: Pair, prompt_ids: list[list[int]], learned: Path
) -> None:
    from specstop.decode.hf.generate import specstop_generate

    def generate(**options: object) -> None:
        plain_pair.target.generate(
            torch.tensor([prompt_ids[3]]), custom_generate=specstop_generate, draft_model=plain_pair.draft, max_new_tokens=4,
            do_sample=True, policy=str(learned), pad_token_id=0, **options,
        )  # fmt: skip

    with pytest.warns(SpecstopWarning, match="another filter \\(top-p 0.8\\) than this run \\(top-k 7\\)"):
        generate(temperature=0.7, top_k=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecstopWarning)
        generate(temperature=0.7, top_k=0, top_p=0.8)
