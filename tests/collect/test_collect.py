"""`collect`: the same rows whatever happened on the way, and whoever collected them, killed processes included."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from commands import files
from conftest import NEW, make_prompts
from contract_policies import DEPTH
from head_tensors import FACTS, learned
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import Header, PromptTask, stream_name
from specstop.collect.shards import DistributedRank, Plan, record
from specstop.collect.store import Trace, check_trace, shard_path
from specstop.decode.drafters import with_drafter
from specstop.decode.models.pair import load_pair
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError, SpecstopError, SpecstopWarning, TraceError
from specstop.policies.files import MANIFEST, STAGE_PREFIX, staging_path
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import TrainingMetadata
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.registry import load_policy
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.train.replay.arrays import trace_arrays
from trace_helpers import Carrying, numpy_rows, same_rows

SHARDS = 7
OPTIONS: dict[str, Any] = {"depth": 2, "temperature": 0.7, "max_new_tokens": 6, "seed": 1, "shards": SHARDS}
SAMPLED: dict[str, Any] = {"depth": 2, "temperature": 0.9, "verification": "match", "max_new_tokens": 12, "seed": 4}


def many_prompts() -> list[Prompt]:
    return [dataclasses.replace(p, group=f"g{at % 3}") for at, p in enumerate(make_prompts(30, "m", 40))]


@pytest.fixture(scope="module")
def many():
    return many_prompts()


@pytest.fixture(scope="module")
def plan(pair, many):
    return plan_run(pair, many, **OPTIONS)


@pytest.fixture(scope="module")
def alone(plan, tmp_path_factory):
    return record(plan, tmp_path_factory.mktemp("alone"))


def collect_and_be_killed(models: Path, out: Path, rank: DistributedRank, shards: int, writing: bool) -> None:
    """Collect so many shards in another process, which is killed while it collects or writes the next one."""
    torch.set_num_threads(1)
    pair = load_pair(models / "target", models / "draft", dtype="float64", engine="compact")
    plan = plan_run(pair, many_prompts(), **OPTIONS)
    written, replace = [0], os.replace

    def rows(batch: Sequence[PromptTask]) -> Sequence[Mapping[str, Any]]:
        if written[0] == shards and not writing:
            os.kill(os.getpid(), signal.SIGKILL)
        return plan.rows(batch)

    def counting_replace(stage: Path, path: Path) -> None:
        if Path(path).suffix == ".parquet":
            if written[0] == shards:
                os.kill(os.getpid(), signal.SIGKILL)
            written[0] += 1
        replace(stage, path)

    os.replace = counting_replace
    record(Plan(plan.header, plan.tasks, rows), out, rank=rank, resume=True)


def test_killed_processes_started_again_leave_the_rows_of_an_undisturbed_run(pair, pair_folder, many, alone, tmp_path):
    """One of two processes is killed while it collects and the other while it writes."""
    out, context = tmp_path / "out", multiprocessing.get_context("fork")  # a new interpreter takes 5 s to import torch
    ends = ((2, True), (1, False))
    arguments = [(pair_folder, out, DistributedRank(rank, 2), *end) for rank, end in enumerate(ends)]
    children = [context.Process(target=collect_and_be_killed, args=one, daemon=True) for one in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
    assert len(Trace(out, alone.header).finished) == 3 and len(list(out.rglob(f"{STAGE_PREFIX}*.parquet.*"))) == 1
    calls: list[tuple[int, int]] = []
    trace = collect(pair, many, out, resume=True, progress=lambda task, *done: calls.append(done), **OPTIONS)
    assert same_rows(trace, alone)
    assert calls[0][0] > 0, "finished shards are not collected again"
    assert calls[-1] == (30, 30)
    assert not [p for p in out.rglob("*") if p.name.startswith(STAGE_PREFIX)]


@pytest.mark.parametrize("world", [3, 9])
def test_any_number_of_processes_gives_the_same_rows(plan, alone, tmp_path, world):
    takers = [sum(DistributedRank(rank, world).takes(index) for rank in range(world)) for index in range(SHARDS)]
    assert takers == [1] * SHARDS
    for rank in reversed(range(world)):
        trace = record(plan, tmp_path, rank=DistributedRank(rank, world))
        assert trace.complete == (rank == 0)
    assert same_rows(check_trace(tmp_path), alone)


def test_a_shard_and_its_rows_depend_on_the_prompt_alone(pair, many, alone, tmp_path):
    def by_prompt(trace: Trace) -> dict[str, tuple[int, list[Any]]]:
        rows: dict[str, tuple[int, list[Any]]] = {}
        for index in range(SHARDS):
            for row in pq.read_table(shard_path(trace.folder, index, SHARDS)).drop_columns(["sequence"]).to_pylist():
                rows.setdefault(row["prompt_id"], (index, []))[1].append(row)
                assert rows[row["prompt_id"]][0] == index
        return rows

    backwards = collect(pair, many[::-1], tmp_path / "out", **OPTIONS)
    assert by_prompt(backwards) == by_prompt(alone) and len(by_prompt(alone)) > 20
    other = collect(pair, many, tmp_path / "seed", **{**OPTIONS, "seed": 6})
    assert not same_rows(other, alone)


def stopped_after(plan: Plan, shards: int, folder: Path) -> Plan:
    """Return the plan with an interruption within the shard after so many shards of `folder`."""

    def interrupted(batch: Any) -> Any:
        if len(Trace(folder, plan.header).finished) == shards:
            raise KeyboardInterrupt
        return plan.rows(batch)

    return Plan(plan.header, plan.tasks, interrupted)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interruption_leaves_whole_shards_and_the_run_can_be_resumed(plan, alone, tmp_path, overwrite):
    out, older = tmp_path / "out", {}
    folder = staging_path(out) if overwrite else out
    if overwrite:
        shutil.copytree(alone.folder, out)
        older = files(out)
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            record(stopped_after(plan, 2, folder), out, overwrite=overwrite, resume=resume)
        assert Trace(folder, plan.header).finished == {0, 1}
        assert [p.name for p in folder.rglob(".*")] == [MANIFEST]
        assert not overwrite or files(out) == older, "the older trace stays until the new one is complete"
    calls: list[tuple[int, int]] = []
    progress = lambda task, *done: calls.append(done)  # noqa: E731
    assert same_rows(record(plan, out, resume=True, overwrite=overwrite, progress=progress), alone)
    assert calls[0][0] == len(plan.tasks[0]) + len(plan.tasks[1]), "finished shards are not collected again"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if overwrite:  # a run that was stopped and is not resumed begins again
        with pytest.raises(KeyboardInterrupt):
            record(stopped_after(plan, 1, folder), out, overwrite=True)
        assert same_rows(record(plan, out, overwrite=True), alone) and set(files(out)) == set(older)


@pytest.mark.parametrize("shards", [None, 4])
def test_a_resumed_run_has_the_rows_of_an_undisturbed_one_if_its_policy_carries_state(pair, prompts, tmp_path, shards):
    """The state is reset in each shard. The default is one shard, so that the state passes through all texts."""
    options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": NEW, "collector": "live", "shards": shards}
    whole, broken = collect(pair, prompts, tmp_path / "whole", policy=Carrying(), **options), tmp_path / "broken"
    plan = plan_run(pair, prompts, policy=Carrying(), **options)
    with contextlib.suppress(KeyboardInterrupt):
        record(stopped_after(plan, 1, broken), broken)
    resumed = record(plan_run(pair, prompts, policy=Carrying(), **options), broken, resume=True)
    columns = ("sequence", "anchor", "tokens", "drawn", "sent", "committed", "decisions", "accepted")
    assert resumed.table(columns).equals(whole.table(columns))
    assert len({int(row["drawn"].sum()) for row in numpy_rows(whole)}) > 3
    many = [dataclasses.replace(p, id=f"{p.id}-{i}") for i in range(9) for p in prompts]
    by_policy = [plan_run(pair, many, policy=policy, **options) for policy in (Confidence(0.4, 3), Carrying())]
    assert [one.header.shards for one in by_policy] == [shards or 3, shards or 1]


def test_a_damaged_shard_is_collected_again(plan, alone, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    for index, damage in ((3, lambda raw: raw[:-9]), (5, lambda raw: raw[:40] + bytes(40) + raw[80:])):
        path = shard_path(out, index, SHARDS)
        path.write_bytes(damage(path.read_bytes()))
    shard_path(out, 0, SHARDS).unlink()
    calls: list[tuple[int, int]] = []
    with pytest.warns(SpecstopWarning, match=r"0000[35]-of-00007\.parquet .* is collected again") as caught:
        trace = record(plan, out, resume=True, progress=lambda task, *done: calls.append(done))
    assert len(caught) == 2 and calls[0][0] == sum(len(plan.tasks[index]) for index in (1, 2, 4, 6))
    assert same_rows(trace, alone) and same_rows(check_trace(out), alone)


def test_a_run_is_resumed_with_the_same_settings_only(pair, many, profile, pair_folder, tmp_path):
    live: dict[str, Any] = {"depth": 3, "max_new_tokens": 6, "collector": "live", "policy": Confidence(0.4, 3)}
    out, few = tmp_path / "live", many[:2]
    collect(pair, few, out, **live)
    for same in ({"policy": load_policy("confidence?max_depth=3")}, {"batch": 1}):
        assert collect(pair, few, out, resume=True, **{**live, **same})
    others = {"policy": Confidence(0.4, 2), "batch": 2, "profile": profile, "temperature": 1.0, "seed": 2,
              "sampling": SamplingParams(top_p=0.8)}  # fmt: skip
    for name, value in others.items():
        with pytest.raises(TraceError, match=f"resume: .* another .*{name}"):
            collect(pair, few, out, resume=True, **{**live, name: value})
    with pytest.raises(TraceError, match="prompts"):
        collect(pair, few[:1], out, resume=True, **live)
    with pytest.raises(TraceError, match="another seed"):
        record(plan_run(pair, few, **live, seed=2), out, rank=DistributedRank(1, 2))
    half = load_pair(pair_folder / "target", pair_folder / "draft", dtype="bfloat16")
    with pytest.raises(TraceError, match="dtype"):
        collect(half, few, out, resume=True, **live)
    assert collect(pair, few, out, overwrite=True, **{**live, "temperature": 1.0}).header.temperature == 1.0


def test_inputs_of_the_same_name_are_told_apart_by_their_contents(pair, many, profile, tmp_path):
    def header(**options: Any) -> Header:
        return plan_run(pair, many[:2], **{"depth": 3, "max_new_tokens": 6, **options}).header

    def trained(metadata: TrainingMetadata) -> Header:
        policy = learned()
        policy.metadata = metadata
        save_policy(policy, tmp_path / "policy")
        return header(depth=4, temperature=0.7, collector="live", policy=load_policy_folder(tmp_path / "policy"))

    def published(**options: Any) -> Header:
        return header(collector="live", policy=SmartSpec(max_depth=3, **options))

    slower = dataclasses.replace(profile, round_s=2.0 * profile.round_s)
    texts = [{p.id: word * 3 for p in many[:2]} for word in ("w7 ", "w8 ")]
    for one, other, difference in (
        (trained(FACTS), trained(FACTS), []), (trained(FACTS), trained(dataclasses.replace(FACTS, rho=60.0)), ["policy"]),
        (published(), published(), []), (published(), published(draft=0.4), ["policy"]),
        (published(), published(profile=profile), ["policy"]),
        (published(profile=profile), published(profile=slower), ["policy"]),
        (header(completions=texts[0]), header(completions=texts[1]), ["completions"]),
    ):  # fmt: skip
        assert one.differences(other) == [f"{name} digest" for name in difference]
    assert "completions digest" in header(completions=texts[0]).differences(header())


def samples_of(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    return [dataclasses.replace(prompt, sample=f"s{number}") for prompt in prompts for number in range(count)]


def test_samples_of_a_prompt_draw_different_random_numbers(pair, tmp_path):
    prompts = samples_of(make_prompts(3, "sampled", 61), 2)
    trace = collect(pair, prompts, tmp_path / "a", **SAMPLED)
    arrays = trace_arrays(trace)
    names = list(zip(arrays.prompt_ids, arrays.samples, strict=True))
    assert len(set(names)) == len(names) > 3
    assert arrays.keys.tolist() == [stream_key(4, stream_name(*name)) for name in names]
    assert len(set(arrays.clusters)) == len(set(arrays.prompt_ids)) < len(names)
    (sample,) = (p for p in prompts if (p.id, p.sample) == names[1])
    single = trace_arrays(collect(pair, [sample], tmp_path / "b", **SAMPLED))
    assert single.tokens.tolist() == arrays.subset([1]).tokens.tolist(), "whatever else is collected"
    assert names[0][0] == names[1][0] and arrays.subset([0]).tokens.tolist() != single.tokens.tolist()
    renamed = [dataclasses.replace(p, sample=f"x{p.sample}") for p in prompts]
    assert plan_run(pair, renamed, **SAMPLED).header.differences(trace.header) == ["prompts_hash"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_sample_is_labelled_by_its_completion(pair, temperature):
    samples = samples_of(make_prompts(1, "sampled", 61), 2)
    texts = {
        (p.id, p.sample): text for p, text in zip(samples, ([7, 8, 9, 10, 11, 12], [12, 11, 10, 9, 8]), strict=True)
    }
    options: dict[str, Any] = {"depth": 1, "temperature": temperature, "max_new_tokens": 6}
    plan = plan_run(pair, samples, completions=texts, **options)
    chunks = {chunk["sample"][0]: chunk for chunk in plan.rows(plan.tasks[0])}
    if temperature:
        assert {name: int(chunk["text_tokens"][0]) for name, chunk in chunks.items()} == {"s0": 6, "s1": 5}
    for sample in samples:
        single = plan_run(pair, [sample], completions=texts, **options)
        expected = list(single.rows(single.tasks[0]))
        assert len(expected) == (sample.sample in chunks)
        assert all((one["accepted"] == chunks[sample.sample]["accepted"]).all() for one in expected)
    with pytest.raises(InputError, match=r"completions: sample .s1. of prompt .* has none"):
        plan_run(pair, samples, completions={samples[0].id: [7, 8], (samples[0].id, "s0"): [7, 8]}, **options)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, DistributedRank()), ({"LOCAL_RANK": "3"}, DistributedRank()),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, DistributedRank(5, 8, 1)),
        *((wrong, None) for wrong in ({"RANK": "1"}, {"RANK": "two", "WORLD_SIZE": "3"}, {"RANK": "2", "WORLD_SIZE": "2"})),
    ],
)  # fmt: skip
def test_a_process_reads_its_rank_from_the_environment(environment, rank):
    if rank is None:
        with pytest.raises(InputError, match="RANK, WORLD_SIZE"):
            DistributedRank.from_environment(environment)
    else:
        assert DistributedRank.from_environment(environment) == rank
        assert rank.device("cuda") == ("cuda:1" if rank.world > 1 else "cuda") and rank.device("cuda:0") == "cuda:0"


class ReadsEntropy(FixedLength):
    features = ("anchor_entropy",)


INSIDE = {"collector": "vllm"}


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        # A kind of rounds that the collector cannot record.
        ({"verification": "typical"}, "verification"), ({"verification": "block", "tree": "2,2"}, "chain"),
        ({"verification": "match", "draws": 2}, "draws"), ({"temperature": 0.0, "draws": 2}, "draws"),
        ({"verification": "block", "draws": 0}, "draws"), ({"verification": "rejection", "depth": 1, "mix": 0.2}, "mix"),
        ({"mix": 0.2}, "mix"), ({"policy": Confidence(0.4)}, "policy"), ({"explore": 0.5}, "explore"),
        ({"batch": 2}, "batch"),
        # Values out of range.
        ({"collector": "alive"}, "collector"), ({"depth": 0}, "depth"), ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"temperature": float("nan")}, "temperature"), ({"shards": -1}, "shards"),
        ({"max_new_tokens": 127}, "max_new_tokens"), ({"hidden": ["draft"]}, "hidden state"),
        # Options of dense traces with live rounds.
        *(({"collector": "live", **options}, next(iter(options))) for options in (
            {"draws": 2}, {"mix": 0.2}, {"memory": 9}, {"explore": 1.5}, {"completions": {}})),
        # Options that require a draft model.
        ({"drafter": "suffix", "depth": 1, "mix": 0.2}, "mix"), ({"drafter": "suffix", "draws": 2}, "draws"),
        ({"drafter": "suffix", "completions": {"p0": "w7 w8"}}, "completions"),
        ({"drafter": "suffix", "verification": "rejection"}, "match"),
        *(({"drafter": drafter, "collector": collector, "hidden": ["draft_hidden"]}, r"draft_hidden, which \w+Drafter")
          for drafter in ("suffix", "suffix+model") for collector in ("dense", "live")),
        # Options and policies that vLLM does not support.
        ({"drafter": "medusa:heads", **INSIDE}, "drafter medusa:heads"),
        ({"policy": ReadsEntropy(2), **INSIDE}, "anchor_entropy"),
        *(({**INSIDE, **options}, "vllm") for options in (
            {"tree": "2,2"}, {"mix": 0.5}, {"hidden": ["draft_hidden"]}, {"verification": "rejection"}, {"draws": 2},
            {"completions": {"p0": "w7"}}, {"memory": 9})),
    ],
)  # fmt: skip
def test_options_that_cannot_be_combined_are_refused_before_anything_is_written(pair, many, tmp_path, options, noun):
    options = {**options}
    if drafter := options.pop("drafter", ""):
        inside = options.get("collector") == "vllm"
        pair = dataclasses.replace(pair, drafter=drafter) if inside else with_drafter(pair, drafter)
    with pytest.raises(SpecstopError, match=noun):
        collect(pair, many[:2], tmp_path / "t", **{"depth": 3, "temperature": 0.7, "max_new_tokens": 8, **options})
    assert not (tmp_path / "t").exists()
