"""Progress, times and tables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from specstop.cli import output
from specstop.cli.output import human_seconds, progress_bars, progress_line, table


def test_progress_counts_only_what_this_run_did() -> None:
    assert progress_line("collect", 60, 100, 20, 10.0) == "collect: 60 of 100, 10 s, 2/s, 20 s left"
    assert progress_line("collect", 100, 100, 20, 10.0) == "collect: 100 of 100, 10 s, 2/s"
    assert progress_line("collect", 40, 100, 0, 3.0) == "collect: 40 of 100, 3 s"


def test_progress_without_a_terminal_is_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress_bars() as progress:
        for done, spent in ((3, 2.0), (4, 2.0), (5, 4.0), (6, 1.0), (7, 1.0)):
            now[0] += spent
            progress("collect", done, 7)
    assert capsys.readouterr().err.splitlines() == [
        "collect: 5 of 7, 6 s, 0.333/s, 6 s left",
        "collect: 7 of 7, 8 s, 0.5/s",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(8.4, "8 s"), (119, "119 s"), (150, "2 min"), (9000, "2.5 h")])
def test_times_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_a_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table("t", ("name", "value", "description"), [("a", "1.5", "word " * 60), ("b" * 200, "-", "x" * 200)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(lines).count("x") == 200, "nothing is cut off"
