"""Layouts of known prompt sets: which columns hold the prompt, its id, its group and an answer, and where the set lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...policies.errors import InputError, close_match


@dataclass(frozen=True)
class Layout:
    """How the records of a prompt set are read; of several column names the first one present is taken.

    Attributes:
        prompt, id, group: column names.
        prompt_id: columns with the id of the prompt that a record is a sample of.
        sample: columns with the name of the sample.
        fixed_group: the group where no column gives one.
        hub: the data set on the hub as `hf:name[:config]`, or empty: a file must be given.
        split: its split.
        known: what the set is, for messages.
    """

    prompt: tuple[str, ...] = ("prompt", "messages", "conversations")
    id: tuple[str, ...] = ("id",)
    group: tuple[str, ...] = ("group", "category")
    prompt_id: tuple[str, ...] = ("prompt_id",)
    sample: tuple[str, ...] = ("sample",)
    fixed_group: str = ""
    hub: str = ""
    split: str = "train"
    known: str = ""


PLAIN = Layout()
"""What a file without a preset is read as."""

PRESETS: Mapping[str, Layout] = {
    "gsm8k": Layout(
        prompt=("question", "prompt"),
        fixed_group="gsm8k",
        hub="hf:openai/gsm8k:main",
        known="GSM8K: question and answer",
    ),
    "humaneval": Layout(
        id=("task_id", "id"),
        fixed_group="humaneval",
        hub="hf:openai/openai_humaneval",
        split="test",
        known="HumanEval: task_id and prompt",
    ),
    "mt-bench": Layout(
        prompt=("turns", "prompt"),
        id=("question_id", "prompt_id", "id"),
        prompt_id=(),  # here the id of the question
        fixed_group="mt-bench",
        hub="hf:HuggingFaceH4/mt_bench_prompts",
        known="MT-bench: question_id, category and turns, of which the first is the prompt",
    ),
    "spec-bench": Layout(
        prompt=("turns", "prompt"),
        id=("question_id", "id"),
        fixed_group="spec-bench",
        known="Spec-Bench: question_id, category and turns, of which the first is the prompt",
    ),
}

DEMO = "demo"
"""The prompts of the shipped pair."""


def find_preset(name: str) -> Layout:
    """Return the layout called `name`, or raise `InputError` naming those there are."""
    if name not in PRESETS:
        names = (DEMO, *PRESETS)
        raise InputError(f"--preset: expected one of {', '.join(names)}, not {name!r}{close_match(name, names)}")
    return PRESETS[name]
