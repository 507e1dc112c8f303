"""Samples of a prompt: how records name them, how runs keep them apart, and which warnings point out unnamed ones."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import make_prompts
from specstop.collect.prompts import Prompt, read_prompts, warn_sample_ids
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import stream_name
from specstop.decode.models.pair import Pair
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.train.drafters.texts import record_texts
from specstop.train.replay.arrays import trace_arrays

SYSTEM = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]


def write(folder: Path, records: Sequence[dict[str, Any]]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def record(id: str | None, prompt: Any = "a", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, **({} if id is None else {"id": id}), **more}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([record("q", sample="x"), record("q", sample=1)], [("q", "x"), ("q", "1")]),
        ([record("r1", prompt_id="q"), record("r2", prompt_id="q")], [("q", "r1"), ("q", "r2")]),
        ([record("q", prompt_id="q"), record(None, prompt_id="q"), record(None, prompt_id="p")],
         [("q", "0"), ("q", "1"), ("p", "0")]),
        ([record("r", prompt_id=7, sample="x"), record("r", prompt_id=7, sample="y")], [("7", "x"), ("7", "y")]),
        ([record("q", sample=""), record("p", sample=None, prompt_id="")], [("q", ""), ("p", "")]),
    ],
    ids=["sample", "prompt_id", "numbered", "both", "empty"],
)  # fmt: skip
def test_records_name_prompt_and_sample(
    tmp_path: Path, records: list[dict[str, Any]], expected: list[tuple[str, str]]
) -> None:
    path = write(tmp_path, records)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecstopWarning)  # of equal texts
        prompts = read_prompts(path)
    assert [(prompt.id, prompt.sample) for prompt in prompts] == expected


def test_a_column_of_samples_may_hold_their_texts(tmp_path: Path) -> None:
    path = write(tmp_path, [record("a", sample="w7 w8"), record("b", "b", sample="w9")])
    prompts = read_prompts(path, completion="sample")
    assert [(p.id, p.sample, p.completion) for p in prompts] == [("a", "", "w7 w8"), ("b", "", "w9")]
    assert [p.sample for p in read_prompts(path, column="sample")] == ["", ""]


def test_samples_without_ids_belong_to_the_prompt_of_their_text(tmp_path: Path) -> None:
    first, second, other = read_prompts(
        write(tmp_path, [record(None, sample="x"), record(None, sample="y"), record(None, "b", sample="x")])
    )
    assert first.id == second.id != other.id


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record("q", sample="x"), record("q", sample="x")], "line 2: sample 'x' of prompt 'q' appears in line 1 too"),
        ([record("q"), record("q")], "line 2: prompt 'q' appears in line 1 too; .*column `sample`"),
        ([record("r1", prompt_id="q"), record("r2", "b", prompt_id="q")],
         "line 2: prompt id 'q' appears in line 1 too, with another text; use another prompt_id, or `group`"),
        ([record("q", sample="x"), record("q", "b", sample="y")], "line 2: prompt id 'q' .* with another text"),
        ([record("q", sample="x"), record("q", SYSTEM, sample="y")], "line 2: prompt id 'q' .* with another text"),
        ([record("q", sample="\ud800")], "line 1: the sample has half a surrogate pair"),
    ],
    ids=["same sample", "same id", "other text", "other text of a sample", "system message", "surrogate"],
)  # fmt: skip
def test_samples_that_contradict_each_other_are_refused(
    tmp_path: Path, records: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(write(tmp_path, records))
    assert "\n" not in str(caught.value)


def test_prompts_that_are_not_read_from_a_file_must_be_unique_too(pair: Pair) -> None:
    options = {"depth": 2, "max_new_tokens": 6}
    assert plan_run(pair, [Prompt("q", "w7"), Prompt("q", "w7", sample="x")], **options)
    with pytest.raises(InputError, match="prompt number 2: prompt 'q' appears in prompt number 1 too"):
        plan_run(pair, [Prompt("q", "w7"), Prompt("q", "w7")], **options)
    with pytest.raises(InputError, match=r"prompt id 'q' .* with another text"):
        plan_run(pair, [Prompt("q", "w7"), Prompt("q", "w8", sample="x")], **options)


def warned(path: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_prompts(path)
    return [str(one.message) for one in caught if issubclass(one.category, SpecstopWarning)]


def test_equal_texts_under_several_ids_are_counted(tmp_path: Path) -> None:
    records = [record("a"), record("b"), record("c", "b"), record("d"), record("e"), record("c", "b", sample="x")]
    (message,) = warned(write(tmp_path, records))
    assert message.startswith("3 prompts repeat the text of an earlier one; ")
    (message,) = warned(write(tmp_path, records[:3]))
    assert message.startswith("1 prompt repeats the text of an earlier one; ")
    assert warned(write(tmp_path, [records[0], records[2]])) == []


@pytest.mark.parametrize("mark", ["-", "_", "/", "#"])
def test_ids_of_unknown_texts_that_look_like_samples_are_pointed_out(mark: str) -> None:
    ids = [f"q{i}{mark}{sample}" for i in range(3) for sample in range(2)] + [f"other{i}" for i in range(9)]
    with pytest.warns(SpecstopWarning, match="6 of 15 ids look like samples .*prompt_id.*sample") as caught:
        warn_sample_ids(ids)
    assert f"'q0{mark}0'" in str(caught[0].message)


@pytest.mark.parametrize(
    "ids",
    [
        [f"HumanEval/{i}" for i in range(20)],
        [f"{word}-{i}" for word in ("writing", "math") for i in range(10)],
        [f"module.py#{i}" for i in range(10)],
        [f"q{i}" for i in range(10)],
        [f"q{i}-0" for i in range(10)],
        ["q1-0", "q1-1", *(f"q{i}" for i in range(2, 20))],
    ],
    ids=["set", "categories", "files", "numbers", "one of each", "few"],
)
def test_other_ids_are_not(ids: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecstopWarning)
        warn_sample_ids(ids)


def test_equal_texts_are_known_to_be_samples_and_named_ones_are_right(tmp_path: Path) -> None:
    ids = [f"q{i}-{sample}" for i in range(4) for sample in range(3)]
    (message,) = warned(write(tmp_path, [record(name, name.partition("-")[0]) for name in ids]))
    assert message.startswith("8 prompts repeat the text of an earlier one; ")
    assert warned(write(tmp_path, [record(name, f"text of {name}", prompt_id=name) for name in ids])) == []


def samples_of(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    return [dataclasses.replace(prompt, sample=f"s{number}") for prompt in prompts for number in range(count)]


def test_samples_of_a_prompt_draw_different_random_numbers(pair: Pair, tmp_path: Path) -> None:
    prompts = make_prompts(3, "sampled", 61)
    options = {"depth": 2, "temperature": 0.9, "verification": "match", "max_new_tokens": 12, "seed": 4}
    trace = collect(pair, samples_of(prompts, 2), tmp_path / "a", **options)
    arrays = trace_arrays(trace)
    names = list(zip(arrays.prompt_ids, arrays.samples, strict=True))
    assert len(set(names)) == len(names) > 3
    assert arrays.keys.tolist() == [stream_key(4, stream_name(*name)) for name in names]
    assert len(set(arrays.clusters)) == len(set(arrays.prompt_ids)) < len(names)
    (sample,) = (p for p in samples_of(prompts, 2) if (p.id, p.sample) == names[1])
    single = trace_arrays(collect(pair, [sample], tmp_path / "b", **options))
    assert single.tokens.tolist() == arrays.subset([1]).tokens.tolist(), "whatever else is collected"
    assert names[0][0] == names[1][0] and arrays.subset([0]).tokens.tolist() != single.tokens.tolist()


def test_a_run_with_other_samples_is_another_run(pair: Pair) -> None:
    prompts = make_prompts(2, "sampled", 61)
    plain, named, other = (
        plan_run(pair, [dataclasses.replace(p, sample=sample) for p in prompts], depth=2, max_new_tokens=6).header
        for sample in ("", "x", "y")
    )
    assert plain.differences(named) == named.differences(other) == ["prompts_hash"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_sample_is_labelled_by_its_completion(pair: Pair, tmp_path: Path, temperature: float) -> None:
    (prompt,) = make_prompts(1, "sampled", 61)
    texts = [[7, 8, 9, 10, 11, 12], [12, 11, 10, 9, 8]]
    samples = samples_of([prompt], 2)
    completions = {(p.id, p.sample): text for p, text in zip(samples, texts, strict=True)}
    options = {"depth": 1, "temperature": temperature, "max_new_tokens": 6}
    plan = plan_run(pair, samples, completions=completions, **options)
    chunks = {chunk["sample"][0]: chunk for chunk in plan.rows(plan.tasks[0])}
    if temperature:
        assert {name: int(chunk["text_tokens"][0]) for name, chunk in chunks.items()} == {"s0": 6, "s1": 5}
    for sample, text in zip(samples, texts, strict=True):
        single = plan_run(pair, [sample], completions={(sample.id, sample.sample): text}, **options)
        (*expected,) = single.rows(single.tasks[0])
        assert len(expected) == (sample.sample in chunks)
        assert all((one["accepted"] == chunks[sample.sample]["accepted"]).all() for one in expected)
    changed = plan_run(pair, samples, completions={**completions, (prompt.id, "s1"): [7, 8, 9]}, **options)
    assert changed.header.differences(plan.header) == ["completions"]
    with pytest.raises(InputError, match=f"completions: sample 's1' of prompt {prompt.id!r} has none"):
        plan_run(pair, samples, completions={prompt.id: [7, 8], (prompt.id, "s0"): [7, 8]}, **options)


def test_drafters_are_fitted_on_different_texts_of_a_prompt(pair: Pair, tmp_path: Path) -> None:
    (prompt,) = make_prompts(1, "sampled", 61)
    ids = list(pair.tokenizer(prompt.text)["input_ids"]) if pair.tokenizer else []
    named = [(sample, ids) for sample in samples_of([prompt], 4)]
    texts = list(record_texts(pair, named, tmp_path, max_new_tokens=12, temperature=0.9))
    assert len({tuple(text.tokens.tolist()) for text in texts if not text.greedy}) > 1
