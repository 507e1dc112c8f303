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
from hypothesis import given, settings, strategies as st
from specstop.collect.engines.vllm_records import import_vllm
from specstop.collect.store import Trace
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.analysis import trace_outcomes
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.importance import importance_estimate
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.checks import check_fit, check_training_traces


def response(accepted: list[int], drafted: list[int] | None = None, name: str = "a") -> dict[str, Any]:
    metrics: dict[str, Any] = {"num_spec_tokens": 3, "num_spec_steps": len(accepted), "per_step_accepted": accepted}
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
        values = evaluate_rounds(arrays, FixedLength(k), profile)
        assert (len(values.committed), float(values.committed.sum())) == (4, tokens), (
            "without the last round of each request"
        )
    with pytest.raises(TraceError, match="drawn_prob"):
        evaluate_rounds(arrays, Confidence(0.4, 3), profile)


def test_drafts_that_could_reach_the_end_of_a_text_are_left_out_whatever_they_accept(tmp_path: Path) -> None:
    """The last step accepts more than others, since long steps are more likely to be last."""
    record = response([3, 0, 0, 3])  # anchors 1, 5, 6, 7: drafts reach to 4, 8, 9, 10
    for tokens, cut in ((9, [False, False, False, True]), (8, [False, False, True, True])):
        record["usage"]["completion_tokens"] = tokens
        trace = import_vllm(write(tmp_path / "r.jsonl", [record]), tmp_path / f"{tokens}")
        assert list(trace.rows.with_format("numpy")["cut"][:]) == cut
    del record["usage"]
    trace = import_vllm(write(tmp_path / "s.jsonl", [record]), tmp_path / "other")
    assert list(trace.rows.with_format("numpy")["cut"][:]) == [False, False, False, True]


def test_an_import_says_what_any_length_would_have_accepted(tmp_path: Path, profile: Profile) -> None:
    records, lengths = engine_records.simulated(engine_records.fixed, requests=400, rounds=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecstopWarning)
        trace = import_vllm(write(tmp_path / "r.jsonl", records), tmp_path / "out")
    arrays, length = trace_arrays(trace, extra=ROUND_COLUMNS), np.concatenate(lengths)
    truth = [float((length >= k).mean()) for k in range(1, engine_records.DEPTH + 1)]
    assert trace_outcomes(arrays).survival == pytest.approx(truth, rel=0.04)
    for k in range(1, engine_records.DEPTH + 1):
        values = evaluate_rounds(arrays, FixedLength(k), profile)
        assert float(values.committed.mean()) == pytest.approx(1.0 + np.minimum(length, k).mean(), rel=0.02)


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    ("choose", "limit"),
    [(engine_records.by_confidence, 1), (engine_records.at_random, 1), (engine_records.all_or_none, 0)],
)
def test_lengths_that_vary_identify_no_longer_ones(
    tmp_path: Path, profile: Profile, choose: Callable[..., Any], limit: int
) -> None:
    """An engine's long drafts may be those of easy rounds: taken for all rounds, they promise what nobody reaches."""
    records, lengths = engine_records.simulated(choose, requests=60, rounds=60)
    with pytest.warns(SpecstopWarning, match=f"draft lengths vary .* beyond depth {limit}"):
        trace = import_vllm(write(tmp_path / "r.jsonl", records), tmp_path / "out")
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS)
    with pytest.raises(TraceError, match=f"at most {limit} tokens"):
        evaluate_rounds(arrays, FixedLength(2), profile)
    with pytest.raises(TraceError, match=f"at most {limit} tokens"):
        evaluate(trace, profile, [FixedLength(2)])
    with pytest.raises(TraceError, match="explore"):
        importance_estimate(trace, FixedLength(2), profile)
    if limit:
        tokens = float(evaluate_rounds(arrays, FixedLength(1), profile).committed.mean())
        assert tokens == pytest.approx(1.0 + (np.concatenate(lengths) >= 1).mean(), rel=0.03)
        report = evaluate(trace, profile, [FixedLength(1)])
        assert (len(report.fixed), len(report.acceptance)) == (2, 1)
        assert any("draft lengths vary" in text for text in report.caveats)


def test_a_shorter_draft_at_the_end_of_a_text_is_no_variation(tmp_path: Path) -> None:
    records = [response([0, 1, 0], [3, 3, 1])]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecstopWarning)
        trace = import_vllm(write(tmp_path / "r.jsonl", records), tmp_path / "out")
    assert trace.header.facts["lengths"] == "fixed"


@pytest.mark.usefixtures("few_draws")
def test_the_temperature_of_records_is_unknown(
    tmp_path: Path, profile: Profile, learned: LearnedPolicy, sides: tuple[Trace, Trace]
) -> None:
    records = [response([0, 3, 1, 2]), response([2, 2, 1], name="b")]
    trace = import_vllm(write(tmp_path / "r.jsonl", records), tmp_path / "t")
    report = evaluate(trace, profile, [FixedLength(2)], out=tmp_path / "report")
    assert report.facts["temperature"] == "unknown"
    for file in ("t/README.md", "report/report.md", "report/report.html"):
        assert "unknown" in (tmp_path / file).read_text(encoding="utf-8")
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
    with pytest.raises(InputError, match="line 2: the id"):
        import_vllm(write(tmp_path / "r.jsonl", records), tmp_path / "other")


INVALID = [
    {"usage": {}}, response([4], [3]), response([1, 2], [3]), "text", {**response([1]), "usage": [1]},
    {**response([1]), "usage": {"prompt_tokens": "many"}}, {"num_spec_tokens": 3, "per_step_accepted": [float("inf")]},
    {"num_spec_tokens": 3, "acceptance_histogram": [2, 0, 1, 1]}, response([1], [10**9]), response([-1]),
    {**response([1]), "usage": {"completion_tokens": 10**12}},
]  # fmt: skip


@pytest.mark.parametrize("record", INVALID, ids=lambda record: json.dumps(record)[:40])
def test_a_line_without_a_valid_record_is_named(tmp_path: Path, record: Any) -> None:
    with pytest.raises(InputError, match=r"path: .*line 2: "):
        import_vllm(write(tmp_path / "r.jsonl", [response([1]), record]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["metrics", "usage", "per_step_accepted", "per_step_drafted", "num_spec_tokens"]), inner
        )
    ),
)


@settings(max_examples=40, deadline=None)
@given(record=JSON)
def test_malformed_records_are_refused_with_one_error(tmp_path_factory: pytest.TempPathFactory, record: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    try:
        import_vllm(write(folder / "r.jsonl", [response([1, 3]), record]), folder / "out")
    except InputError as error:
        assert "line 2" in str(error) and not (folder / "out").exists()


def test_texts_may_hold_any_character(tmp_path: Path) -> None:
    record = {**response([1, 2]), "choices": [{"text": "one\u2028two\x85three"}]}  # which `str.splitlines` cuts in two
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8-sig")
    assert import_vllm(file, tmp_path / "out").row_count == 2


@pytest.mark.parametrize("content", [b"\xff\n", b"", None, b'{"num_spec_tokens": 3, "per_step_accepted": []}'])
def test_files_without_a_draft_are_refused_before_anything_is_written(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"^path: "):
        import_vllm(tmp_path / "r.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
