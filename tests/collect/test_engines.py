"""Rounds of engines: rows of simulated engines, timings of the steps of vLLM, and its acceptance records."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from simulated_engine import Engine, Request
from specstop.collect.acceptance import depth_outcomes
from specstop.collect.engines.records import import_records
from specstop.collect.engines.through_vllm import RoundRecorder, engine_features
from specstop.collect.engines.vllm_profile import measure_vllm
from specstop.collect.exploring import exploring
from specstop.collect.live import LiveCollector
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.schema import NO_TOKEN, Header, PromptTask, parents
from specstop.collect.store import Trace
from specstop.decode.drafters import find_drafters, with_drafter
from specstop.decode.engines.drafting import Drafting, Options
from specstop.decode.engines.vllm import Proposer
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.topology import chain
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.features import SIGNALS
from specstop.policies.fixed import FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.checks import check_fit, check_training_traces
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds

K, NEW = 4, 20


@pytest.fixture(scope="module")
def requests(endless_pair: Pair) -> list[Request]:
    chance = np.random.default_rng(4)
    prompts = [[int(t) for t in chance.integers(17, 48, n)] for n in chance.integers(2, 9, 8)]
    texts = plain_texts(endless_pair, prompts, [0] * len(prompts), NEW, 0.0).tokens
    return [Request(f"r{i}", p, list(t)) for i, (p, t) in enumerate(zip(prompts, texts, strict=True))]


def serve(
    pair: Pair, requests: list[Request], policy: str, explore: float = 0.0, gentle: bool = False, seed: int = 0
) -> tuple[RoundRecorder, Engine]:  # fmt: skip
    """Run requests in a simulated engine; return the recorder of its drafts and the engine."""
    chosen = load_policy(policy)
    chosen = exploring(chosen, explore, K) if explore else chosen
    proposer = cast(Proposer, SimpleNamespace(drafting=None))
    options = Options(3, K, 128, pair.vocabulary)
    drafters = find_drafters(pair.drafter, pair)
    signals = [name for name in chosen.features if name in SIGNALS]
    recorder = RoundRecorder(proposer, options, len(drafters), signals)
    proposer.drafting = drafting = Drafting(drafters, chosen, options, observer=recorder)
    engine = Engine([Request(r.name, r.prompt, r.answer) for r in requests], 3, seed, gentle=gentle)

    def propose(sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        at = [i for i, new in enumerate(sampled) if new]
        drafts = drafting.propose([tokens[i, : lengths[i]] for i in at], [engine.names[i] for i in at])
        out: list[list[int]] = [[] for _ in sampled]
        for i, draft in zip(at, drafts, strict=True):
            out[i] = draft
        return out

    engine.run(propose)
    return recorder, engine


def finished_rows(recorder: RoundRecorder, engine: Engine) -> dict[str, Mapping[str, Any]]:
    """Return the rows of each finished request."""
    texts, rows = recorder.take(), {}
    for at, request in enumerate(engine.finished):
        parts = [text for text in texts if text.name == request.name]
        columns = recorder.rows(parts, PromptTask(at, request.name, "", request.prompt), request.answer)
        assert columns is not None
        rows[request.name] = columns
    return rows


@pytest.mark.parametrize(
    ("drafter", "policy", "signals"),
    [
        ("model", "confidence:0.3", ()),
        ("suffix", "fixed:4", ()),
        ("suffix+model", "match:0.2?lengths=4+3", ("match_prob",)),
    ],
)
def test_rounds_are_those_that_the_live_collector_records(
    endless_pair: Pair, requests: list[Request], drafter: str, policy: str, signals: tuple[str, ...]
) -> None:
    """Greedy, undisturbed: the same rounds of the same texts, features within float32 rounding, labels equal."""
    pair = with_drafter(endless_pair, drafter)
    rows = finished_rows(*serve(pair, requests, policy, gentle=True))
    live = LiveCollector(pair, load_policy(policy), Settings(0.0, NEW, K, ignore_eos=True))
    assert live.signals == signals
    compared, drawn = 0, 0
    for theirs in live.rows([PromptTask(i, r.name, "", r.prompt) for i, r in enumerate(requests)]):
        mine = rows[theirs["prompt_id"][0]]
        # The loop stops where the limit is; an engine drafts on and commits no more than the limit.
        inside = theirs["anchor"] + K + 1 <= NEW
        count = int(inside.sum())
        for name in (
            *("anchor", "drawn", "sent", "tokens", "accepted_length", "decisions", "backlog", "committed"),
            *("accepted", "observed"),
        ):
            assert np.array_equal(np.asarray(mine[name])[:count], np.asarray(theirs[name])[inside]), name
        for name in (*engine_features(0.0), *signals, "draft_prob", "anchor_token", "before_token"):
            assert np.allclose(mine[name][:count], theirs[name][inside], rtol=1e-4, atol=1e-5), name
        compared, drawn = compared + count, drawn + theirs["drawn"].sum(0)
    assert compared > 40 and np.all(drawn[: len(find_drafters(drafter, pair))] > 2), "each drafter drafted at depth 1"
    assert not any(name.startswith("noisy_") for name in engine_features(0.7))


def test_labels_are_what_followed_and_no_round_is_lost_or_twice(endless_pair: Pair, requests: list[Request]) -> None:
    """Preempted, moved, aborted, trimmed: every draft that the engine was given has its row, once, with what came of it."""
    rounds = 0
    for seed in range(3):
        recorder, engine = serve(endless_pair, requests, "fixed:3", seed=seed)
        rows = finished_rows(recorder, engine)
        for request in engine.finished:
            mine = rows[request.name]
            given = [(context, draft, new) for context, draft, new in request.rounds if context > len(request.prompt)]
            assert mine["anchor"].tolist() == [context - len(request.prompt) for context, *_ in given]
            assert mine["committed"].tolist() == [len(new) for *_, new in given]
            for at, (context, draft, _) in enumerate(given):
                after = request.answer[context - len(request.prompt) :]
                agreed = next((j for j, t in enumerate(draft) if j >= len(after) or after[j] != t), len(draft))
                if draft:  # a request that came back from preemption has lost its draft
                    assert mine["tokens"][at][mine["sent"][at]].tolist() == draft
                    assert mine["accepted_length"][at] == agreed
            assert mine["cut"].tolist()[-1] and mine["text_tokens"][0] == NEW
            assert (mine["verify_s"] >= 0).all() and (mine["seconds"] >= mine["draft_s"])[mine["seconds"] > 0].all()
            rounds += len(given)
    assert rounds > 60


def test_rounds_that_explore_are_marked(endless_pair: Pair, requests: list[Request]) -> None:
    rows = finished_rows(*serve(endless_pair, requests, "fixed:1", explore=0.5, gentle=True))
    drawn = np.concatenate([one["drawn"].sum(1) for one in rows.values()])
    explored = np.concatenate([one["explored"] for one in rows.values()])
    assert set(drawn[explored]) == {K} and set(drawn[~explored]) == {1}
    assert 0.25 < explored.mean() < 0.75


def test_a_machine_without_vllm_is_an_error_of_one_line(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("VLLM_LOGGING_STREAM", raising=False)
    with pytest.raises(InputError, match="vLLM cannot be imported"):
        collect(pair, prompts, tmp_path / "t", depth=3, max_new_tokens=8, collector="vllm")
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr", "stdout may be JSON"
    with pytest.raises(InputError, match="vLLM cannot be imported"):
        measure_vllm("t", "d", [[1, 2, 3]], depth=2, new_tokens=4)


# Acceptance records, of simulated engines with known truth

Array = np.ndarray[Any, np.dtype[Any]]
Choice = Callable[[Array, np.random.Generator], Array]

DEPTH = 6
CHOICES: dict[str, Choice] = {
    "random": lambda confidence, generator: generator.integers(1, DEPTH + 1, len(confidence)),
    "longer after confident tokens": lambda confidence, _: np.minimum((confidence > 0.6).cumprod(1).sum(1) + 1, DEPTH),
    "none unless confident": lambda confidence, _: np.where(confidence[:, 0] > 0.5, DEPTH, 0),
    "full": lambda confidence, _: np.full(len(confidence), DEPTH),
}
"""Draft lengths that an engine chooses from the confidence [R, K] in its tokens."""


def simulated(choose: Choice, requests: int = 60) -> tuple[list[dict[str, Any]], Array]:
    """Return the records of an engine, and the accepted lengths of all rounds at full depth."""
    generator = np.random.default_rng(0)
    records, lengths = [], []
    for request in range(requests):
        odds = (
            generator.normal(1.0, 0.8) + generator.normal(0.0, 0.7, (60, 1)) + generator.normal(0.0, 0.6, (60, DEPTH))
        )
        confidence = 1.0 / (1.0 + np.exp(-odds))
        length = (generator.random(odds.shape) < confidence).cumprod(1).sum(1)
        drafted = choose(confidence, generator)
        steps = {"per_step_accepted": np.minimum(length, drafted).tolist(), "per_step_drafted": drafted.tolist()}
        counts = {"num_spec_tokens": DEPTH, "num_draft_tokens": int(drafted.sum()), **steps}
        records.append({"id": f"r{request}", "metrics": {"speculative_decoding": counts}})
        lengths.append(length)
    return records, np.concatenate(lengths)


def write(path: Path, records: list[Any]) -> Path:
    """Write records as JSON Lines."""
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def live_header(topology: tuple[int, ...]) -> Header:
    return Header("", "", {}, 8, (), 0.0, topology, (), (), 99, 0, 1, 1, "", collector="live")


def live_columns(length: Array, drafted: Array, depth: int) -> dict[str, Array]:
    """Return the columns of live rounds of chains that accept `length` tokens at full depth."""
    node = np.arange(depth)
    drawn = node < drafted[:, None]
    accepted = drawn & (node < length[:, None])
    return {
        "accepted_length": accepted.sum(1), "cut": np.zeros(len(length), dtype=bool), "accepted": accepted,
        "observed": drawn & (node <= length[:, None]), "drawn": drawn, "sent": drawn,
        "tokens": np.zeros(drawn.shape, dtype=np.int32), "explored": np.zeros(len(length), dtype=bool),
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from(["", "explored", "cut", "no token"])),
                min_size=1, max_size=12))  # fmt: skip
def test_survival_is_a_product_over_the_depths_that_rounds_observed(cases: list[tuple[int, int, str]]) -> None:
    """Rounds that explored are the only ones if depths are missing. A draft that ends without a token ends in a rejection."""
    cases = [(length, 4 if kind == "explored" else drafted, kind) for length, drafted, kind in cases]
    columns = live_columns(np.array([case[0] for case in cases]), np.array([case[1] for case in cases]), 4)
    for row, (_, drafted, kind) in enumerate(cases):
        columns["cut"][row], columns["explored"][row] = kind == "cut", kind == "explored"
        if kind == "no token":
            columns["tokens"][row, drafted:] = NO_TOKEN
    # Accepted tokens, observed depths, and whether the round explored.
    used = [(min(a, d), 4 if kind == "no token" else d, kind == "explored") for a, d, kind in cases if kind != "cut"]
    if any(accepted == depths < 4 for accepted, depths, _ in used) and any(explored for *_, explored in used):
        used = [case for case in used if case[2]]
    expected, product = [], 1.0
    for depth in range(1, 5):
        observed = [accepted for accepted, depths, _ in used if depths >= depth and accepted >= depth - 1]
        if product != 0.0:
            product *= np.mean([accepted >= depth for accepted in observed]) if observed else np.nan
        expected.append(product)
    assert depth_outcomes(live_header(parents(chain(4))), columns).survival == pytest.approx(expected, nan_ok=True)


def test_of_a_tree_all_candidates_of_a_depth_count() -> None:
    """A depth that counted as observed because one of its few candidates was accepted would always be an acceptance."""
    tree = (-1, -1, 0, 0, 1, 1)  # two candidates, and two after each
    accepted = np.array([[0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=bool)
    drawn = np.array([[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]], dtype=bool)
    columns = {
        "accepted_length": accepted.sum(1), "cut": np.zeros(4, dtype=bool), "accepted": accepted, "drawn": drawn,
        "observed": drawn, "sent": drawn, "tokens": np.zeros((4, 6), dtype=np.int32), "explored": np.zeros(4, dtype=bool),
    }  # fmt: skip
    outcomes = depth_outcomes(live_header(tree), columns)
    assert outcomes.observed.sum(0).tolist() == [4, 2]
    assert outcomes.survival == pytest.approx([0.75, 0.75 / 2])


def response(accepted: list[int], drafted: list[int] | None = None, name: str = "a") -> dict[str, Any]:
    metrics: dict[str, Any] = {"num_spec_tokens": 3, "num_spec_steps": len(accepted), "per_step_accepted": accepted}
    if drafted:
        metrics["per_step_drafted"] = drafted
    usage = {"prompt_tokens": 7, "completion_tokens": 1 + sum(accepted) + len(accepted)}
    return {"id": name, "usage": usage, "metrics": {"speculative_decoding": metrics}}


def test_drafts_that_could_reach_the_end_of_a_text_are_left_out_whatever_they_accept(tmp_path: Path) -> None:
    """The last step accepts more than others, since long steps are more likely to be last."""
    record = response([3, 0, 0, 3])  # anchors 1, 5, 6, 7: drafts reach to 4, 8, 9, 10
    for tokens, cut in ((9, [False, False, False, True]), (8, [False, False, True, True])):
        record["usage"]["completion_tokens"] = tokens
        trace = import_records(write(tmp_path / "r.jsonl", [record]), tmp_path / f"{tokens}")
        assert list(trace.rows.with_format("numpy")["cut"][:]) == cut
    del record["usage"]
    trace = import_records(write(tmp_path / "s.jsonl", [record]), tmp_path / "other")
    assert list(trace.rows.with_format("numpy")["cut"][:]) == [False, False, False, True]


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("choice", [name for name in CHOICES if name != "full"])
def test_lengths_that_vary_identify_no_longer_ones(tmp_path: Path, profile: Profile, choice: str) -> None:
    """An engine's long drafts may be those of easy rounds, which are no estimate for all rounds."""
    records, length = simulated(CHOICES[choice])
    limit = 0 if choice == "none unless confident" else 1
    with pytest.warns(SpecstopWarning, match=f"draft lengths vary .* beyond depth {limit}"):
        trace = import_records(write(tmp_path / "r.jsonl", records), tmp_path / "out")
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS)
    for run, noun in (
        (lambda: evaluate_rounds(arrays, FixedLength(2), profile), f"at most {limit} tokens"),
        (lambda: evaluate(trace, profile, [FixedLength(2)]), f"at most {limit} tokens"),
    ):
        with pytest.raises(TraceError, match=noun):
            run()
    if limit:
        tokens = float(evaluate_rounds(arrays, FixedLength(1), profile).committed.mean())
        assert tokens == pytest.approx(1.0 + (length >= 1).mean(), rel=0.03)
        report = evaluate(trace, profile, [FixedLength(1)])
        assert (len(report.fixed), len(report.acceptance)) == (2, 1)
        assert any("draft lengths vary" in text for text in report.caveats)


