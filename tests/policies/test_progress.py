"""Progress bars in a terminal, and no output elsewhere."""

from __future__ import annotations

import sys

import pytest
from specstop.policies.display import shown


def test_a_terminal_shows_a_bar_for_each_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shows=is_terminal: shows)
        for call in (("collect", 0, 2), ("collect", 2, 2), ("collect", 2, 4), ("train", 1, 1), ("collect", 4, 4)):
            shown(*call)
        text = capsys.readouterr().err
        bars = [part in text for part in ("collect: 100%", "2/2", "4/4", "train: 100%")]
        assert all(bars) if is_terminal else not text
