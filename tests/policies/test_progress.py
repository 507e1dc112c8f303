"""Progress by default: bars for people, nothing for programs."""

from __future__ import annotations

import sys

import pytest
from specstop.policies.display import shown


def test_a_terminal_gets_a_bar_for_each_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown("collect", 1, 2)
    assert capsys.readouterr().err == "", "no one looks"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for done in range(3):
        shown("collect", done, 2)
    shown("collect", 2, 4)  # other work under the same name
    shown("train", 1, 1)
    shown("collect", 4, 4)
    text = capsys.readouterr().err
    assert "collect: 100%" in text and "2/2" in text and "4/4" in text and "train: 100%" in text
