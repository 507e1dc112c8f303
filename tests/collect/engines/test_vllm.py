"""vLLM's records: rounds of known outcome, for policies that look at the depth alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_records
import numpy as np
import pytest
from engine_records import write
from specstop.collect.engines.vllm_records import import_vllm
from specstop.collect.store import Trace
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.analysis import trace_outcomes
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.importance import importance_estimate
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.checks import check_fit, check_training_traces
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds


def response(accepted: list[int], drafted: list[int] | None = None, name: str = "a") -> dict[str, Any]:
    metrics: dict[str, Any] = {"num_spec_tokens": 3, "num_spec_steps": len(accepted), "per_step_accepted": accepted}
    metrics["acceptance_histogram"] = [accepted.count(n) for n in range(4)]
    if drafted:
        metrics["per_step_drafted"] = drafted
    usage = {"prompt_tokens": 7, "completion_tokens": 1 + sum(accepted) + len(accepted)}
    return {"id": name, "usage": usage, "metrics": {"speculative_decoding": metrics}}


def test_steps_become_rounds_that_fixed_lengths_are_evaluated_on(tmp_path: Path, profile: Profile) -> None:
    file = write(tmp_path / "r.jsonl", [response([0, 3, 1, 2]), response([2, 2], name="b")])
    trace = import_vllm(file, tmp_path / "out")
    rows = trace.rows.with_format("numpy")
    assert list(rows["anchor"][:]) == [1, 2, 6, 8, 1, 4]
    assert list(rows["prompt_id"][:]) == ["a"] * 4 + ["b"] * 2
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS)
    for k, tokens in ((0, 4), (1, 4 + 0 + 1 + 1 + 1), (2, 4 + 0 + 2 + 1 + 2), (3, 4 + 0 + 3 + 1 + 2)):
        found = evaluate_rounds(arrays, FixedLength(k), profile)
        assert (len(found.committed), float(found.committed.sum())) == (4, tokens), (
            "the last round of each request is left out"
        )
        assert any("as it was drawn" in text for text in found.caveats)
    with pytest.raises(TraceError, match="no feature 'drawn_prob'"):
        evaluate_rounds(arrays, Confidence(0.4, 3), profile)


def test_steps_of_other_lengths_are_left_out(tmp_path: Path, profile: Profile) -> None:
    file = write(tmp_path / "r.jsonl", [response([0, 1, 1, 2], [3, 1, 3, 3])])
    arrays = trace_arrays(import_vllm(file, tmp_path / "out"), extra=ROUND_COLUMNS)
    found = evaluate_rounds(arrays, FixedLength(3), profile)
    assert (len(found.committed), float(found.committed.sum())) == (2, 3.0)


def test_a_summary_is_laid_out_by_length_and_every_step_counts(tmp_path: Path, profile: Profile) -> None:
    metrics = {"num_spec_tokens": 3, "acceptance_histogram": [2, 0, 1, 1]}
    trace = import_vllm(write(tmp_path / "r.jsonl", [metrics, metrics]), tmp_path / "out")
    assert list(trace.rows.with_format("numpy")["accepted_length"][:]) == [0, 0, 2, 3] * 2
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS)
    assert trace_outcomes(arrays).survival.tolist() == [0.5, 0.5, 0.25]
    for k, tokens in ((1, 12), (2, 16), (3, 18)):
        found = evaluate_rounds(arrays, FixedLength(k), profile)
        assert (len(found.committed), float(found.committed.sum())) == (8, tokens)


def test_drafts_that_could_reach_the_end_of_a_text_are_left_out_whatever_they_accept(tmp_path: Path) -> None:
    """The last step accepts more than others, since long steps are more likely to be last."""
    record = response([3, 0, 0, 3])
    record["usage"]["completion_tokens"] = 9  # anchors 1, 5, 6, 7: drafts reach to 4, 8, 9, 10
    trace = import_vllm(write(tmp_path / "r.jsonl", [record]), tmp_path / "out")
    assert list(trace.rows.with_format("numpy")["cut"][:]) == [False, False, False, True]
    record["usage"]["completion_tokens"] = 8
    trace = import_vllm(write(tmp_path / "s.jsonl", [record]), tmp_path / "other")
    assert list(trace.rows.with_format("numpy")["cut"][:]) == [False, False, True, True]


@pytest.mark.parametrize(
    ("choose", "form"),
    [(engine_records.fixed, list), (engine_records.fixed, engine_records.summary), (engine_records.at_random, list)],
)
def test_an_import_says_what_any_length_would_have_met(
    tmp_path: Path, profile: Profile, choose: Callable[..., Any], form: Callable[[list[Any]], list[Any]]
) -> None:
    records, lengths = engine_records.simulated(choose, requests=400, rounds=60)
    arrays = trace_arrays(
        import_vllm(write(tmp_path / "r.jsonl", form(records)), tmp_path / "out"), extra=ROUND_COLUMNS
    )
    length = np.concatenate(lengths)
    truth = [float((length >= k).mean()) for k in range(1, engine_records.DEPTH + 1)]
    assert trace_outcomes(arrays).survival == pytest.approx(truth, rel=0.04)
    for k in range(1, engine_records.DEPTH + 1):
        found = evaluate_rounds(arrays, FixedLength(k), profile)
        assert float(found.committed.mean()) == pytest.approx(1.0 + np.minimum(length, k).mean(), rel=0.02)
        varied = choose is engine_records.at_random
        assert any("does not depend on the tokens" in text for text in found.caveats) == varied
        assert not varied or len(found.committed) == (arrays.drawn.sum(1) >= k)[~arrays.cut].sum()


@pytest.mark.usefixtures("few_draws")
def test_lengths_that_follow_the_tokens_identify_no_longer_ones(tmp_path: Path, profile: Profile) -> None:
    """The engine's long drafts are those of easy rounds: taken for all rounds, they promise what nobody reaches."""
    records, lengths = engine_records.simulated(engine_records.by_confidence, requests=60, rounds=60)
    file = write(tmp_path / "r.jsonl", records)
    with pytest.warns(SpecstopWarning, match="draft lengths depend on acceptance .* beyond depth 1, which every step"):
        trace = import_vllm(file, tmp_path / "out")
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS)
    message = (
        "expected a policy of at most 1 tokens, got fixed:[26]: .*record with a fixed draft length, or with random"
    )
    for policy in (FixedLength(2), FixedLength(6)):
        with pytest.raises(TraceError, match=message):
            evaluate_rounds(arrays, policy, profile)
        with pytest.raises(TraceError, match=message):
            evaluate(trace, profile, [policy])
        with pytest.raises(TraceError, match="explore"):
            importance_estimate(trace, policy, profile)
    tokens = float(evaluate_rounds(arrays, FixedLength(1), profile).committed.mean())
    assert tokens == pytest.approx(1.0 + (np.concatenate(lengths) >= 1).mean(), rel=0.03)
    report = evaluate(trace, profile, [FixedLength(1)])
    assert (len(report.fixed), len(report.acceptance)) == (2, 1)
    assert any("depend on acceptance" in text for text in report.caveats)


