"""Samples of prompts: several texts of one prompt share its id and differ in the name of the sample."""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ...policies.errors import InputError, SpecstopWarning

_SUFFIX = re.compile(r"(.*(?:\d|[0-9a-f]{8}))[-_/#]\d+", re.DOTALL | re.IGNORECASE)
"""An id and a number after it. What ends in a number or a hash is the id of a prompt; `HumanEval/3` is a set and a number."""

_SHARE = 0.2
"""Share of all ids that must look like samples before a warning is issued."""


class SampleNames:
    """Assigns prompt id and sample name to records, and numbers the records of a prompt that name no sample."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def assign(self, record_id: Any, prompt_id: Any, sample: Any, default: str) -> tuple[str, str]:
        """Return (prompt id, sample) of a record; the sample is "" if the record names neither a prompt nor a sample.

        Args:
            record_id: id of the record, or None. It names the sample where `prompt_id` names the prompt.
            prompt_id: id of the prompt that the record is of, or None.
            sample: name of the sample, or None.
            default: prompt id of a record without ids.
        """
        name, record_id = ("" if value is None else str(value) for value in (sample, record_id))
        if prompt_id is None or prompt_id == "":
            return record_id or default, name
        prompt = str(prompt_id)
        number = self._counts[prompt]
        self._counts[prompt] += 1
        return prompt, name or (record_id if record_id != prompt else "") or str(number)


def sample_text(prompt_id: str, sample: str) -> str:
    """Return how messages name a text: its prompt, and the sample if there is one."""
    return f"sample {sample!r} of prompt {prompt_id!r}" if sample else f"prompt {prompt_id!r}"


class DistinctPrompts:
    """Checks that no two prompts share id and sample, and that prompts with the same id have the same text."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], str] = {}
        self._first: dict[str, tuple[str, Any]] = {}  # place and text by id

    def add(self, prompt_id: str, sample: str, text: Any, place: str, repeats: bool = False) -> bool:
        """Return whether the prompt is a new one.

        Args:
            prompt_id, sample, text: of the prompt.
            place: where it is: "FILE, line 3".
            repeats: return False if id and sample have occurred before, instead of raising.

        Raises:
            InputError: id and sample have occurred before, or the id with another text.
        """
        place_of_id, text_of_id = self._first.setdefault(prompt_id, (place, text))
        if text_of_id != text:
            raise InputError(
                f"--prompts: {place}: prompt id {prompt_id!r} appears in {_short(place_of_id)} too, with another text; use "
                "another prompt_id, or `group` for related prompts"
            )
        earlier = self._places.setdefault((prompt_id, sample), place)
        if earlier == place:
            return True
        if repeats:
            return False
        raise InputError(
            f"--prompts: {place}: {sample_text(prompt_id, sample)} appears in {_short(earlier)} too; name the samples of a "
            "prompt in a column `sample`, or drop repeated prompts with --deduplicate"
        )


def _short(place: str) -> str:
    """Return a place without the name of its file: "line 3"."""
    return place.rpartition(", ")[2]


def warn_sample_ids(ids: Sequence[str], texts: Sequence[Any] | None = None) -> None:
    """Warn if ids look like samples of prompts: `q1-0` and `q1-1`.

    Ids of equal texts are not counted: such prompts are recognised by their text.

    Args:
        ids: ids of prompts without sample names.
        texts: their texts; None = unknown.
    """
    texts = ids if texts is None else texts
    members: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(ids):
        if match := _SUFFIX.fullmatch(name):
            members[match[1]].append(index)
    alike = [group for group in members.values() if len({texts[index] for index in group}) > 1]
    count = sum(map(len, alike))
    if not alike or count < _SHARE * len(ids):
        return
    first, second = list(dict.fromkeys(ids[index] for index in alike[0]))[:2]
    warnings.warn(
        f"{count} of {len(ids)} ids look like samples of prompts ({first!r}, {second!r}), but each id counts as a separate "
        "prompt in splits and intervals; if they are samples, add a column `prompt_id` or `sample`",
        SpecstopWarning,
        stacklevel=3,
    )


def warn_equal_texts(ids: Sequence[str], texts: Sequence[Any]) -> None:
    """Warn if prompts with different ids have equal texts, and count those after the first."""
    first: dict[Any, str] = {}
    repeats = {name for name, text in zip(ids, texts, strict=True) if first.setdefault(text, name) != name}
    if repeats:
        prompts, them = ("1 prompt repeats", "it") if len(repeats) == 1 else (f"{len(repeats)} prompts repeat", "them")
        warnings.warn(
            f"{prompts} the text of an earlier one; equal texts count as one prompt in splits and intervals; --deduplicate "
            f"drops {them}",
            SpecstopWarning,
            stacklevel=3,
        )
