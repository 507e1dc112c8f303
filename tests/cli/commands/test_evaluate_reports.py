"""`specstop evaluate` with several places, earlier reports and traces with exploration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Answer, cli
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.files import MANIFEST
from specstop.policies.fixed import Confidence
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import save_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.report import FILES
from specstop.train.replay.rounds import scaled


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, sides: tuple[Trace, Trace], full_profile: Profile, pair: Pair,
    prompts: list[Prompt], learned: LearnedPolicy,
) -> Path:  # fmt: skip
    folder = tmp_path_factory.mktemp("reports")
    full_profile.save(folder / "profile.json")
    scaled(full_profile, draft=2.0).save(folder / "slow.json")
    save_policy(learned, folder / "policy")
    evaluate(sides[1], full_profile, [Confidence(0.6, DEPTH)], out=folder / "report")
    evaluate(sides[1], full_profile, [Confidence(0.3, DEPTH)], out=folder / "other", seed=1)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "report.json").write_text('{"kind": "report", "schema": 2, "facts": {}}')
    live = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "collector": "live", "verification": "rejection"}
    collect(pair, prompts, folder / "live", policy=Confidence(0.6, DEPTH), explore=0.3, **live)
    return folder


def parsed(answer: Answer) -> Any:
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.count("\n") == 1
    return json.loads(answer.out)


def fits(text: str) -> bool:
    """Whether the tables fit 80 columns."""
    return all(len(line) <= 80 for line in text.splitlines() if line[:1] in "┏┃┡│└")


def test_every_trace_with_every_profile_is_a_place(place: Path, sides: tuple[Trace, Trace], tmp_path: Path) -> None:
    policies = ["--policy", place / "policy", "--policy", "fixed:2"]
    profiles = ["--profile", place / "profile.json", "--profile", place / "slow.json"]
    run = ["evaluate", "--traces", sides[1].folder, "--traces", sides[0].folder, *profiles, *policies]
    refused = cli(*run, "--out", tmp_path / "t", "--json")
    assert refused.code == 2 and "--allow-overlap" in refused.err and not (tmp_path / "t").exists()
    answer = cli(*run, "--out", tmp_path / "t", "--json", "--allow-overlap")
    assert answer.code == 0 and "not held-out" in answer.err
    raw = json.loads(answer.out)
    written = json.loads((tmp_path / "t" / "report.json").read_text())
    assert raw["places"] == written["places"]
    assert list(raw["places"]) == [
        f"{trace.folder}, {place / name}" for trace in sides[::-1] for name in ("profile.json", "slow.json")
    ]
    assert {p.name for p in (tmp_path / "t").iterdir()} == {*FILES, "run.yaml", MANIFEST}
    shown = cli(*run, "--out", tmp_path / "t", "--overwrite", "--quiet", "--allow-overlap")
    assert shown.code == 0, shown.err
    assert fits(shown.out)
    words = " ".join(shown.out.split())
    for text in ("vs best fixed", *raw["summary"]):
        assert " ".join(text.split()) in words
    saved = yaml.safe_load((tmp_path / "t" / "run.yaml").read_text())
    assert (saved["command"], len(saved["traces"]), len(saved["policy"])) == ("evaluate", 2, 2)
    again = cli("evaluate", "--config", tmp_path / "t" / "run.yaml", "--out", tmp_path / "u", "--quiet")
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "u" / "report.json").read_text())["places"] == written["places"]


def test_two_reports_are_compared(place: Path) -> None:
    section = parsed(cli("evaluate", "--compare", place / "report", "--compare", place / "other", "--json"))
    assert {"plain decoding", "best fixed"} <= {row[0] for row in section["rows"]}
    shown = cli("evaluate", "--compare", place / "report", "--compare", place / "other" / "report.json")
    assert (shown.code, shown.err) == (0, "")
    assert fits(shown.out)
    text = " ".join(shown.out.split())
    for word in ("confidence:0.6 (before)", "confidence:0.3 (now)", "common prompts", "Also different: nothing"):
        assert word in text
    assert "no repeated timings" in text, "the profile of the fixture was not measured"


def test_a_new_report_is_compared_with_an_earlier_one(place: Path, sides: tuple[Trace, Trace], tmp_path: Path) -> None:
    run = ["evaluate", "--traces", sides[1].folder, "--profile", place / "profile.json", "--policy", "confidence:0.6"]
    answer = cli(*run, "--compare", place / "report", "--out", tmp_path / "r", "--quiet")
    assert answer.code == 0, answer.err
    assert fits(answer.out) and "Change from the earlier report" in answer.out
    section = json.loads((tmp_path / "r" / "report.json").read_text())["details"]["comparison"]
    ratios = {name: (ratio["value"], ratio["low"]) for name, ratio, _ in section["rows"]}
    assert ratios["confidence:0.6"] == pytest.approx((1.0, 1.0))
    assert "Change from the earlier report" in (tmp_path / "r" / "report.md").read_text()


def test_a_trace_with_exploration_has_estimates(place: Path) -> None:
    run = ["evaluate", "--traces", place / "live", "--profile", place / "profile.json", "--policy", "fixed:4"]
    section = parsed(cli(*run, "--json"))["details"]["importance"]
    assert [row[0] for row in section["rows"]] == ["fixed:4"]
    shown = cli(*run, "--quiet")
    assert shown.code == 0, shown.err
    assert fits(shown.out)
    text = " ".join(shown.out.split())
    for word in ("Estimate relative to the recorded policy", "confidence:0.6", "30%", "other anchors"):
        assert word in text


def test_wide_tables_have_all_columns(place: Path, sides: tuple[Trace, Trace]) -> None:
    run = [
        "evaluate",
        "--traces",
        sides[1].folder,
        "--profile",
        place / "profile.json",
        "--policy",
        "fixed:2",
        "--quiet",
    ]
    short, wide = (cli(*run, *more) for more in ([], ["--wide"]))
    assert (short.code, wide.code) == (0, 0)
    assert fits(short.out) and "P(A >= k)" not in short.out
    for word in ("oracle", "drafted", "P(A >= k)"):
        assert word in wide.out


HELD = ["evaluate", "--traces", "{held}", "--profile", "{profile.json}", "--policy", "fixed:1"]
BAD: dict[str, tuple[list[str], str]] = {
    "a missing report": (["evaluate", "--compare", "{report}", "--compare", "{nowhere}"], "nowhere, which does not exist"),
    "a damaged report": (["evaluate", "--compare", "{damaged}", "--compare", "{report}"], "damaged (KeyError('lines'))"),
    "no report": (["evaluate", "--compare", "{profile.json}", "--compare", "{report}"], "got {place}/profile.json"),
    "no traces": (["evaluate", "--profile", "{profile.json}"], "--traces: expected traces, or two reports"),
    "no profile": (["evaluate", "--traces", "{held}"], "at least one --profile"),
    "one trace twice": ([*HELD, "--traces", "{held}"], "each trace and each profile once"),
    "no policy": ([*HELD[:5], "--profile", "{slow.json}"], "--policy: expected at least one"),
    "tuning in several places": ([*HELD, "--profile", "{slow.json}", "--primary", "fixed:1"], "--primary: expected one"),
    "a full folder": ([*HELD, "--profile", "{slow.json}", "--out", "{report}"], "not empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_exit_code_2(place: Path, sides: tuple[Trace, Trace], name: str) -> None:
    words, message = BAD[name]
    given = [str(sides[1].folder) if w == "{held}" else str(place / w[1:-1]) if w.startswith("{") else w for w in words]
    answer = cli(*given)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("specstop: ")
    assert answer.err.count("\n") == 1
    assert message.replace("{place}", str(place)) in answer.err
