"""vLLM's records: rounds of known outcome, for policies that look at the depth alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from specstop.collect.engines.vllm_records import import_vllm
from specstop.policies.baselines.fixed import Confidence, FixedLength
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.latency.profile import Profile
from specstop.train.replay.rounds import ROUND_COLUMNS, evaluate_rounds
from specstop.train.replay.traces.arrays import trace_arrays


def response(accepted: list[int], drafted: list[int] | None = None, name: str = "a") -> dict[str, Any]:
    metrics: dict[str, Any] = {"num_spec_tokens": 3, "num_spec_steps": len(accepted), "per_step_accepted": accepted}
    metrics["acceptance_histogram"] = [accepted.count(n) for n in range(4)]
    if drafted:
        metrics["per_step_drafted"] = drafted
    usage = {"prompt_tokens": 7, "completion_tokens": 1 + sum(accepted) + len(accepted)}
    return {"id": name, "usage": usage, "metrics": {"speculative_decoding": metrics}}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


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


def test_a_summary_is_laid_out_by_length(tmp_path: Path) -> None:
    metrics = {"num_spec_tokens": 3, "acceptance_histogram": [2, 0, 1, 1]}
    trace = import_vllm(write(tmp_path / "r.jsonl", [metrics]), tmp_path / "out")
    assert list(trace.rows.with_format("numpy")["accepted_length"][:]) == [0, 0, 2, 3]


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
    with pytest.raises(InputError, match=r"--from-vllm: .* is not UTF-8 text"):
        import_vllm(file, tmp_path / "out")


@pytest.mark.parametrize("record", [response([]), response([0, 0], [0, 0])])
def test_records_without_a_draft_are_refused_before_anything_is_written(tmp_path: Path, record: Any) -> None:
    file = write(tmp_path / "r.jsonl", [record])
    with pytest.raises(InputError, match="no step that drafted"):
        import_vllm(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--from-vllm: expected a JSON Lines file"):
        import_vllm(tmp_path / "none", tmp_path / "out")
