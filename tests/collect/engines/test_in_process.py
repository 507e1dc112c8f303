"""vLLM in this process, without vLLM: what is refused, which texts rounds belong to, how steps are timed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import cli
from specstop.collect.engines import through_vllm
from specstop.collect.engines.through_vllm import RecordedText, parts_of
from specstop.collect.engines.vllm_profile import StepScript, StepTimer, measure_vllm
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.engines.drafting import EngineDraft
from specstop.decode.models.pair import Pair
from specstop.policies.contract import DraftStep
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.measurements import BATCH_DRAFTS, BATCH_FIRST, BATCH_VERIFY, Key
from specstop.policies.registry import load_policy

NOTHING: Any = np.zeros((0, 0))


@pytest.mark.parametrize(
    "options",
    [{"through": "vlm"}, {"tree": "2,2"}, {"mix": 0.5}, {"hidden": ["draft_hidden"]}, {"verification": "rejection"},
     {"draws": 2, "temperature": 0.7}, {"completions": {"p0": "w7"}}, {"memory": 9}],
    ids=str,
)  # fmt: skip
def test_what_is_not_for_engines_is_refused(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match="through"):
        collect(pair, prompts, tmp_path / "t", depth=3, max_new_tokens=8, **{"through": "vllm", **options})
    assert not (tmp_path / "t").exists()


def test_policies_and_drafters_that_read_what_vllm_does_not_pass_on_are_refused(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    policy, options = load_policy("fixed:2"), {"depth": 3, "max_new_tokens": 8, "through": "vllm"}
    policy.features = ("anchor_entropy",)
    with pytest.raises(PolicyError, match="anchor_entropy"):
        collect(pair, prompts, tmp_path / "t", policy=policy, **options)
    with pytest.raises(InputError, match="drafter medusa:heads"):
        collect(replace(pair, drafter="medusa:heads"), prompts, tmp_path / "t", **options)


def test_a_machine_without_vllm_is_an_error_of_one_line(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("VLLM_LOGGING_STREAM", raising=False)
    with pytest.raises(InputError, match="vLLM cannot be imported"):
        collect(pair, prompts, tmp_path / "t", depth=3, max_new_tokens=8, through="vllm")
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr", "stdout may be JSON"
    with pytest.raises(InputError, match="vLLM cannot be imported"):
        measure_vllm("t", "d", [[1, 2, 3]], depth=2, new_tokens=4)


@pytest.mark.parametrize(("batch", "rows"), [(None, 8), (1, 1), (3, 3)])
def test_as_many_texts_are_decoded_side_by_side_as_requested(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int | None, rows: int
) -> None:
    def start(create: Any, policy: Any, target: str, depth: int, options: dict[str, Any], dtype: str) -> None:
        raise InputError(f"{options['rows']} rows")

    monkeypatch.setattr(through_vllm, "start_vllm", start)
    with pytest.raises(InputError, match=f"^{rows} rows"):
        collect(pair, prompts, tmp_path / "t", depth=3, max_new_tokens=8, through="vllm", batch=batch)


def test_rounds_belong_to_the_request_with_their_text() -> None:
    """Requests that came back, two samples of one prompt, and a prompt that begins with another one and its text."""
    texts = [RecordedText("a", [1, 2, 3], 1), RecordedText("b", [1, 2, 9, 4], 1), RecordedText("a", [1, 2, 3, 5], 3)]
    assert parts_of(texts, [1, 2, 3, 5], 1) == [texts[0], texts[2]]
    assert parts_of(texts, [7], 1) == []
    assert parts_of([RecordedText(None, [7, 8], 1)], [7, 8], 1) == [RecordedText(None, [7, 8], 1)]
    texts = [
        RecordedText("b", [1, 2, 9, 4], 1),
        RecordedText("a", [1, 2, 3, 5], 1),
        RecordedText("c", [1, 2, 3, 5, 6], 4),
    ]
    assert parts_of(texts, [1, 2, 3, 5], 1) == [texts[1]] and parts_of(texts, [1, 2, 9, 4, 8], 1) == [texts[0]]
    assert parts_of(texts, [1, 2, 3, 5, 6, 7], 4) == [texts[2]]


class Steps:
    """Plays steps of an engine for a timer: the clock of the draft model and of decisions, and the drafts."""

    def __init__(self, policy: str | None = None, streams: int = 1) -> None:
        self.model_s = self.policy_s = 0.0
        self.timer = StepTimer(lambda: (self.model_s, self.policy_s))
        self.timer.policy, self.timer.streams = policy, streams

    def play(
        self, drafts: list[EngineDraft], seconds: float = 0.0, first: float = 1.0, later: float = 1.0, outside: float = 0.5,
        decisions: float = 0.0, heard: int | None = None,
    ) -> None:  # fmt: skip
        """Draft and, after `seconds`, report the outcome of the first `heard` drafts; default: of all."""
        if any(draft.drafted for draft in drafts):
            self.model_s += first
            self.timer.on_draft_step(1, NOTHING, NOTHING, NOTHING)
        self.model_s += later
        self.policy_s += decisions
        self.timer.on_drafts(drafts, first + later + outside + decisions)
        if seconds:
            self.timer.on_outcomes(drafts[:heard], [seconds] * len(drafts[:heard]))


def sent(row: int, drafted: int, *, backlog: int = 1, hit_limit: bool = False) -> EngineDraft:
    return EngineDraft(row, 10, [7] * drafted, drafted, drafted, backlog, hit_limit=hit_limit)


def test_a_step_is_drafting_and_the_rest_of_the_engines_step() -> None:
    steps = Steps()
    steps.timer.on_begin(0, NOTHING, None)
    steps.play([sent(0, 3, backlog=2)], 20.125, 1.0, 4.0, 0.5, 0.125)
    steps.play([sent(0, 0)], 9.0, 0.0, 0.0, 0.25)
    steps.play([sent(0, 1)], 0.0, 1.0, 0.0, 0.25)
    expected = {
        ("batch verify", (1, 4)): 15.0, ("verify", (3,)): 14.5, ("outside", (3,)): 0.5, ("first draft", (2,)): 1.0,
        ("later drafts", (3,)): 4.0, ("batch verify", (1, 1)): 9.0, ("verify", (0,)): 8.75, ("outside", (0,)): 0.25,
    }  # fmt: skip
    assert dict(steps.timer.timed) == {Key(name, "short", counts): [s] for (name, counts), s in expected.items()}
    assert steps.timer.contexts["short"] == [10, 10]


def test_steps_of_several_requests_are_filed_by_how_many_drafted() -> None:
    steps = Steps(streams=3)
    for _ in range(2):
        steps.play([sent(0, 3), sent(1, 3), sent(2, 0)], 20.0, 1.0, 4.0, 0.5)
    expected = {Key(BATCH_VERIFY, "short", (3, 9)): 15.0, Key(BATCH_FIRST, "short", (2,)): 1.0}
    expected[Key(BATCH_DRAFTS, "short", (2, 2))] = 4.0
    assert dict(steps.timer.timed) == {key: [seconds] for key, seconds in expected.items()}


def test_under_a_policy_only_its_decisions_are_timed() -> None:
    steps = Steps("mine")
    for drafted, decisions in ((3, 0.5), (0, 0.0), (1, 0.25), (0, 0.0)):
        steps.play([sent(0, drafted)], 20.0, decisions=decisions)
    assert dict(steps.timer.timed) == {Key("decisions", "mine", (3,)): [0.5], Key("decisions", "mine", (1,)): [0.25]}
    steps = Steps("mine", 3)
    for _ in range(2):
        steps.play([sent(row, drafted) for row, drafted in enumerate((3, 1, 0))], 20.0, decisions=0.75)
    assert dict(steps.timer.timed) == {Key("decisions", "mine", (3,)): [0.75]}


@pytest.mark.parametrize("why", ["another began", "one ended", "cut by an end of text", "nothing"])
def test_steps_of_which_not_all_is_known_are_left_out(why: str) -> None:
    steps = Steps(streams=2)
    drafts = [sent(0, 2), sent(1, 2, hit_limit=why == "cut by an end of text")]
    steps.play(drafts, 20.0, heard=1 if why == "one ended" else None)
    if why == "another began":
        steps.timer.on_begin(1, NOTHING, None)
    steps.play(drafts)
    assert bool(steps.timer.timed) == (why == "nothing")


def test_the_script_has_so_many_requests_draft_equally_deep_twice_in_a_row() -> None:
    script, lengths = StepScript(3), []
    script.deal(4, 0)
    for _ in range(2 * len(script._deck)):
        drafted, alive = np.zeros(4, dtype=int), np.ones((4, 1), dtype=bool)
        for depth in range(4):
            alive, _ = script.keep(DraftStep(depth, alive, NOTHING, NOTHING, {}, np.zeros(4, dtype=np.int64)), None)
            drafted += alive[:, 0]
        lengths.append(sorted(drafted.tolist(), reverse=True))
    assert lengths[::2] == lengths[1::2]
    assert sorted(lengths[::2]) == sorted([length] * some + [0] * (4 - some) for some, length in script._deck)


@pytest.mark.parametrize(("through", "more"), [("vllm", ("--tree", "2,2")), ("vlm", ())])
def test_options_of_a_profile_that_contradict_each_other_are_refused(
    through: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    answer = cli("profile", "--through", through, *more, "--out", tmp_path / "p.json")
    assert answer.code == 2 and "--through" in answer.err
