"""`specstop profile` and what `info` says of a profile: how noisy the machine was, in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from commands import COMPACT, cli, model_options
from specstop.decode.profile.measuring import BUDGET_S, Effort
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.profile import Profile
from timed import timed_profile


@pytest.fixture
def asked(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks for; the answer is the profile under `found`."""
    asked: dict[str, Any] = {"found": timed_profile(profile, jitter=0.01)}

    def measure_profile(*args: Any, **more: Any) -> Profile:
        asked.update(more)
        answer: Profile = asked["found"]
        return answer

    monkeypatch.setattr("specstop.decode.profile.measure_profile", measure_profile)
    return asked


@pytest.fixture
def command(pair_folder: Path, tmp_path: Path) -> list[object]:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "w7 w8 w9"}\n')
    models = model_options(pair_folder, *COMPACT)
    return ["profile", *models, "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "p.json"]


def described(folder: Path) -> dict[str, Any]:
    """Return the description of the profile in a folder."""
    facts: dict[str, Any] = json.loads(cli("info", folder / "p.json", "--json").out)
    return facts


def test_a_quiet_profile_is_written_without_a_word(
    asked: dict[str, Any], command: list[object], tmp_path: Path
) -> None:
    answer = cli(*command, "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert described(tmp_path)["verdict"].startswith("this machine was quiet")
    assert asked["effort"] == Effort(BUDGET_S, repetitions=None)


def test_a_noisy_one_is_written_with_a_warning(
    asked: dict[str, Any], command: list[object], profile: Profile, tmp_path: Path
) -> None:
    asked["found"] = timed_profile(profile, jitter=0.5)
    answer = cli(*command, "--budget", 30, "--repeats", 7, "--quiet")
    (line,) = answer.err.splitlines()
    assert answer.code == 0 and line.startswith("warning: this machine was busy")
    assert line.endswith("close other programs and measure again, or raise --budget")
    assert line.removeprefix("warning: ") == described(tmp_path)["verdict"]
    assert asked["effort"] == Effort(30.0, repetitions=7)
    assert Profile.load(tmp_path / "p.json") == asked["found"]
    assert "this machine was busy" in " ".join(cli("info", tmp_path / "p.json").out.split())


def test_a_profile_that_kept_no_timings_says_so(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "old.json")
    verdict = json.loads(cli("info", tmp_path / "old.json", "--json").out)["verdict"]
    assert verdict.startswith("nothing says how noisy the machine was")


def test_batches_are_measured_on_request_and_described(
    asked: dict[str, Any], command: list[object], profile: Profile, tmp_path: Path
) -> None:
    table = BatchTable(10.0, ((1, 1e-3), (4, 2e-3)), {4: ((4, 3e-3), (8, 5e-3))})
    asked["found"] = dataclasses.replace(profile, batch=BatchCosts(table, table))
    answer = cli(*command, "--batch", "4,1, 2", "--quiet")
    assert answer.code == 0 and asked["batch"] == (1, 2, 4)
    assert described(tmp_path)["batch of 4, ms"] == "plain 3.00, draft step 2.00, verification of 8 tokens 5.00"
    for wrong, message in (
        ("4;2", "expected batch sizes such as 1,2,4,8, not '4;2'"),
        ("0", "expected a whole number from 1"),
    ):
        answer = cli(*command, "--overwrite", "--batch", wrong)
        assert (answer.code, message in answer.err) == (2, True), answer.err
