"""`profile --through vllm` without vLLM: what a step's seconds are filed under, and what the script drafts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from commands import cli
from specstop.collect.engines.vllm_profile import StepScript, StepTimer, measure_vllm
from specstop.decode.engines.drafting import EngineDraft
from specstop.policies.contract import DraftStep
from specstop.policies.errors import InputError
from specstop.policies.measurements import Key

NOTHING = np.zeros((0, 0))


class Clock:
    """The seconds of the draft model and of decisions so far, as the timer asks for them."""

    now = asked = 0.0

    def spent(self) -> tuple[float, float]:
        return self.now, self.asked


def play(
    timer: StepTimer,
    clock: Clock,
    drafts: list[EngineDraft],
    first: float,
    later: float,
    outside: float,
    asked: float = 0.0,
) -> None:
    """Make the drafts of a step: the model takes `first` and `later` seconds, decisions `asked`, all else `outside`."""
    if any(sent.drafted for sent in drafts):
        clock.now += first
        timer.on_draft_step(1, NOTHING, NOTHING, NOTHING)  # type: ignore[arg-type]
    clock.now += later
    clock.asked += asked
    timer.on_drafts(drafts, first + later + outside + asked)


def sent(row: int, drafted: int, *, context: int = 10, backlog: int = 1, hit_limit: bool = False) -> EngineDraft:
    return EngineDraft(row, context, [7] * drafted, drafted, drafted, backlog, hit_limit=hit_limit)


def heard(timer: StepTimer, drafts: list[EngineDraft], seconds: float) -> None:
    timer.on_outcomes(drafts, [seconds] * len(drafts))


def test_a_step_is_drafting_and_the_rest_of_the_engines_step() -> None:
    clock = Clock()
    timer = StepTimer(clock.spent)
    timer.on_begin(0, NOTHING, None)
    drafts = [sent(0, 3, backlog=2)]
    play(timer, clock, drafts, 1.0, 4.0, 0.5, 0.125)
    heard(timer, drafts, 20.125)
    play(timer, clock, [sent(0, 0)], 0.0, 0.0, 0.25)
    heard(timer, [sent(0, 0)], 9.0)
    play(timer, clock, [sent(0, 1)], 1.0, 0.0, 0.25)
    assert dict(timer.timed) == {
        Key("batch verify", "short", (1, 4)): [15.0],
        Key("verify", "short", (3,)): [14.5],
        Key("outside", "short", (3,)): [0.5],
        Key("first draft", "short", (2,)): [1.0],
        Key("later drafts", "short", (3,)): [4.0],
        Key("batch verify", "short", (1, 1)): [9.0],
        Key("verify", "short", (0,)): [8.75],
        Key("outside", "short", (0,)): [0.25],
    }


def test_under_a_policy_only_its_decisions_are_timed() -> None:
    clock = Clock()
    timer = StepTimer(clock.spent)
    timer.policy = "mine"
    for drafted, asked in ((3, 0.5), (0, 0.0), (1, 0.25), (0, 0.0)):
        drafts = [sent(0, drafted)]
        play(timer, clock, drafts, 1.0, 1.0, 0.5, asked)
        heard(timer, drafts, 20.0)
    assert dict(timer.timed) == {Key("decisions", "mine", (3,)): [0.5], Key("decisions", "mine", (1,)): [0.25]}


def test_decisions_about_several_requests_are_timed_together() -> None:
    clock = Clock()
    timer = StepTimer(clock.spent)
    timer.policy, timer.streams = "mine", 3
    drafts = [sent(row, drafted) for row, drafted in enumerate((3, 1, 0))]
    play(timer, clock, drafts, 1.0, 1.0, 0.5, 0.75)
    heard(timer, drafts, 20.0)
    play(timer, clock, drafts, 1.0, 1.0, 0.5, 0.75)
    assert dict(timer.timed) == {Key("decisions", "mine", (3,)): [0.75]}


@pytest.mark.parametrize("why", ["another began", "one ended", "cut by an end of text"])
def test_steps_of_which_not_all_is_known_are_left_out(why: str) -> None:
    clock = Clock()
    timer = StepTimer(clock.spent)
    timer.streams = 2
    drafts = [sent(0, 2), sent(1, 2, hit_limit=why == "cut by an end of text")]
    play(timer, clock, drafts, 1.0, 1.0, 0.5)
    heard(timer, drafts[: 1 if why == "one ended" else 2], 20.0)
    if why == "another began":
        timer.on_begin(1, NOTHING, None)
    play(timer, clock, drafts, 1.0, 1.0, 0.5)
    assert not timer.timed


def test_the_script_has_so_many_requests_draft_equally_deep_twice_in_a_row() -> None:
    script = StepScript(3)
    script.deal(4, 0)
    lengths = []
    for _ in range(2 * len(script._deck)):
        drafted, alive = np.zeros(4, dtype=int), np.ones((4, 1), dtype=bool)
        for depth in range(4):
            step = DraftStep(depth, alive, NOTHING, NOTHING, {}, np.zeros(4, dtype=np.int64))
            alive, _ = script.keep(step, None)
            drafted += alive[:, 0]
        lengths.append(sorted(drafted.tolist(), reverse=True))
    assert lengths[::2] == lengths[1::2]
    expected = [[length] * some + [0] * (4 - some) for some, length in script._deck]
    assert sorted(lengths[::2]) == sorted(expected)


def test_without_vllm_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match="through vllm: vLLM cannot be imported"):
        measure_vllm("t", "d", [[1, 2, 3]], depth=2, new_tokens=4)


@pytest.mark.parametrize(
    ("more", "message"), [(("--tree", "2,2"), "expected chains"), ((), "expected vllm, not 'vlm'")]
)
def test_options_that_do_not_go_together_are_refused(more: tuple[str, ...], message: str, tmp_path: Path) -> None:
    answer = cli("profile", "--through", "vllm" if more else "vlm", *more, "--out", tmp_path / "p.json")
    assert answer.code == 2 and message in answer.err