def test_a_round_without_a_draft_leaves_nothing_identified(tmp_path: Path, profile: Profile) -> None:
    records, _ = engine_records.simulated(engine_records.all_or_none, requests=100, rounds=60)
    with pytest.warns(SpecstopWarning, match="beyond depth 0"):
        trace = import_vllm(write(tmp_path / "r.jsonl", records), tmp_path / "out")
    with pytest.raises(TraceError, match="at most 0 tokens"):
        evaluate(trace, profile, [])


@pytest.mark.usefixtures("few_draws")
def test_the_temperature_of_records_is_unknown(
    tmp_path: Path, profile: Profile, learned: LearnedPolicy, sides: tuple[Trace, Trace]
) -> None:
    trace = import_vllm(
        write(tmp_path / "r.jsonl", [response([0, 3, 1, 2]), response([2, 2, 1], name="b")]), tmp_path / "t"
    )
    report = evaluate(trace, profile, [FixedLength(2)], out=tmp_path / "report")
    assert report.facts["temperature"] == "unknown"
    assert "| temperature | unknown |" in (tmp_path / "t" / "README.md").read_text(encoding="utf-8")
    for name in ("report.md", "report.html"):
        assert "temperature unknown" in (tmp_path / "report" / name).read_text(encoding="utf-8")
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
    arrays = trace_arrays(import_vllm(write(tmp_path / "r.jsonl", records), tmp_path / "out"))
    named = [("q", "r1"), ("q", "r2"), ("p", "3"), ("o", "")]
    assert list(zip(arrays.prompt_ids, arrays.samples, strict=True)) == named
    assert arrays.clusters == ["q", "q", "p", "o"]
    records[1]["sample"] = "\ud800"
    with pytest.raises(InputError, match="line 2: the id has half a surrogate pair"):
        import_vllm(write(tmp_path / "r.jsonl", records), tmp_path / "other")


