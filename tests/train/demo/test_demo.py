"""The demo: every stage once, small; continued after an interruption; its verdict in plain words."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import specstop.train.demo.resume as module
from conftest import make_prompts
from specstop.collect.store import load_trace
from specstop.decode.benchmark import Ratio, run_alternating
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.profile.measuring import Effort
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError
from specstop.policies.files import staging_path
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.policies.published.hugging_face import Heuristic
from specstop.policies.storage import load_policy_folder
from specstop.train.demo.demo import Demo, demo
from specstop.train.demo.resume import Sizes
from specstop.train.demo.texts import explain
from specstop.train.evaluate.records import Answer, Line, Report
from specstop.train.evaluate.verdict import verdict
from specstop.train.heads.networks import MLPEstimator

EFFORT = Effort(repetitions=1)
SIZES = Sizes(
    train=14, test=4, live=3, tokens=16, depth=3, heads=("logistic", "mlp"), effort=EFFORT, decision_effort=EFFORT
)
SMALL = replace(SIZES, train=8, test=2, live=2, heads=("logistic",))


@pytest.fixture(scope="module")
def pair_with_prompts(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory, few_draws: None) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "pair"
    shutil.copytree(pair_folder, folder)
    for side, seed in (("train", 21), ("test", 22)):
        lines = [json.dumps({"id": p.id, "prompt": p.text}) for p in make_prompts(30, side, seed)]
        (folder / f"prompts-{side}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def done(pair_with_prompts: Path) -> Demo:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MLPEstimator.__init__.__kwdefaults__, "epochs", 6)  # its quality does not matter here
        result = demo(
            pair_with_prompts.parent / "out", pair=pair_with_prompts, temperature=0.7, verification="match", sizes=SIZES,
            announce=lines.append,
        )  # fmt: skip
    assert [line.partition(":")[0] for line in lines] == ["collect", "profile", "train", "evaluate", "decode"]
    return result


def test_it_leaves_what_every_command_reads(done: Demo) -> None:
    for side, count in (("train", SIZES.train), ("test", SIZES.test)):
        header = load_trace(done.folder / f"traces-{side}").header
        assert (header.prompts, header.depth, header.temperature) == (count, SIZES.depth, 0.7)
        assert header.max_new_tokens == SIZES.tokens
    profile = Profile.load(done.folder / "profile.json")
    assert profile.max_depth == SIZES.depth
    for kind in SIZES.heads:
        policy = load_policy_folder(done.folder / "policies" / kind)
        assert policy.head.kind == kind
    assert "confidence" in profile.decision_s
    written = json.loads((done.folder / "report" / "report.json").read_text())
    report = json.loads(json.dumps(done.report.to_dict()))
    left_out = ("run", "prompt_texts")  # only in the file
    assert {k: v for k, v in report.items() if k not in left_out} == {
        k: v for k, v in written.items() if k not in left_out
    }


def test_it_reports_every_head_and_decodes_the_same_text_with_all(done: Demo) -> None:
    assert {"plain decoding", "best fixed", *SIZES.heads} <= {line.name for line in done.report.lines}
    assert done.live[0].measured == done.live[0].predicted == 1.0
    assert len(done.live) == 3
    for line in done.live:
        assert line.same_text == line.tally.texts == SIZES.live
        assert line.measured > 0 < line.predicted


def test_sampling_uses_the_fastest_lossless_verification_everywhere(pair_with_prompts: Path, tmp_path: Path) -> None:
    result = demo(tmp_path / "out", pair=pair_with_prompts, temperature=0.7, sizes=SMALL)
    headers = [load_trace(result.folder / f"traces-{side}").header for side in ("train", "test")]
    policy = load_policy_folder(result.folder / "policies" / "logistic")
    profile = Profile.load(result.folder / "profile.json")
    assert [h.verification for h in headers] == ["block", "block"]
    assert (policy.metadata.verification, profile.verification) == ("block", "block")
    assert all(line.same_text is None for line in result.live), "texts depend on what is drafted"


def test_a_folder_in_use_is_refused(done: Demo, pair_with_prompts: Path) -> None:
    with pytest.raises(InputError, match="not empty"):
        demo(done.folder, pair=pair_with_prompts, sizes=SIZES)


def test_a_pair_without_prompts_is_refused(pair_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompts-train"):
        demo(tmp_path / "out", pair=pair_folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "stage", ["test: collect", "profile", "logistic: choose the rule", "decisions: profile", "report", "decode: live"]
)
def test_an_interrupted_demo_continues_where_it_stopped(stage: str, pair_with_prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def interrupt(task: str, done: int, total: int) -> None:
        if task == stage and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo(out, pair=pair_with_prompts, sizes=SMALL, progress=interrupt)
    assert not out.exists()
    complete = {path: path.stat().st_mtime_ns for path in staging_path(out).rglob("*.parquet")}
    complete |= {path: path.stat().st_mtime_ns for path in staging_path(out).rglob("head*.safetensors")}
    assert complete, "the first stage was complete"
    lines: list[str] = []
    result = demo(out, pair=pair_with_prompts, sizes=SMALL, announce=lines.append)
    assert "Continuing" in lines[0]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {"traces-train", "traces-test", "profile.json", "policies", "report"} <= {p.name for p in out.iterdir()}
    unchanged = {
        path: (out / path.relative_to(staging_path(out))).stat().st_mtime_ns
        for path in complete
        if "traces" in str(path)
    }
    assert all(complete[path] == written for path, written in unchanged.items())
    assert result.report.answer is not None


def test_an_interrupted_demo_with_other_settings_starts_again(pair_with_prompts: Path, tmp_path: Path) -> None:
    def interrupt(task: str, done: int, total: int) -> None:
        if task == "profile":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo(tmp_path / "out", pair=pair_with_prompts, sizes=SMALL, progress=interrupt)
    other, lines = replace(SMALL, tokens=12), list[str]()
    with pytest.raises(InputError, match=r"interrupted demo .* differs in sizes"):
        demo(tmp_path / "out", pair=pair_with_prompts, sizes=other)
    result = demo(tmp_path / "out", pair=pair_with_prompts, sizes=other, overwrite=True, announce=lines.append)
    assert "Continuing" not in lines[0]
    assert load_trace(result.folder / "traces-train").header.max_new_tokens == 12


@pytest.mark.parametrize(("slower", "train"), [(0.5, 160), (2.0, 80), (100.0, 56)])
def test_a_slow_machine_gets_fewer_prompts(
    slower: float, train: int, pair: Pair, pair_with_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "token_seconds", lambda *_: slower * module.REFERENCE_TOKEN_S)
    lines: list[str] = []
    sizes = module.begin(tmp_path / "work", pair_with_prompts, pair, {}, None, Sizes(train=160), lines.append)
    assert sizes.train == train
    assert f"{train} training" in lines[0] and "tokens/s" in lines[0]


def report_with(ratio: Ratio, bound: float, decided_ms: float, saved_ms: float) -> Report:
    one = Ratio(1.0, 1.0, 1.0)
    lines = (
        Line("best fixed", "fixed", 100.0, one, one, one),
        Line("mlp", "learned", 101.0, one, ratio, one),
        Line("oracle bound", "bound", 120.0, one, Ratio(bound, bound, bound), one),
    )
    stops = (
        {"name": "best fixed", "ms_per_token": (0.1, 0.1, 0.0, 0.0)},
        {"name": "mlp", "ms_per_token": (0.1, 0.1 - saved_ms / 100, decided_ms / 100, 0.0)},
    )
    answer = Answer(verdict(ratio, 40), "mlp", "mlp", "The headline.", "")
    return Report(lines, (), {"prompts": 40}, (), answer, (), (), {"stops": stops})


@pytest.mark.parametrize(
    ("ratio", "bound", "decided_ms", "saved_ms", "reason"),
    [
        (Ratio(1.0, 0.98, 1.02), 1.02, 1.0, 2.0, "1.020"),
        (Ratio(0.97, 0.95, 0.99), 1.3, 5.0, 3.0, "5.0 ms"),
        (Ratio(1.01, 0.99, 1.03), 1.3, 1.0, 3.0, "40 prompts"),
    ],
)
def test_the_verdict_explains_a_refusal_with_numbers(
    ratio: Ratio, bound: float, decided_ms: float, saved_ms: float, reason: str
) -> None:
    texts = explain(report_with(ratio, bound, decided_ms, saved_ms))
    assert texts[0] == "The headline." and len(texts) == 2
    assert reason in texts[1]


def test_the_verdict_of_a_gain_needs_no_reason() -> None:
    assert explain(report_with(Ratio(1.08, 1.05, 1.11), 1.3, 1.0, 5.0)) == ["The headline."]


def test_policies_alternate_and_progress_counts_prompts(pair: Pair, prompt_ids: list[list[int]]) -> None:
    calls: list[tuple[str, int, int]] = []
    prompts = [(f"p{i}", ids) for i, ids in enumerate(prompt_ids[:3])]
    runs = [Speculator(pair, FixedLength(length), Settings(0.7, 10, verification="match")) for length in (0, 2)]
    rows = run_alternating(runs, prompts, progress=lambda *call: calls.append(call))
    assert [len(row) for row in rows] == [3, 3]
    assert [g.tokens for g in rows[0]] == [g.tokens for g in rows[1]]
    assert all(r.drafted == 0 for g in rows[0] for r in g.rounds)
    assert calls == [("live", i, 3) for i in (1, 2, 3)]


def test_the_text_that_warms_up_is_not_remembered(pair: Pair, prompt_ids: list[list[int]]) -> None:
    prompts = [(f"p{i}", ids) for i, ids in enumerate(prompt_ids[:3])]
    runs = [Speculator(pair, Heuristic(2), Settings(0.7, 10, verification="match")) for _ in range(2)]
    alternated = run_alternating(runs[:1], prompts)[0]
    alone = [runs[1].generate(ids, stream_key(0, name)) for name, ids in prompts]
    assert [[r.drafted for r in g.rounds] for g in alternated] == [[r.drafted for r in g.rounds] for g in alone]
    assert len({r.drafted for g in alone for r in g.rounds}) > 1