@pytest.mark.usefixtures("few_draws")
def test_the_temperature_of_records_is_unknown(
    tmp_path: Path, profile: Profile, learned: LearnedPolicy, sides: tuple[Trace, Trace]
) -> None:
    records = [response([0, 3, 1, 2]), response([2, 2, 1], name="b")]
    trace = import_records(write(tmp_path / "r.jsonl", records), tmp_path / "t")
    report = evaluate(trace, profile, [FixedLength(2)], out=tmp_path / "report")
    assert report.facts["temperature"] == "unknown" and "unknown" in (tmp_path / "t/README.md").read_text()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_fit(learned, trace)  # trained at 0.7
        check_training_traces(sides[0], trace)
    assert not [text for one in caught if "temperature" in (text := str(one.message))]


def test_records_may_name_prompt_and_sample(tmp_path: Path) -> None:
    records = [
        {**response([1], name="r1"), "prompt_id": "q"}, {**response([2], name="r2"), "prompt_id": "q"},
        {**response([1], name="p"), "sample": 3}, response([2], name="o"),
    ]  # fmt: skip
    arrays = trace_arrays(import_records(write(tmp_path / "r.jsonl", records), tmp_path / "out"))
    named = [("q", "r1"), ("q", "r2"), ("p", "3"), ("o", "")]
    assert list(zip(arrays.prompt_ids, arrays.samples, strict=True)) == named
    assert arrays.clusters == ["q", "q", "p", "o"]
    records[1]["sample"] = "\ud800"
    with pytest.raises(InputError, match="line 2: the id"):
        import_records(write(tmp_path / "r.jsonl", records), tmp_path / "other")
