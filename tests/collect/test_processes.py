"""Several processes on one trace folder: whoever collects a shard, its rows are the same, and nothing is agreed upon."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import make_prompts
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.shards import DistributedRank, Plan, record
from specstop.collect.store import Trace, check_trace, finished, load_trace, shard_path
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.files import MANIFEST, staging_path

SHARDS = 7
OPTIONS: dict[str, Any] = {"depth": 2, "temperature": 0.7, "max_new_tokens": 6, "seed": 1, "shards": SHARDS}


@pytest.fixture(scope="module")
def many() -> list[Prompt]:
    return make_prompts(30, "m", 40)


@pytest.fixture(scope="module")
def plan(pair: Pair, many: list[Prompt]) -> Plan:
    return plan_run(pair, many, **OPTIONS)


@pytest.fixture(scope="module")
def alone(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(plan, tmp_path_factory.mktemp("alone"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def same_rows(first: Trace, second: Trace) -> bool:
    return bool(first.rows.data.table.equals(second.rows.data.table))


@pytest.mark.parametrize("world", [2, 3, 9])
def test_any_number_of_processes_gives_the_same_rows(plan: Plan, alone: Trace, tmp_path: Path, world: int) -> None:
    for rank in reversed(range(world)):
        trace = record(plan, tmp_path, rank=DistributedRank(rank, world))
        assert trace.complete == (rank == 0)
    assert same_rows(load_trace(tmp_path), alone)
    assert check_trace(tmp_path).row_count == alone.row_count


def test_processes_that_run_side_by_side_disturb_nobody(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    """The second starts and ends while the first is within its first shard, the third while it is within its second."""
    others = [DistributedRank(1, 3), DistributedRank(2, 3)]
    collected: list[Any] = []

    def rows(batch: Any) -> Any:
        if others:
            rank = others.pop(0)
            record(Plan(plan.header, plan.tasks, rows), tmp_path, rank=rank)
        collected.extend(work[1] for work in batch)
        return plan.rows(batch)

    trace = record(Plan(plan.header, plan.tasks, rows), tmp_path, rank=DistributedRank(0, 3))
    assert trace.complete
    assert same_rows(trace, alone)
    assert len(collected) == len(set(collected)) == 30, "no shard is collected twice"
    assert [p.name for p in tmp_path.rglob(".*")] == [MANIFEST]


def test_each_shard_is_dealt_to_one_process() -> None:
    for world in (1, 2, 5):
        takers = [[rank for rank in range(world) if DistributedRank(rank, world).takes(i)] for i in range(23)]
        assert all(len(ranks) == 1 for ranks in takers)
        counts = [sum(rank in ranks for ranks in takers) for rank in range(world)]
        assert max(counts) - min(counts) <= 1


def test_a_lost_process_is_made_good_by_the_same_command(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    for rank in (0, 2):
        record(plan, tmp_path, rank=DistributedRank(rank, 3))
    with pytest.raises(TraceError, match=r"not complete, 2 of its 7 shards are missing \(1, 4\)"):
        check_trace(tmp_path)
    calls: list[tuple[str, int, int]] = []
    for rank in range(3):
        trace = record(plan, tmp_path, rank=DistributedRank(rank, 3), progress=lambda *call: calls.append(call))
    assert trace.complete
    assert same_rows(trace, alone)
    sizes = [len(work) for work in plan.tasks]
    assert calls[0] == ("collect 0/3", sizes[0] + sizes[3] + sizes[6], sizes[0] + sizes[3] + sizes[6])
    assert next(call for call in calls if call[0] == "collect 1/3") == ("collect 1/3", 0, sizes[1] + sizes[4])


def test_another_number_of_processes_can_finish_a_run(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    record(plan, tmp_path, rank=DistributedRank(1, 3))
    assert same_rows(record(plan, tmp_path, resume=True), alone)


def test_a_process_of_another_run_is_refused(plan: Plan, pair: Pair, many: list[Prompt], tmp_path: Path) -> None:
    record(plan, tmp_path, rank=DistributedRank(0, 2))
    other = plan_run(pair, many, **{**OPTIONS, "seed": 2})
    with pytest.raises(TraceError, match="another seed"):
        record(other, tmp_path, rank=DistributedRank(1, 2))


def stopped_after(plan: Plan, shards: int, folder: Path) -> Plan:
    """Return the plan with an interruption within the shard after so many shards of `folder`."""

    def interrupted(batch: Any) -> Any:
        if len(finished(folder, plan.header)) == shards:
            raise KeyboardInterrupt
        return plan.rows(batch)

    return Plan(plan.header, plan.tasks, interrupted)


@pytest.mark.parametrize("shards", [1, 2])
def test_an_interruption_within_a_shard_leaves_nothing_of_it(
    plan: Plan, alone: Trace, tmp_path: Path, shards: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        record(stopped_after(plan, shards, tmp_path), tmp_path)
    assert finished(tmp_path, plan.header) == set(range(shards))
    assert [p.name for p in tmp_path.rglob(".*")] == [MANIFEST]
    assert same_rows(record(plan, tmp_path, resume=True), alone)


def test_a_damaged_shard_is_collected_again(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    for index, damage in ((3, lambda raw: raw[:-9]), (5, lambda raw: raw[:40] + bytes(40) + raw[80:])):
        path = shard_path(out, index, SHARDS)
        path.write_bytes(damage(path.read_bytes()))
    shard_path(out, 0, SHARDS).unlink()
    calls: list[tuple[int, int]] = []
    with pytest.warns(SpecstopWarning, match=r"0000[35]-of-00007\.parquet is damaged and is collected again") as caught:
        trace = record(plan, out, resume=True, progress=lambda task, *done: calls.append(done))
    assert len(caught) == 2
    assert calls[0][0] == sum(len(plan.tasks[index]) for index in (1, 2, 4, 6))
    assert same_rows(trace, alone)
    assert same_rows(check_trace(out), alone)


def test_a_trace_that_is_overwritten_stays_until_the_new_one_is_complete(
    plan: Plan, alone: Trace, pair: Pair, many: list[Prompt], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    before = files(out)
    other = plan_run(pair, many, **{**OPTIONS, "seed": 2})
    with pytest.raises(KeyboardInterrupt):
        record(stopped_after(other, 2, staging_path(out)), out, overwrite=True)
    assert finished(staging_path(out), other.header) == {0, 1}
    assert files(out) == before

    def fail(batch: Any) -> Any:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        record(Plan(other.header, other.tasks, fail), out, overwrite=True, resume=True)
    assert (files(out), finished(staging_path(out), other.header)) == (before, {0, 1})
    asked: list[tuple[int, int]] = []
    trace = record(other, out, overwrite=True, resume=True, progress=lambda task, *done: asked.append(done))
    assert asked[0][0] == len(other.tasks[0]) + len(other.tasks[1]), "finished shards are not collected again"
    assert (trace.folder, trace.header.seed) == (out, 2)
    assert same_rows(load_trace(out), record(other, tmp_path / "other"))
    assert not staging_path(out).exists()


def test_a_stopped_replacement_begins_anew_unless_it_is_resumed(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    with pytest.raises(KeyboardInterrupt):
        record(stopped_after(plan, 1, staging_path(out)), out, overwrite=True)
    (staging_path(out) / "data" / "notes").write_text("left")
    trace = record(plan, out, overwrite=True)
    assert same_rows(trace, alone)
    assert set(files(out)) == set(files(alone.folder))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_replacement_among_foreign_files_is_refused_before_any_work(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    (out / "data" / "train-mine.parquet").write_text("mine")
    before = files(out)
    with pytest.raises(InputError, match=r"train-mine\.parquet is not among the files that specstop wrote"):
        record(Plan(plan.header, plan.tasks, lambda batch: pytest.fail("work")), out, overwrite=True)
    assert files(out) == before
    assert not staging_path(out).exists()


def test_a_trace_is_never_collected_into_its_models(pair: Pair, pair_folder: Path, many: list[Prompt]) -> None:
    before = files(pair_folder)
    for out in (pair_folder, pair_folder / "target", pair_folder / "draft" / "trace"):
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(InputError, match="which the command reads"):
                collect(pair, many, out, **OPTIONS, **how)
    assert files(pair_folder) == before


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, DistributedRank()),
        ({"LOCAL_RANK": "3"}, DistributedRank()),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, DistributedRank(5, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, DistributedRank(0, 1, 0)),
    ],
)
def test_a_process_finds_its_place_in_the_environment(environment: Mapping[str, str], rank: DistributedRank) -> None:
    assert DistributedRank.from_environment(environment) == rank


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE: expected a number"),
        ({"WORLD_SIZE": "2"}, "RANK: expected a number"),
        ({"RANK": "two", "WORLD_SIZE": "3"}, "RANK: expected a number, .* not 'two'"),
        ({"RANK": "-1", "WORLD_SIZE": "3"}, "RANK: expected a number"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK: expected a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK: expected less than WORLD_SIZE \(2\), not 2"),
    ],
)
def test_a_mangled_environment_is_refused(environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DistributedRank.from_environment(environment)


def test_the_local_rank_picks_the_device() -> None:
    rank = DistributedRank(5, 8, 1)
    assert [rank.device(name) for name in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]
    assert DistributedRank().device("cuda") == "cuda"
