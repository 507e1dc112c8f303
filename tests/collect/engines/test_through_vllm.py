"""`--through vllm` without vLLM: what is refused, and what is said where it is not installed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from specstop.collect.engines import through_vllm
from specstop.collect.engines.serving import RecordedText
from specstop.collect.engines.through_vllm import parts_of
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.models.pair import Pair
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.registry import load_policy


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"through": "vlm"}, InputError, "through: expected vllm, not 'vlm'"),
        ({"tree": "2,2"}, InputError, "through vllm: expected chains"),
        ({"mix": 0.5}, InputError, "through vllm: expected chains"),
        ({"hidden": ["draft_hidden"]}, InputError, "through vllm: expected chains"),
        ({"verification": "rejection"}, InputError, "through vllm: expected chains"),
    ],
)
def test_what_is_not_for_engines_is_refused(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        collect(pair, prompts, tmp_path / "t", depth=3, max_new_tokens=8, **{"through": "vllm", **options})
    assert not (tmp_path / "t").exists()


def test_a_policy_that_vllm_cannot_run_is_refused(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    policy = load_policy("fixed:2")
    policy.features = ("anchor_entropy",)
    with pytest.raises(PolicyError, match="reads anchor_entropy, which vllm"):
        collect(pair, prompts, tmp_path / "t", depth=3, max_new_tokens=8, through="vllm", policy=policy)


def test_a_drafter_on_the_target_s_states_is_refused(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    heads = replace(pair, drafter="medusa:heads")
    with pytest.raises(InputError, match="drafter medusa:heads: it reads the target's hidden states, which vllm"):
        collect(heads, prompts, tmp_path / "t", depth=3, max_new_tokens=8, through="vllm")


def test_a_machine_without_vllm_is_told(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("VLLM_LOGGING_STREAM", raising=False)
    with pytest.raises(InputError, match=r"through vllm: vLLM cannot be imported .*install it beside specstop"):
        collect(pair, prompts, tmp_path / "t", depth=3, max_new_tokens=8, through="vllm")
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr", "the output is JSON where that is asked for"


@pytest.mark.parametrize(("batch", "rows"), [(None, 8), (1, 1), (3, 3)])
def test_as_many_texts_are_decoded_side_by_side_as_were_asked_for(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int | None, rows: int
) -> None:
    def start(proposer: type, policy: StopPolicy, target: str, depth: int, options: dict, dtype: str) -> None:
        raise InputError(f"{options['rows']} rows")

    monkeypatch.setattr(through_vllm, "start_vllm", start)
    with pytest.raises(InputError, match=f"^{rows} rows"):
        collect(pair, prompts, tmp_path / "t", depth=3, max_new_tokens=8, through="vllm", batch=batch)


def test_a_request_that_came_back_has_several_parts() -> None:
    texts = [RecordedText("a", [1, 2, 3], 1), RecordedText("b", [1, 2, 9, 4], 1), RecordedText("a", [1, 2, 3, 5], 3)]
    assert parts_of(texts, [1, 2, 3, 5], 1) == [texts[0], texts[2]]
    assert parts_of(texts, [7], 1) == []
    assert parts_of([RecordedText(None, [7, 8], 1)], [7, 8], 1) == [RecordedText(None, [7, 8], 1)]


def test_rounds_are_those_of_the_text_itself_where_others_begin_alike() -> None:
    """Two samples of one prompt, and a prompt that begins with another one and its text."""
    texts = [
        RecordedText("b", [1, 2, 9, 4], 1),
        RecordedText("a", [1, 2, 3, 5], 1),
        RecordedText("c", [1, 2, 3, 5, 6], 4),
    ]
    assert parts_of(texts, [1, 2, 3, 5], 1) == [texts[1]] and parts_of(texts, [1, 2, 9, 4, 8], 1) == [texts[0]]
    assert parts_of(texts, [1, 2, 3, 5, 6, 7], 4) == [texts[2]]
