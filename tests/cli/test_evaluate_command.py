"""`specstop evaluate` and what it says of a profile; `specstop profile --add-policy`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from commands import cli, files
from specstop.collect.store import Trace
from specstop.policies.costs import Profile
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
