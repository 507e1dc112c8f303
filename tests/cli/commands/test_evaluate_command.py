"""`specstop evaluate` and what it says of a profile; `specstop profile --add-policy`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from commands import cli, files
from specstop.collect.store.folder import Trace
from specstop.policies.latency.estimate import DECISIONS
from specstop.policies.latency.profile import Profile
from specstop.train.fit.run import train
from specstop.train.report.evaluate import evaluate
from timed import timed_profile


@pytest.fixture
def bare(full_profile: Profile) -> Profile:
    """A noisy profile without any decision."""
    return timed_profile(dataclasses.replace(full_profile, decision_s={}), pace=0.1, jitter=0.1)


def test_the_command_line_says_what_the_profile_lacks(
    bare: Profile, sides: tuple[Trace, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "cache"))
    bare.save(tmp_path / "profile.json")
    said = []
    for at in range(2):
        arguments = ("--traces", sides[1].folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / f"r{at}")
        answer = cli("evaluate", *arguments, "--policy", "confidence:0.7", "--no-sweep", "--quiet")
        assert answer.code == 0, answer.err
        said.append(" ".join(answer.out.split()))
    assert said[0].replace("r0", "r1") == said[1]
    assert "does not price the decisions of confidence (timed once on this machine and kept:" in said[0]
    reports = [files(tmp_path / f"r{at}") for at in range(2)]
    command = f"`specstop profile --add-policy confidence:0.7 --profile {tmp_path / 'profile.json'}`"
    assert command in reports[0]["report.md"].decode() and command in reports[0]["report.html"].decode()
    assert {name for name in reports[0] if reports[0][name] != reports[1][name]} == {"run.yaml"}


def test_decisions_are_added_to_a_profile_and_then_known(
    bare: Profile, sides: tuple[Trace, Trace], pair_folder: Path, tmp_path: Path
) -> None:
    bare.save(tmp_path / "profile.json")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"id": "{at}", "prompt": "w7 w{at} w9"}}\n' for at in range(6, 9))
    )
    models = ["--target", pair_folder / "target", "--draft", pair_folder / "draft", "--dtype", "float64"]
    command = ["profile", "--add-policy", "confidence:0.4", *models, "--prompts", tmp_path / "prompts.jsonl", "--quiet"]
    refused = cli(*command)
    assert refused.code == 2 and "expected the profile to add to; give it with --profile" in refused.err
    refused = cli("profile", "--add-policy", "fixed:2", *command[3:], "--profile", tmp_path / "profile.json")
    assert refused.code == 2 and "fixed:2 decided nothing" in refused.err
    assert Profile.load(tmp_path / "profile.json") == bare
    answer = cli(*command, "--profile", tmp_path / "profile.json", "--out", tmp_path / "other.json")
    assert answer.code == 0, answer.err
    assert Profile.load(tmp_path / "profile.json") == bare, "another file was named"
    assert cli(*command, "--profile", tmp_path / "profile.json").code == 0
    known = Profile.load(tmp_path / "profile.json")
    assert known.decision("confidence").each > 0 and known.same_costs(bare.to_dict())
    assert {key.of for key in known.measurements.only(DECISIONS).series} == {"confidence"}
    assert known.measurements.without(DECISIONS, "confidence") == bare.measurements
    report = evaluate(sides[1], known)
    assert not any("does not price" in text for text in report.findings)


def test_without_a_place_to_go_a_profile_is_refused(pair_folder: Path) -> None:
    answer = cli("profile", "--target", pair_folder / "target", "--draft", pair_folder / "draft")
    assert answer.code == 2 and "--out: expected a JSON file for the profile to go to" in answer.err


def test_rows_are_called_what_was_typed(sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path) -> None:
    """Two folders of one head, whose own names are the same, and a rule."""
    for name in ("one", "two"):
        train(sides[0], full_profile, out=tmp_path / name)
    full_profile.save(tmp_path / "profile.json")
    typed = [str(tmp_path / "one"), str(tmp_path / "two"), "confidence:0.7"]
    options = [word for spec in typed for word in ("--policy", spec)]
    read = ["evaluate", "--traces", sides[1].folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / "r"]
    answer = cli(*read, *options, "--no-sweep", "--json")
    assert answer.code == 0, answer.err
    names = [line["name"] for line in json.loads(answer.out)["lines"]]
    assert set(typed) <= set(names)
    twice = cli(*read, *options[:2] * 2, "--overwrite")
    assert twice.code == 2 and f"two policies are called '{typed[0]}'" in twice.err