@pytest.mark.parametrize("base", ["q{}", "cmpl-{}ac0ffee"])
def test_ids_that_look_like_samples_are_pointed_out(tmp_path: Path, base: str) -> None:
    names = [f"{base.format(prompt)}-{sample}" for prompt in range(2) for sample in range(2)]
    file = write(tmp_path / "r.jsonl", [response([1], name=name) for name in names])
    with pytest.warns(SpecstopWarning, match="4 of 4 ids look like samples .* `prompt_id` or `sample`"):
        import_vllm(file, tmp_path / "out")
    file = write(tmp_path / "s.jsonl", [{**response([1], name=name), "prompt_id": name} for name in names])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecstopWarning)
        import_vllm(file, tmp_path / "named")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"usage": {}}, "line 2: expected a response with metrics.speculative_decoding"),
        (response([4], [3]), "line 2: steps accept more"),
        ("text", "line 2: expected a response"),
        ({**response([1]), "usage": [1]}, "line 2: expected a response"),
        ({**response([1]), "usage": {"prompt_tokens": "many"}}, "line 2: expected a response"),
        ({"num_spec_tokens": 3, "acceptance_histogram": [float("inf")]}, "line 2: expected a response"),
        (response([1], [10**9]), "line 2: expected steps of less than 1024 tokens"),
        ({**response([1]), "usage": {"completion_tokens": 10**12}}, "line 2: .* texts of 0 to 2"),
        (
            {"num_spec_tokens": 3, "acceptance_histogram": [2, 0, 1, 1], "num_draft_tokens": 11},
            "line 2: expected 4 steps of 3 drafted tokens, but they drafted 11 in all, .* record with .* detailed",
        ),
    ],
)
def test_a_line_without_a_record_is_named(tmp_path: Path, record: Any, message: str) -> None:
    file = write(tmp_path / "r.jsonl", [response([1]), record])
    with pytest.raises(InputError, match=message):
        import_vllm(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_texts_may_hold_any_character(tmp_path: Path) -> None:
    record = {**response([1, 2]), "choices": [{"text": "one\u2028two\x85three"}]}  # which `str.splitlines` cuts in two
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8-sig")
    assert import_vllm(file, tmp_path / "out").row_count == 2


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(b"\xff\n")
    with pytest.raises(InputError, match=r"^path: .* is not UTF-8 text"):
        import_vllm(file, tmp_path / "out")


@pytest.mark.parametrize("record", [response([]), response([0, 0], [0, 0])])
def test_records_without_a_draft_are_refused_before_anything_is_written(tmp_path: Path, record: Any) -> None:
    file = write(tmp_path / "r.jsonl", [record])
    with pytest.raises(InputError, match="no step that drafted"):
        import_vllm(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="path: expected a JSON Lines file"):
        import_vllm(tmp_path / "none", tmp_path / "out")
