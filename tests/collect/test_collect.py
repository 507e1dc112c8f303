"""`collect`: the same rows whatever happened on the way, killed processes included."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import VOCABULARY
from learned_policies import FACTS, learned
from specstop.collect.prompts import Prompt, read_prompts
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import Header, PromptTask
from specstop.collect.shards import DistributedRank, Plan, record
from specstop.collect.store import Trace, finished, load_trace, shard_path
from specstop.decode.models.pair import Pair, load_pair
from specstop.policies.errors import InputError, TraceError
from specstop.policies.files import STAGE_PREFIX
from specstop.policies.fixed import Confidence
from specstop.policies.learned import TrainingMetadata
from specstop.policies.profile import Profile
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.registry import load_policy
from specstop.policies.storage import load_policy_folder, save_policy

SHARDS = 20
OPTIONS: dict[str, Any] = {"depth": 3, "temperature": 0.7, "max_new_tokens": 10, "seed": 5, "shards": SHARDS}


def collect_and_hang(
    models: Path, prompts: Path, out: Path, rank: DistributedRank, shards: int, writing: bool, ready: Connection
) -> None:
    """Collect so many shards in a process of its own, then say so and wait to be killed, the next one half done."""
    torch.set_num_threads(1)
    pair = load_pair(models / "target", models / "draft", dtype="float64", engine="compact")
    plan = plan_run(pair, read_prompts(prompts), **OPTIONS)
    written, replace = [0], os.replace

    def hang() -> None:
        ready.send(None)
        threading.Event().wait()

    def rows(batch: Sequence[PromptTask]) -> Sequence[Mapping[str, Any]]:
        if written[0] == shards and not writing:
            hang()
        return plan.rows(batch)

    def replace_or_hang(stage: Path, path: Path) -> None:
        if path.suffix == ".parquet":
            if written[0] == shards:
                hang()
            written[0] += 1
        replace(stage, path)

    os.replace = replace_or_hang
    record(Plan(plan.header, plan.tasks, rows), out, rank=rank, resume=True)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance = random.Random(8)
    lines = [
        {
            "id": f"q{i}",
            "prompt": " ".join(f"w{chance.randrange(6, VOCABULARY)}" for _ in range(1 + i % 5)),
            "group": i % 3,
        }
        for i in range(60)
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def many(prompt_file: Path) -> list[Prompt]:
    return read_prompts(prompt_file)


@pytest.fixture(scope="module")
def undisturbed(pair: Pair, many: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return collect(pair, many, tmp_path_factory.mktemp("undisturbed"), **OPTIONS)


def test_killed_processes_started_again_leave_the_rows_of_an_undisturbed_run(
    pair: Pair, pair_folder: Path, prompt_file: Path, many: list[Prompt], undisturbed: Trace, tmp_path: Path
) -> None:
    """Three kills: of one process, then of both of two; one while it collects, two while they write."""
    out, total, left = tmp_path / "out", 0, 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["specstop.collect.run", "specstop.decode.models.pair"])
    for moments in ([(2, True)], [(3, True), (1, False)]):
        children = []
        for rank, (shards, writing) in enumerate(moments):
            told, ready = context.Pipe(duplex=False)
            arguments = (pair_folder, prompt_file, out, DistributedRank(rank, len(moments)), shards, writing, ready)
            child = context.Process(target=collect_and_hang, args=arguments, daemon=True)
            child.start()
            children.append((child, told))
        for child, told in children:
            wait([told, child.sentinel])
            assert told.poll(), "it ended before it was killed"
            child.kill()
            child.join()
        total += sum(shards for shards, _ in moments)
        there = finished(out, undisturbed.header)
        assert len(there) == total
        left += sum(writing for _, writing in moments)
        assert len(list(out.rglob(f"{STAGE_PREFIX}*.parquet.*"))) == left
        for index in there:
            tables = [pq.read_table(shard_path(folder, index, SHARDS)) for folder in (out, undisturbed.folder)]
            assert tables[0].equals(tables[1])
    calls: list[tuple[int, int]] = []
    trace = collect(
        pair,
        many,
        out,
        resume=True,
        progress=lambda task, done, total: calls.append((done, total)),
        **OPTIONS,
    )
    assert trace.rows.data.table.equals(undisturbed.rows.data.table)
    assert calls[0][0] > 0, "finished shards are not collected again"
    assert calls[-1] == (60, 60)
    assert not [p for p in out.rglob("*") if p.name.startswith(STAGE_PREFIX)]


def test_every_prompt_lies_in_one_shard_whatever_its_place_in_the_file(
    pair: Pair, many: list[Prompt], undisturbed: Trace, tmp_path: Path
) -> None:
    def shards_of(folder: Path) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for index in range(SHARDS):
            for name in pq.read_table(shard_path(folder, index, SHARDS), columns=["prompt_id"])[
                "prompt_id"
            ].to_pylist():
                found.setdefault(name, set()).add(index)
        return found

    backwards = collect(pair, many[::-1], tmp_path / "out", **OPTIONS)
    first, second = shards_of(undisturbed.folder), shards_of(backwards.folder)
    assert first == second
    assert all(len(indices) == 1 for indices in first.values())
    assert len(first) > 50


def test_the_header_tells_the_run(pair: Pair, undisturbed: Trace) -> None:
    header = undisturbed.header
    assert (header.depth, header.temperature, header.max_new_tokens, header.seed, header.shards) == (
        3,
        0.7,
        10,
        5,
        SHARDS,
    )
    assert (header.eos, header.vocabulary, header.prompts) == (pair.eos, VOCABULARY, 60)
    assert header.pair == pair.fingerprint
    assert header.facts["dtype"] == "float64"


def test_group_and_prompt_length_are_those_of_the_prompt(pair: Pair, many: list[Prompt], undisturbed: Trace) -> None:
    known = {p.id: p for p in many}
    for row in undisturbed.rows.select_columns(["prompt_id", "group", "sequence", "prompt_tokens"]):
        prompt = known[row["prompt_id"]]
        assert many[row["sequence"]] is prompt
        assert row["group"] == prompt.group
        assert row["prompt_tokens"] == len(prompt.text.split())


def test_another_seed_samples_other_texts(pair: Pair, many: list[Prompt], undisturbed: Trace, tmp_path: Path) -> None:
    other = collect(pair, many, tmp_path / "out", **{**OPTIONS, "seed": 6})
    assert not other.rows.data.table.equals(undisturbed.rows.data.table)


def test_a_policy_that_was_trained_anew_under_its_name_goes_on_with_no_trace_of_the_old_one(
    pair: Pair, many: list[Prompt], tmp_path: Path
) -> None:
    def told(facts: TrainingMetadata) -> Header:
        policy = learned()
        policy.metadata = facts
        save_policy(policy, tmp_path / "policy")
        loaded = load_policy_folder(tmp_path / "policy")
        return plan_run(
            pair, many[:2], depth=4, temperature=0.7, max_new_tokens=9, collector="live", policy=loaded
        ).header

    old, new = told(FACTS), told(dataclasses.replace(FACTS, rho=60.0))
    assert old.policy == new.policy and old.differences(new) == ["policy"]


def test_a_run_goes_on_with_the_same_settings_profile_and_completions_only(
    pair: Pair, many: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    live: dict[str, Any] = {"depth": 3, "max_new_tokens": 6, "collector": "live"}
    collect(pair, many[:2], tmp_path / "live", **live, policy=Confidence(0.4, 3))
    assert collect(pair, many[:2], tmp_path / "live", resume=True, **live, policy=load_policy("confidence?max_depth=3"))
    with pytest.raises(TraceError, match="another policy;"):
        collect(pair, many[:2], tmp_path / "live", resume=True, **live, policy=Confidence(0.4, 2))
    with pytest.raises(TraceError, match=r"resume: .* another batch;"):
        collect(pair, many[:2], tmp_path / "live", resume=True, **live, policy=Confidence(0.4, 3), batch=2)
    assert collect(pair, many[:2], tmp_path / "live", resume=True, **live, policy=Confidence(0.4, 3), batch=1)
    with pytest.raises(TraceError, match="another profile;"):
        collect(pair, many[:2], tmp_path / "live", resume=True, **live, policy=Confidence(0.4, 3), profile=profile)
    slower = dataclasses.replace(profile, round_s=2.0 * profile.round_s)
    usual, *others = (
        plan_run(pair, many[:2], **live, policy=made).header
        for made in (SmartSpec(max_depth=3), SmartSpec(draft=0.4, max_depth=3), SmartSpec(profile=profile, max_depth=3),
                     SmartSpec(profile=slower, max_depth=3))
    )  # fmt: skip
    assert usual.differences(plan_run(pair, many[:2], **live, policy=SmartSpec(max_depth=3)).header) == []
    assert [usual.differences(other) for other in others] == [["policy"]] * 3
    assert others[1].differences(others[2]) == ["policy"], "costs of another profile"
    texts = [{p.id: word * 3 for p in many[:2]} for word in ("w7 ", "w8 ")]
    one, other, own = (
        plan_run(pair, many[:2], depth=3, max_new_tokens=6, completions=given).header for given in (*texts, None)
    )
    assert one.differences(other) == ["completions"] and "completions" in one.differences(own)


def test_a_folder_in_use_is_refused_resumed_or_replaced(
    pair: Pair, many: list[Prompt], pair_folder: Path, tmp_path: Path
) -> None:
    few, out = many[:4], tmp_path / "out"
    options = {**OPTIONS, "shards": 1}
    collect(pair, few, out, **options)
    with pytest.raises(InputError, match="not empty"):
        collect(pair, few, out, **options)
    with pytest.raises(TraceError, match="another temperature"):
        collect(pair, few, out, resume=True, **{**options, "temperature": 1.0})
    with pytest.raises(TraceError, match="another prompts, prompts_hash"):
        collect(pair, few[:3], out, resume=True, **options)
    assert load_trace(out).header.temperature == 0.7
    assert collect(pair, few, out, overwrite=True, **{**options, "temperature": 1.0}).header.temperature == 1.0
    single, half = (
        load_pair(pair_folder / "target", pair_folder / "draft", dtype=name) for name in ("float32", "bfloat16")
    )
    assert collect(single, few, out, overwrite=True, **options).header.facts["dtype"] == "float32"
    with pytest.raises(TraceError, match="another dtype"):
        collect(half, few, out, resume=True, **options)


def test_one_shard_for_every_thirty_two_prompts_by_default(pair: Pair, many: list[Prompt], tmp_path: Path) -> None:
    options = {k: v for k, v in OPTIONS.items() if k != "shards"}
    assert collect(pair, many[:33], tmp_path / "out", **{**options, "max_new_tokens": 2}).header.shards == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth"),
        ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"max_new_tokens": 123}, "'long' has 5"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"shards": -1}, "shards"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_written(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        collect(pair, [Prompt("long", "w7 w8 w9 w10 w11")], tmp_path / "out", **{**OPTIONS, **changes})
    assert not (tmp_path / "out").exists()


def test_a_pair_without_a_tokenizer_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        collect(dataclasses.replace(pair, tokenizer=None), [Prompt("a", "w7")], tmp_path / "out")
