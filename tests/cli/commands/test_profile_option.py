"""`--profile` of the commands that decode: what is filled up, what policies hear, and what is told of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import COMPACT, cli, model_options
from conftest import make_prompts
from specstop.decode import loop
from specstop.policies.profile import Profile


@pytest.fixture
def given(tmp_path: Path, profile: Profile) -> list[object]:
    replace(profile, facts={"device": "cpu", "drafter": "suffix"}).save(tmp_path / "profile.json")
    lines = [json.dumps({"id": p.id, "prompt": p.text}) for p in make_prompts(2, "c", 12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return ["--profile", tmp_path / "profile.json", "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 8]


@pytest.mark.parametrize(
    "command",
    [
        ("decode", "--policy", "bandit?arms=fixed:1,fixed:4", "--json"),
        ("bench", "--policy", "bandit?arms=fixed:1,fixed:4", "--no-library", "--json"),
        ("collect", "--collector", "live", "--policy", "bandit?arms=fixed:1,fixed:4", "--depth", 4),
    ],
)
def test_the_loop_gets_it(
    pair_folder: Path, given: list[object], profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    command: tuple[object, ...],
) -> None:  # fmt: skip
    got = []
    monkeypatch.setattr(loop, "PolicyHost", lambda *a, **k: got.append(k["profile"]) or HOST(*a, **k))
    if command[0] == "collect":
        given = ["--extra", f"profile={given[1]}", *given[2:], "--out", tmp_path / "traces"]
    answer = cli(*command, *given, *model_options(pair_folder, *COMPACT))
    assert answer.code == 0, answer.err
    assert any(got) and all(one.low == profile.low for one in got if one)
    assert "the profile timed rounds of the drafter suffix, this run plays those of model" in answer.err


HOST = loop.PolicyHost


def test_what_it_is_not_for_is_refused(pair_folder: Path, given: list[object], tmp_path: Path) -> None:
    extra = ["--extra", f"profile={given[1]}", *given[2:]]
    answer = cli("collect", "--out", tmp_path / "traces", *extra, *model_options(pair_folder, *COMPACT))
    assert answer.code == 2 and "--extra profile: for the live collector" in answer.err
    assert not (tmp_path / "traces").exists()
    (tmp_path / "profile.json").write_text("{}")
    for command in ("decode", "bench"):
        answer = cli(command, *given, *model_options(pair_folder, *COMPACT))
        assert answer.code == 2 and "--profile: expected a latency profile" in answer.err
