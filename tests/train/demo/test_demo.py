"""The demo: every step of the pipeline once, small, and the live comparison."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import specstop.train.demo.demo as demonstration
from conftest import make_prompts
from specstop.collect.store.folder import open_trace
from specstop.decode.compare.alternate import run_alternating
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.profile.measuring import Effort
from specstop.decode.verify.noise import stream_key
from specstop.policies.baselines.adaptive import Heuristic
from specstop.policies.baselines.fixed import FixedLength
from specstop.policies.errors import InputError
from specstop.policies.latency.profile import Profile
from specstop.policies.storage.folder import load_policy_folder
from specstop.train.demo.demo import DEMO_HEADS, Demo, Sizes, demo

SIZES = Sizes(train=14, test=4, live=3, tokens=16, depth=3, effort=Effort(repetitions=1))
FEWER = dataclasses.replace(SIZES, train=8, test=2, live=2)
"""For what holds of any trace."""


@pytest.fixture(scope="module")
def done(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory, few_draws: None) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(pair_folder, folder / "pair")
    for side, seed in (("train", 21), ("test", 22)):
        lines = [json.dumps({"id": p.id, "prompt": p.text}) for p in make_prompts(30, side, seed)]
        (folder / "pair" / f"prompts-{side}.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specstop.train.heads.kinds.mlp.EPOCHS", 6)  # nothing here hangs on how well it is fitted
        return demo(folder / "out", pair=folder / "pair", temperature=0.7, verification="match", sizes=SIZES)


def test_it_leaves_what_every_command_reads(done: Demo) -> None:
    for side, count in (("train", SIZES.train), ("test", SIZES.test)):
        header = open_trace(done.folder / f"traces-{side}").header
        assert (header.prompts, header.depth, header.temperature) == (count, SIZES.depth, 0.7)
        assert header.max_new_tokens == SIZES.tokens
    assert Profile.load(done.folder / "profile.json").max_depth == SIZES.depth
    for kind in DEMO_HEADS:
        assert load_policy_folder(done.folder / "policies" / kind).head.kind == kind
    written = json.loads((done.folder / "report" / "report.json").read_text())
    assert written == json.loads(json.dumps(done.report.to_dict()))


def test_it_reports_every_head_and_decodes_the_same_text_with_all(done: Demo) -> None:
    assert {"plain decoding", "best fixed", *DEMO_HEADS} <= {line.name for line in done.report.lines}
    assert done.live[0].measured == done.live[0].predicted == 1.0
    assert len(done.live) > 2
    for line in done.live:
        assert line.same_text == line.tally.texts == SIZES.live
        assert line.measured > 0 < line.predicted


def test_when_sampling_everything_is_for_the_fastest_lossless_verification(
    done: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstration, "DEMO_HEADS", ("logistic",))
    made = demo(tmp_path / "out", pair=done.folder.parent / "pair", temperature=0.7, sizes=FEWER)
    headers = [open_trace(made.folder / f"traces-{side}").header for side in ("train", "test")]
    policy = load_policy_folder(made.folder / "policies" / "logistic")
    profile = Profile.load(made.folder / "profile.json")
    assert [h.verification for h in headers] == ["block", "block"]
    assert (policy.facts.verification, profile.verification) == ("block", "block")
    assert all(line.same_text is None for line in made.live), "texts hang on what is drafted"


def test_a_folder_in_use_is_refused(done: Demo) -> None:
    with pytest.raises(InputError, match="not empty"):
        demo(done.folder, pair=done.folder.parent / "pair", sizes=SIZES)


def test_policies_alternate_and_progress_counts_prompts(pair: Pair, prompt_ids: list[list[int]]) -> None:
    from specstop.decode.loop import Settings

    calls: list[tuple[str, int, int]] = []
    prompts = [(f"p{i}", ids) for i, ids in enumerate(prompt_ids[:3])]
    runs = [Speculator(pair, FixedLength(length), Settings(0.7, 10)) for length in (0, 2)]
    rows = run_alternating(runs, prompts, progress=lambda *call: calls.append(call))
    assert [len(row) for row in rows] == [3, 3]
    assert [g.tokens for g in rows[0]] == [g.tokens for g in rows[1]]
    assert all(r.drafted == 0 for g in rows[0] for r in g.rounds)
    assert calls == [("live", i, 3) for i in (1, 2, 3)]


def test_the_text_that_warms_up_is_not_remembered(pair: Pair, prompt_ids: list[list[int]]) -> None:
    from specstop.decode.loop import Settings

    prompts = [(f"p{i}", ids) for i, ids in enumerate(prompt_ids[:3])]
    runs = [Speculator(pair, Heuristic(2), Settings(0.7, 10)) for _ in range(2)]
    alternated = run_alternating(runs[:1], prompts)[0]
    alone = [runs[1].generate(ids, stream_key(0, name)) for name, ids in prompts]
    assert [[r.drafted for r in g.rounds] for g in alternated] == [[r.drafted for r in g.rounds] for g in alone]
    assert len({r.drafted for g in alone for r in g.rounds}) > 1
