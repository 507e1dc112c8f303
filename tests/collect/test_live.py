"""The live collector and filtered sampling: rows are the loop's rounds and agree with dense ones; replay is the live loop."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_pair import PERSON, byte_pair
from conftest import EOS, NEW, make_prompts
from contract_policies import DEPTH, TEST_POLICIES, ReadsDraftStates
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import NO_TOKEN, TIMES, Header
from specstop.collect.shards import record
from specstop.collect.store import Trace, finished
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.run import decode
from specstop.decode.verify.conditions import warn_if_untrained
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyFailure, SpecstopWarning, TraceError
from specstop.policies.features import ANCHOR_FEATURES, HIDDEN_STATES
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.run import train
from specstop.train.replay.arrays import joined_arrays, trace_arrays
from specstop.train.replay.run import replay
from trace_rows import by_anchor, numpy_rows
from transformers.generation.logits_process import LogitsProcessor

FLOAT32, HALF = 2e-6, 2.0**-10
TREE = "3,2,1,1,1"
MANY = SamplingParams(min_p=0.3, repetition_penalty=1.4, no_repeat_ngram=2, min_new_tokens=9)


def run(pair: Pair, prompts: list[Prompt], out: Path, tree: str | None, temperature: float, **more: Any) -> Trace:
    options = {"depth": DEPTH, "tree": tree, "temperature": temperature, "max_new_tokens": NEW, "verification": "match"}
    return collect(pair, prompts, out, **{**options, **more})


@pytest.mark.parametrize(
    ("tree", "temperature", "sampling"),
    [
        (None, 0.7, SamplingParams()), (TREE, 0.0, SamplingParams()), (TREE, 0.7, SamplingParams()),
        (None, 0.0, SamplingParams(repetition_penalty=1.5, min_new_tokens=NEW)), (None, 0.7, SamplingParams(top_p=0.7)),
        (TREE, 0.7, SamplingParams(top_k=2)), (TREE, 1.0, MANY),
    ],
)  # fmt: skip
def test_dense_and_live_agree_at_the_anchors_that_both_have(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, tree: str | None, temperature: float, sampling: SamplingParams
) -> None:
    options: dict[str, Any] = {"sampling": sampling, "hidden": tuple(HIDDEN_STATES)}
    dense = by_anchor(run(pair, prompts, tmp_path / "dense", tree, temperature, **options))
    policy = ReadsDraftStates() if tree is None else None
    live = by_anchor(
        run(pair, prompts, tmp_path / "live", tree, temperature, collector="live", policy=policy, **options)
    )
    candidates = accepted = 0
    for key, row in live.items():
        other, drawn, known = dense[key], row["drawn"], row["observed"]
        assert (row["tokens"] == other["tokens"])[drawn].all()
        assert (other["tokens"][row["tokens"] == NO_TOKEN] == NO_TOKEN).all()
        assert not (other["tokens"][drawn] == NO_TOKEN).any()
        assert row["text_tokens"] == other["text_tokens"]
        assert not row["draft_hidden"][~drawn].any()
        for name, near in {**dict.fromkeys(ANCHOR_FEATURES, FLOAT32), "target_hidden": HALF}.items():
            np.testing.assert_allclose(row[name], other[name], rtol=near, atol=near, err_msg=name)
        for name in set(other) - {*ANCHOR_FEATURES, "target_hidden", "target_prob", "overlap"}:
            if getattr(other[name], "dtype", None) in (np.float16, np.float32):
                near = HALF if name == "draft_hidden" else FLOAT32
                np.testing.assert_allclose(row[name][drawn], other[name][drawn], rtol=near, atol=near, err_msg=name)
        assert not (known & ~other["observed"]).any()
        assert (row["accepted"] == other["accepted"])[known].all()
        for name in ("target_prob", "overlap"):
            np.testing.assert_allclose(row[name][known], other[name][known], rtol=FLOAT32, atol=FLOAT32, err_msg=name)
        if not row["cut"] and policy is None:
            assert (known == other["observed"]).all(), "a round that is not cut labels all that dense labels"
        candidates, accepted = candidates + int(drawn.sum()), accepted + int(row["accepted"].sum())
    assert candidates > 150 and accepted > 40


class NoTime(type(TEST_POLICIES["adaptive"])):  # type: ignore[misc]
    """`adaptive` without the seconds of rounds."""

    name = "no-time"

    def observe(self, outcome: Any, state: Any) -> Any:
        return super().observe(outcome, state)[0], state[1]


@pytest.mark.parametrize(
    ("policy", "tree", "temperature"),
    [(policy, *setup) for at, policy in enumerate((TEST_POLICIES["trimming"], NoTime(), TEST_POLICIES["selecting"]))
     for setup in ((None, 0.7), (TREE, 0.7 * (at % 2)))],
)  # fmt: skip
def test_rows_are_the_rounds_of_the_loop_and_replay_as_the_run_that_they_record(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile, tmp_path: Path, policy: StopPolicy,
    tree: str | None, temperature: float,
) -> None:  # fmt: skip
    free = type(profile)(
        profile.low, profile.high, 0.0, 0.0, (0.0, 0.0)
    )  # without a profile the loop observes no seconds
    trace = run(pair, prompts, tmp_path, tree, temperature, collector="live", policy=policy)
    log, rows = replay(trace_arrays(trace), policy, free).log, by_anchor(trace)
    speculator = Speculator(pair, policy, Settings(temperature, NEW, DEPTH, tree=tree, verification="match"))
    for s, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
        lines = log[log[:, 0] == s, 1:].tolist()
        assert lines == [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]
        for r in rounds:
            row = rows.pop((s, r.anchor))
            assert [int(row["drawn"].sum()), int(row["sent"].sum())] == [r.drafted, r.verified]
            assert int((row["accepted"] & row["sent"]).sum()) == r.accepted
            assert all(row[name] == getattr(r, name) for name in ("committed", "decisions", "backlog"))
    assert rows == {} and torch.is_inference_mode_enabled() is False


def test_a_live_trace_refuses_a_policy_that_goes_elsewhere(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    arrays = trace_arrays(run(pair, prompts, tmp_path, TREE, 0.7, collector="live", policy=Confidence(0.6, DEPTH)))
    for policy, words in ((FixedLength(DEPTH), "confidence:0.6"), (Confidence(0.1, DEPTH), "no round|did not")):
        with pytest.raises(TraceError, match=words):
            replay(arrays, policy, profile)


@pytest.mark.parametrize(
    ("name", "tree"),
    [("confidence:0.4", None), ("trimming", TREE), ("selecting", TREE), ("fixed:1", None), ("fixed:1", TREE)],
)
def test_exploring_rounds_are_drafted_and_verified_to_full_depth(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, name: str, tree: str | None
) -> None:
    policy: StopPolicy = TEST_POLICIES[name]
    trace = run(pair, prompts, tmp_path, tree, 0.7, collector="live", policy=policy, explore=0.3)
    rows = [row for row in numpy_rows(trace) if not row["cut"]]
    explored = [row for row in rows if row["explored"]]
    assert 0.15 < len(explored) / len(rows) < 0.45 and trace.header.explore == 0.3
    assert all((row["drawn"] == row["sent"]).all() for row in explored)
    assert all(row["drawn"].all() or EOS in row["tokens"] for row in explored), (
        "a branch ends with EOS, or at the bottom"
    )
    assert not all(row["sent"].all() for row in rows if not row["explored"])


def test_exploring_leaves_the_other_rounds_and_the_text_as_they_are(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"collector": "live", "policy": Confidence(0.4, DEPTH)}
    plain, mixed = (
        by_anchor(run(pair, prompts, tmp_path / str(explore), None, 0.7, explore=explore, **options))
        for explore in (0.0, 0.3)
    )
    shared = [key for key in set(plain) & set(mixed) if not mixed[key]["explored"]]
    assert len(shared) > 40
    for key in shared:
        for name in ("drawn", "sent", "tokens", "committed", "decisions"):
            assert np.array_equal(plain[key][name], mixed[key][name])
    assert {k[0]: r["text_tokens"] for k, r in plain.items()} == {k[0]: r["text_tokens"] for k, r in mixed.items()}


@pytest.mark.parametrize("verification", ["rejection", "rejection_replace", "block", "typical"])
def test_every_verification_can_be_recorded(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, verification: str
) -> None:
    tree = None if verification == "block" else TREE
    trace = run(pair, prompts[:4], tmp_path, tree, 0.7, collector="live", verification=verification)
    assert trace.header.verification == verification
    assert not [name for name in trace.header.features if name.startswith("noisy_")]
    rows = numpy_rows(trace)
    assert sum(int(row["accepted"].sum()) for row in rows) > 10
    for row in rows:
        for inner, outer in (("accepted", "observed"), ("observed", "sent"), ("sent", "drawn")):
            assert not (row[inner] & ~row[outer]).any()
        assert all(row[name] >= 0 for name in TIMES)
        assert row["seconds"] >= row["verify_s"] > 0


def test_labels_of_rejection_end_at_the_accepted_sibling(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    trace, counts = run(pair, prompts, tmp_path, "4", 0.7, collector="live", verification="rejection"), set()
    for row in numpy_rows(trace):
        if not row["drawn"].all():
            continue
        tried = int(row["observed"].sum())
        assert row["observed"][:tried].all()
        assert row["accepted"].tolist() == [at == tried - 1 and bool(row["accepted"].any()) for at in range(4)]
        assert (row["target_prob"][row["draft_prob"] > 0] > 0).all(), "p is known of every node that was verified"
        counts.add(tried)
    assert len(counts) > 2


class Fails(Confidence):
    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        raise RuntimeError("now")


def test_a_policy_that_fails_ends_the_collection(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    with pytest.warns(match="failed"), pytest.raises(PolicyFailure, match="now"):
        run(pair, prompts, tmp_path, None, 0.0, collector="live", policy=Fails(0.4, DEPTH), explore=0.3)


class Carrying(StopPolicy):
    """Drafts one token more for every few rounds that it has observed, from text to text."""

    name, carries, max_depth = "carrying", True, DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth <= state // 5 % DEPTH)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + outcome.active


@pytest.mark.parametrize("shards", [None, 4])
def test_a_carrying_policy_resumed_is_one_undisturbed(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, shards: int | None
) -> None:
    """It starts anew with each shard; by default there is one, so that its state passes through all texts."""
    options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": NEW, "collector": "live", "shards": shards}
    whole = collect(pair, prompts, tmp_path / "whole", policy=Carrying(), **options)
    plan = plan_run(pair, prompts, policy=Carrying(), **options)
    assert whole.header.shards == (shards or 1)

    def interrupted(batch: Any) -> Any:
        if finished(tmp_path / "broken", plan.header):
            raise KeyboardInterrupt
        return plan.rows(batch)

    with contextlib.suppress(KeyboardInterrupt):
        record(dataclasses.replace(plan, rows=interrupted), tmp_path / "broken")
    resumed = record(plan_run(pair, prompts, policy=Carrying(), **options), tmp_path / "broken", resume=True)
    columns = ("sequence", "anchor", "tokens", "drawn", "sent", "committed", "decisions", "accepted")
    assert resumed.table(columns).equals(whole.table(columns))
    assert len({int(row["drawn"].sum()) for row in numpy_rows(whole)}) > 3
    many = [dataclasses.replace(p, id=f"{p.id}-{i}") for i in range(9) for p in prompts]
    by_policy = [plan_run(pair, many, policy=policy, **options) for policy in (FixedLength(2), Carrying())]
    assert [one.header.shards for one in by_policy] == [shards or 3, shards or 1]


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
    with pytest.raises(TraceError, match="sampling"):
        collect(pair, prompts[:2], tmp_path / "0", sampling=TOP_P, resume=True, **options)


def test_a_policy_is_warned_about_where_it_was_not_trained(
    pair: Pair, plain_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], full_profile: Profile, tmp_path: Path
) -> None:  # fmt: skip
    """A policy trained under top-p 0.8 at temperature 0.7."""
    options: dict[str, Any] = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "verification": "match"}
    fit = collect(pair, make_prompts(24, "fit", 21), tmp_path / "fit", sampling=TOP_P, **options)
    policy = train(fit, full_profile, head="logistic", out=tmp_path / "policy", cross_fit=False).policy
    assert policy.metadata.sampling == {"top_p": 0.8}
    plain, same = (Settings(0.7, 4, sampling=s, verification="match") for s in (SamplingParams(), TOP_P))
    other = collect(pair, prompts, tmp_path / "plain", **options)

    def generate(**sampling: object) -> None:
        plain_pair.target.generate(
            torch.tensor([prompt_ids[3]]), custom_generate=specstop_generate, draft_model=plain_pair.draft, max_new_tokens=4,
            do_sample=True, policy=str(tmp_path / "policy"), pad_token_id=0, temperature=0.7, **sampling,
        )  # fmt: skip

    for run, words in (
        (lambda: decode(pair, [prompts[0].text], policy, settings=plain), "another filter"),
        (lambda: evaluate(other, full_profile, [policy]), "another filter"),
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
        generate(top_k=0, top_p=0.8)
