"""Several processes on one trace folder: whoever collects a shard, its rows are the same, and nothing is agreed upon."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import make_prompts
from specstop.collect.estimates import estimate
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.shards import ALONE, Place, Plan, read_place, record
from specstop.collect.store import Trace, finished, merge, open_trace, shard_path
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError, TraceError
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
        trace = record(plan, tmp_path, place=Place(rank, world))
        assert trace.complete == (rank == 0)
    assert same_rows(open_trace(tmp_path), alone)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["rows"] == alone.row_count


def test_processes_that_run_side_by_side_disturb_nobody(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    """The second starts and ends while the first is within its first shard, the third while it is within its second."""
    others = [Place(1, 3), Place(2, 3)]
    collected: list[Any] = []

    def rows(batch: Any) -> Any:
        if others:
            place = others.pop(0)
            record(Plan(plan.header, plan.work, rows), tmp_path, place=place)
        collected.extend(work[1] for work in batch)
        return plan.rows(batch)

    trace = record(Plan(plan.header, plan.work, rows), tmp_path, place=Place(0, 3))
    assert trace.complete
    assert same_rows(trace, alone)
    assert len(collected) == len(set(collected)) == 30, "no shard is collected twice"
    assert [p.name for p in tmp_path.rglob(".*")] == [MANIFEST]


def test_each_shard_is_dealt_to_one_process() -> None:
    for world in (1, 2, 5):
        takers = [[rank for rank in range(world) if Place(rank, world).takes(i)] for i in range(23)]
        assert all(len(ranks) == 1 for ranks in takers)
        counts = [sum(rank in ranks for ranks in takers) for rank in range(world)]
        assert max(counts) - min(counts) <= 1


def test_a_lost_process_is_made_good_by_the_same_command(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    for rank in (0, 2):
        record(plan, tmp_path, place=Place(rank, 3))
    assert merge(tmp_path).missing == (1, 4)
    calls: list[tuple[str, int, int]] = []
    for rank in range(3):
        trace = record(plan, tmp_path, place=Place(rank, 3), progress=lambda *call: calls.append(call))
    assert trace.complete
    assert same_rows(trace, alone)
    sizes = [len(work) for work in plan.work]
    assert calls[0] == ("collect 0/3", sizes[0] + sizes[3] + sizes[6], sizes[0] + sizes[3] + sizes[6])
    assert next(call for call in calls if call[0] == "collect 1/3") == ("collect 1/3", 0, sizes[1] + sizes[4])


def test_another_number_of_processes_can_finish_a_run(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    record(plan, tmp_path, place=Place(1, 3))
    assert same_rows(record(plan, tmp_path, resume=True), alone)


def test_a_process_of_another_run_is_refused(plan: Plan, pair: Pair, many: list[Prompt], tmp_path: Path) -> None:
    record(plan, tmp_path, place=Place(0, 2))
    other = plan_run(pair, many, **{**OPTIONS, "seed": 2})
    with pytest.raises(TraceError, match="another seed"):
        record(other, tmp_path, place=Place(1, 2))


def test_a_damaged_shard_is_moved_aside_and_collected_again(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    path = shard_path(out, 3, SHARDS)
    path.write_bytes(path.read_bytes()[:-9])
    shard_path(out, 0, SHARDS).unlink()
    with pytest.raises(TraceError, match=r"00003-of-00007\.parquet cannot be read"):
        record(plan, out, resume=True)
    assert 0 not in finished(out, plan.header), "said before any work is done"
    trace = record(plan, out, resume=True, repair=True)
    assert same_rows(trace, alone)
    assert [p.name for p in (out / "quarantine").glob("*.0")] == [f"{path.name}.0"]


def test_a_run_that_is_asked_to_stop_finishes_its_shard(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    answers = iter([False, False, True])
    trace = record(plan, tmp_path, stop=lambda: next(answers))
    assert trace.finished == {0, 1}
    assert not (tmp_path / "index.json").exists()
    assert same_rows(record(plan, tmp_path, resume=True), alone)


def test_an_interruption_within_a_shard_leaves_nothing_of_it(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    def interrupted(batch: Any) -> Any:
        if finished(tmp_path, plan.header):
            raise KeyboardInterrupt
        return plan.rows(batch)

    with pytest.raises(KeyboardInterrupt):
        record(Plan(plan.header, plan.work, interrupted), tmp_path)
    assert finished(tmp_path, plan.header) == {0}
    assert [p.name for p in tmp_path.rglob(".*")] == [MANIFEST]
    assert same_rows(record(plan, tmp_path, resume=True), alone)


def test_a_trace_that_is_overwritten_stays_until_the_new_one_is_complete(
    plan: Plan, alone: Trace, pair: Pair, many: list[Prompt], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    before = files(out)
    other = plan_run(pair, many, **{**OPTIONS, "seed": 2})
    answers = iter([False, False, True])
    stopped = record(other, out, overwrite=True, stop=lambda: next(answers))
    assert (stopped.folder, stopped.finished) == (staging_path(out), {0, 1})
    assert files(out) == before

    def fail(batch: Any) -> Any:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        record(Plan(other.header, other.work, fail), out, overwrite=True, resume=True)
    assert (files(out), finished(staging_path(out), other.header)) == (before, {0, 1})
    asked: list[tuple[int, int]] = []
    trace = record(other, out, overwrite=True, resume=True, progress=lambda task, *done: asked.append(done))
    assert asked[0][0] == len(other.work[0]) + len(other.work[1]), "finished shards are not collected again"
    assert (trace.folder, trace.header.seed) == (out, 2)
    assert same_rows(open_trace(out), record(other, tmp_path / "other"))
    assert not staging_path(out).exists()


def test_a_stopped_replacement_begins_anew_unless_it_is_resumed(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    answers = iter([False, True])
    record(plan, out, overwrite=True, stop=lambda: next(answers))
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
        record(Plan(plan.header, plan.work, lambda batch: pytest.fail("work")), out, overwrite=True)
    assert files(out) == before
    assert not staging_path(out).exists()


def test_a_trace_is_never_collected_into_its_models(pair: Pair, pair_folder: Path, many: list[Prompt]) -> None:
    before = files(pair_folder)
    for out in (pair_folder, pair_folder / "target", pair_folder / "draft" / "trace"):
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(InputError, match="which the command reads"):
                collect(pair, many, out, **OPTIONS, **how)
    assert files(pair_folder) == before


def test_a_shard_whose_name_a_folder_has_is_found_before_any_work(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone.folder, out)
    path = shard_path(out, 3, SHARDS)
    path.unlink()
    (path / "inside").mkdir(parents=True)
    working = Plan(plan.header, plan.work, lambda batch: pytest.fail("work"))
    for attempt in (lambda: record(working, out, resume=True), lambda: open_trace(out), lambda: merge(out)):
        with pytest.raises(
            TraceError, match=r"00003-of-00007\.parquet cannot be read: it is no file; `specstop merge --rep"
        ):
            attempt()
    assert same_rows(record(plan, out, resume=True, repair=True), alone)
    assert (out / "quarantine" / f"{path.name}.0" / "inside").is_dir()


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, ALONE),
        ({"LOCAL_RANK": "3"}, ALONE),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Place(5, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0)),
    ],
)
def test_a_process_finds_its_place_in_the_environment(environment: Mapping[str, str], place: Place) -> None:
    assert read_place(environment) == place


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
        read_place(environment)


def test_the_local_rank_picks_the_device() -> None:
    place = Place(5, 8, 1)
    assert [place.device(name) for name in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]
    assert ALONE.device("cuda") == "cuda"


def test_an_estimate_is_near_what_a_run_comes_to_and_writes_nothing(plan: Plan, alone: Trace, tmp_path: Path) -> None:
    expected = estimate(plan, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []
    size = sum(p.stat().st_size for p in (alone.folder / "data").iterdir())
    assert (expected.prompts, expected.shards, expected.sample) == (30, SHARDS, 16)
    assert expected.rows == pytest.approx(alone.row_count, rel=0.25)
    assert expected.disk_bytes == pytest.approx(size, rel=0.25)
    assert expected.seconds > 0
    assert expected.fits


def test_an_estimate_tries_as_many_side_by_side_as_a_run(pair: Pair, many: list[Prompt], tmp_path: Path) -> None:
    for shards in (1, SHARDS):
        live = plan_run(pair, many, **{**OPTIONS, "shards": shards}, collector="live", batch=20)
        assert estimate(live, tmp_path).sample == max(16, *map(len, live.batches(0)))


def test_an_estimate_of_few_prompts_tries_them_all(pair: Pair, many: list[Prompt], tmp_path: Path) -> None:
    few = plan_run(pair, many[:3], **{**OPTIONS, "shards": 1})
    expected = estimate(few, tmp_path)
    assert (expected.sample, expected.rows) == (3, record(few, tmp_path).row_count)
