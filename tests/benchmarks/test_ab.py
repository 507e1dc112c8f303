"""`benchmarks/ab.py`: ratios of two states that were measured in alternation, and whether the machine can tell."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import script

BEFORE, AFTER, AGAIN = range(3)

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "specstop"
version = "0.1.0"
[tool.setuptools]
packages = ["specstop", "specstop.policies"]
package-dir = {"specstop" = "src/specstop", "specstop.policies" = "policies"}
"""

FAKE = """
import json, sys
import specstop.policies
print("words")
print(json.dumps({"checked": True, "us": specstop.policies.US, "options": len(sys.argv) - 1}))
"""


@pytest.fixture(scope="module")
def ab() -> ModuleType:
    return script("ab")


@pytest.fixture(scope="module")
def paired(ab: ModuleType) -> ModuleType:
    import paired

    return paired


def machine(speeds: Sequence[float], drift: float = 1.0, noise: Sequence[float] = (1.0,)) -> Callable[[int], object]:
    """Return what runs a side on a machine that slows down by `drift` with every run, noise upon it by turns."""
    runs = [0]

    def run(side: int) -> dict[str, float]:
        runs[0] += 1
        return {"us": speeds[side] * drift ** runs[0] * noise[runs[0] % len(noise)], "count": 7.0, "none": 0.0}

    return run


def rows(ab: ModuleType, run: object, rounds: int = 6, sides: int = 3, patterns: Sequence[str] | None = None) -> dict:
    return {row.key: row for row in ab.compare("fake", ab.alternate(run, rounds, sides), patterns)}


def test_numbers_are_found_by_dotted_key_and_truth_values_are_none(paired: ModuleType) -> None:
    record = {"checked": True, "a": {"T=0.7, x": [1, 2.5], "b": None}, "c": "3", "d": math.nan, "e": -4}
    assert dict(paired.numbers(record)) == {"a.T=0.7, x.0": 1.0, "a.T=0.7, x.1": 2.5, "e": -4.0}


