"""Progress, signals, and how times and sizes are said."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from specstop.cli.console import output as console
from specstop.cli.console.interrupt import SIGNALS, finish_first
from specstop.cli.console.output import human_bytes, human_seconds, progress_bars, progress_line


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """As a process has them that was started alone; they are set again by whoever changes them."""
    kept = [signal.default_int_handler] * len(SIGNALS)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == kept


@pytest.mark.usefixtures("own_handlers")
def test_a_second_ctrl_c_stops_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt), finish_first("this") as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == "specstop: finishing this; Ctrl-C again stops at once\n"


@pytest.mark.usefixtures("own_handlers")
def test_a_request_to_terminate_is_never_more_than_a_request() -> None:
    with finish_first("this") as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stop()


def test_another_thread_leaves_signals_alone() -> None:
    answers = []

    def work() -> None:
        with finish_first("this") as stop:
            answers.append(stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [False]


def test_progress_counts_only_what_this_run_did() -> None:
    assert progress_line("collect", 60, 100, 20, 10.0) == "collect: 60 of 100, 10 s, 2/s, 20 s left"
    assert progress_line("collect", 100, 100, 20, 10.0) == "collect: 100 of 100, 10 s, 2/s"
    assert progress_line("collect", 40, 100, 0, 3.0) == "collect: 40 of 100, 3 s"


def test_progress_without_a_terminal_is_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress_bars() as progress:
        for done, spent in ((3, 2.0), (4, 2.0), (5, 4.0), (6, 1.0), (7, 1.0)):
            now[0] += spent
            progress("collect", done, 7)
    assert capsys.readouterr().err.splitlines() == [
        "collect: 5 of 7, 6 s, 0.333/s, 6 s left",
        "collect: 7 of 7, 8 s, 0.5/s",
    ]


def test_a_task_that_does_not_advance_is_printed_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_PLAIN_EVERY_S", 0.05)
    with progress_bars() as progress:
        progress("outer", 0, 2)
        progress("inner", 0, 3)
        time.sleep(0.3)
        progress("inner", 3, 3)
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    ended = next(number for number, line in enumerate(lines) if line.startswith("inner: 3 of 3"))
    assert lines[:ended] and all(line.startswith("inner: 0 of 3") for line in lines[1:ended])
    assert lines[ended + 1 :] and all(line.startswith("outer: 0 of 2") for line in lines[ended + 1 :])


@pytest.mark.parametrize(("seconds", "text"), [(8.4, "8 s"), (119, "119 s"), (150, "2 min"), (9000, "2.5 h")])
def test_times_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (2.5e15, "2.5e+03 TB")],
)
def test_sizes_are_in_decimal_units(count: float, text: str) -> None:
    assert human_bytes(count) == text