@pytest.mark.parametrize("sides", [2, 3])
def test_each_side_is_as_often_in_each_place_and_every_order_comes_backwards_too(
    paired: ModuleType, sides: int
) -> None:
    orders = [paired.order(number, sides) for number in range(6)]
    for place in range(sides):
        assert sorted(order[place] for order in orders) == sorted(list(range(sides)) * (6 // sides))
    for one, other in zip(orders[::2], orders[1::2], strict=True):
        assert one == other[::-1]


def test_a_ratio_and_its_interval_are_those_of_the_textbook(paired: ModuleType) -> None:
    found = paired.ratio([2.0, 3.0, 2.0], [1.0, 1.0, 2.0])
    logs = [math.log(2), math.log(3), 0.0]
    mean = sum(logs) / 3
    error = (sum((x - mean) ** 2 for x in logs) / 2 / 3) ** 0.5
    assert found.value == pytest.approx(6 ** (1 / 3))
    assert (found.low, found.high) == pytest.approx(
        (math.exp(mean - 4.30265 * error), math.exp(mean + 4.30265 * error))
    )


def test_what_has_no_ratio_has_none(paired: ModuleType) -> None:
    assert paired.ratio([0.0, 0.0], [0.0, 0.0]) == paired.Ratio(1.0, 1.0, 1.0)
    assert paired.ratio([0.0, 1.0], [1.0, 1.0]) is None
    assert paired.ratio([-1.0, 1.0], [1.0, 1.0]) is None
    assert paired.ratio([1.0], [2.0]) is None


@pytest.mark.parametrize("sides", [2, 3])
def test_a_state_against_itself_is_1_on_a_machine_that_drifts(ab: ModuleType, sides: int) -> None:
    row = rows(ab, machine((5.0, 5.0, 5.0), drift=1.01), sides=sides)["fake.us"]
    assert row.ratio.value == pytest.approx(1.0, abs=1e-12)
    assert row.ratio.low < 1 < row.ratio.high
    assert row.tells(0.05)
    assert (row.again is None) == (sides == 2)


def test_a_faster_state_is_found_on_a_machine_that_drifts(ab: ModuleType) -> None:
    found = rows(ab, machine((5.0, 4.0, 5.0), drift=1.01))
    row = found["fake.us"]
    assert row.ratio.value == pytest.approx(0.8, abs=1e-12)
    assert row.ratio.high < 0.85
    assert row.tells(0.05)
    for name in ("fake.count", "fake.none"):
        assert (found[name].ratio.low, found[name].ratio.high) == (1.0, 1.0)


def test_a_machine_that_jumps_cannot_tell(ab: ModuleType) -> None:
    row = rows(ab, machine((5.0, 5.0, 5.0), noise=(1.0, 1.3, 0.8, 1.1, 0.7)))["fake.us"]
    assert row.again.low < 1 < row.again.high
    assert not row.tells(0.05)
    assert row.tells(5.0)


def test_a_machine_on_which_before_is_not_itself_cannot_tell(ab: ModuleType) -> None:
    row = rows(ab, machine((5.0, 5.0, 5.1)))["fake.us"]
    assert not row.tells(0.05)


def test_patterns_choose_figures(ab: ModuleType) -> None:
    assert list(rows(ab, machine((5.0, 4.0, 5.0)), patterns=["*.us"])) == ["fake.us"]


@pytest.fixture
def states(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkouts: one whose package says 10, one in which it says 8; the second has a second script."""
    made = []
    for name, us in (("old", 10), ("new", 8)):
        folder = tmp_path / name
        (folder / "policies").mkdir(parents=True)
        (folder / "benchmarks").mkdir()
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "policies" / "__init__.py").write_text(f"US = {us}\n")
        (folder / "src" / "specstop").mkdir(parents=True)
        (folder / "src" / "specstop" / "__init__.py").write_text("")
        (folder / "benchmarks" / "fake.py").write_text(FAKE)
        made.append(folder)
    (made[1] / "benchmarks" / "later.py").write_text(FAKE)
    (made[1] / "benchmarks" / "fails.py").write_text("print('some words')\nraise SystemExit('it fell over')\n")
    return made[0], made[1]


def test_two_checkouts_are_installed_measured_and_judged(
    ab: ModuleType, states: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    before = {path: path.read_bytes() for state in states for path in state.rglob("*") if path.is_file()}
    command = ["ab.py", *map(str, states), "fake.py", "later", "--rounds", "2", "--key", "*.us", "--key", "*.options"]
    command += ["--bar", "*.us<=0.8", "--bar", "fake.options >= 1", "--out", str(tmp_path / "out.json"), "--", "--odd"]
    monkeypatch.setattr("sys.argv", command)
    assert ab.main() == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["checked"], line["missed"], line["unsure"]) == (True, [], [])
    assert line["ratios"]["fake.us"]["value"] == line["ratios"]["later.us"]["value"] == pytest.approx(0.8)
    assert (line["ratios"]["fake.us"]["before"], line["ratios"]["fake.us"]["after"]) == ([10, 10, 10], [8, 8, 8])
    assert line["ratios"]["fake.options"]["after"] == [1, 1, 1]
    assert json.loads((tmp_path / "out.json").read_text()) == line
    assert before == {path: path.read_bytes() for state in states for path in state.rglob("*") if path.is_file()}


def test_a_bar_that_is_not_met_is_named_and_a_failing_script_shown(
    ab: ModuleType, states: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a git revision, against itself: it is installed once."""
    new = states[1]
    git = ["git", "-C", str(new), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "it"], check=True)
    prepare = ab.prepare
    asked = []

    def prepare_there(name: str, room: Path) -> object:
        asked.append(name)
        return prepare(name, room, new)

    monkeypatch.setattr(ab, "prepare", prepare_there)
    monkeypatch.setattr("sys.argv", ["ab.py", "HEAD", "HEAD", "fake", "--rounds", "2", "--bar", "fake.us<=0.9"])
    assert ab.main() == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["missed"] == ["fake.us <= 0.9: 1.000 [1.000, 1.000]; at most 0.9"]
    assert line["ratios"]["fake.us"]["before"] == [8, 8, 8]
    assert asked == ["HEAD"]
    monkeypatch.setattr("sys.argv", ["ab.py", "HEAD", "HEAD", "fails"])
    assert ab.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: fails.py of HEAD ended with exit code 1") and "it fell over" in error
    monkeypatch.setattr("sys.argv", ["ab.py", "no-such-revision", "HEAD", "fake"])
    assert ab.main() == 2
    assert "got no-such-revision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("copy", "name", "expected"),
    [
        ("own", "fake", ["old", "new", "old"]),
        ("before", "fake", ["old", "old", "old"]),
        ("after", "fake", ["new", "new", "new"]),
        ("own", "later", ["new", "new", "new"]),
    ],
)
def test_each_state_runs_the_copy_of_a_script_that_was_asked_for(
    ab: ModuleType, states: tuple[Path, Path], copy: str, name: str, expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ran = []

    def note(self: object, path: Path, options: Sequence[str]) -> dict[str, float]:
        ran.append((self.name, path.parents[1].name))
        return {}

    monkeypatch.setattr(ab.Checkout, "run", note)
    before, after = (ab.Checkout(state.name, state, Path("python")) for state in states)
    run = ab.measure(name, before, after, [], copy)
    assert ran == [("old", expected[0]), ("new", expected[1])], "each runs once before it counts"
    for side in range(3):
        run(side)
    assert ran[2:] == list(zip(["old", "new", "old"], expected, strict=True))


def test_a_bar_within_the_interval_or_on_an_unsure_figure_is_not_met(ab: ModuleType) -> None:
    bars = script("bars").Bars()
    sure = rows(ab, machine((5.0, 4.9, 5.0), drift=1.01))["fake.us"]
    unsure = rows(ab, machine((5.0, 4.0, 5.5)))["fake.us"]
    for row, text in ((sure, "*.us<=0.98"), (unsure, "*.us<=1.0")):
        ab.judge([row], [ab.BAR.match(text)], 0.05, bars)
    ab.judge([sure], [ab.BAR.match("other<=1")], 0.05, bars)
    assert "which the interval holds" in bars.missed[0]
    assert "the machine cannot tell" in bars.missed[1]
    assert bars.missed[2] == "other<=1: no figure has such a name"
