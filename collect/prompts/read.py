"""Prompts: read from any source, split, ordered and limited the same way every time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...policies.arguments import check_limits
from ...policies.errors import InputError, close_match
from ...policies.files import SURROGATE, is_text
from .files import STANDARD_INPUT, records
from .messages import prompt_text
from .presets import PLAIN, Layout, find_preset
from .samples import DistinctPrompts, SampleNames, warn_equal_texts, warn_sample_ids
from .tokens import Prompt as Prompt, apply_chat_template as apply_chat_template, encode as encode, fit as fit

SIDES = ("train", "test")
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Columns:
    """Which columns to read, in the place of a layout's own; and the column of answers, which is read only if named."""

    prompt: str | None = None
    group: str | None = None
    completion: str | None = None


@dataclass(frozen=True)
class Choice:
    """Which prompts of a source are taken, in this order: each once, those of one side, shuffled, the first few.

    The side depends on the prompt's text and a seed, so that samples of a prompt, and equal texts
    under several ids, are on the same side. The shuffled order depends on ids, samples and a seed. Neither depends on the
    order of the source.

    Attributes:
        deduplicate: drop prompts that repeat the text of an earlier one under another id, or without a sample name.
        side: "train" or "test"; None = both.
        test_share: of the prompts that go to the test side.
        split_seed: of the sides.
        shuffle_seed: of the order; None = that of the source.
        limit: at most so many.
    """

    deduplicate: bool = False
    side: str | None = None
    test_share: float = TEST_SHARE
    split_seed: int = 0
    shuffle_seed: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        check_limits(**vars(self))
        if self.side not in (None, *SIDES):
            raise InputError(f"--side: expected train or test, not {self.side!r}{close_match(str(self.side), SIDES)}")

    def takes(self, prompt: Prompt) -> bool:
        """Return whether the prompt is on the requested side, which its text decides."""
        if self.side is None:
            return True
        # Without the system message, which is only read under a chat template: equal token ids are on one side.
        fraction = _fraction(self.split_seed, "side", prompt.text)
        return (fraction < self.test_share) == (self.side == "test")


def read_prompts(
    source: str | Path,
    limit: int | None = None,
    *,
    preset: str | None = None,
    split: str | None = None,
    columns: Columns = Columns(),
    choice: Choice | None = None,
) -> list[Prompt]:
    """Read prompts from a JSON (Lines), CSV or Parquet file, a .txt file, a data set folder, a pipe, or `hf:name[:config]`.

    A record without an id gets the hash of its prompt as id. Columns `sample`, or `prompt_id`, separate samples of one prompt
    apart; see `SampleNames`. Blank lines are skipped. Nothing is read past what `limit` needs.

    Issues a `SpecstopWarning` if prompts with different ids have equal texts, or if ids look like samples of prompts.

    Args:
        source: see above.
        limit: only so many; the same as in `choice`.
        preset: name of a layout, such as "gsm8k"; by default columns are `prompt`, `id`, and `group` or `category`.
        split: of a data set; by default that of the preset, or "train".
        columns: in the place of the layout's.
        choice: which prompts are taken.

    Raises:
        InputError: the source is missing or empty, or a record is not what is expected; the message says where it is. Also
            if two records have the same id and sample, or the same id and different texts.
    """
    source = os.fspath(source)
    choice = choice if choice is not None else Choice(limit=limit)
    layout = find_preset(preset) if preset else PLAIN
    found = _taken(_prompts(source, layout, split, columns), choice)
    # By a hash of each id: a part of the prompts is in the order that it has among all.
    if choice.shuffle_seed is not None:
        seed = choice.shuffle_seed
        found = iter(sorted(found, key=lambda prompt: _fraction(seed, "order", prompt.stream_name)))
    prompts = []
    for prompt in found:
        prompts.append(prompt)
        if len(prompts) == choice.limit:
            break
    if not prompts:
        source = "standard input" if source == STANDARD_INPUT else source
        if choice.side:
            raise InputError(f"--side: no prompt of {source} is on the {choice.side} side; there are too few of them")
        raise InputError(f'--prompts: {source} is empty; expected one JSON object with a "prompt" a line')
    warn_equal_texts([p.id for p in prompts], [_text_key(p) for p in prompts])
    unnamed = [p for p in prompts if not p.sample]
    warn_sample_ids([p.id for p in unnamed], [_text_key(p) for p in unnamed])
    return prompts


def _prompts(source: str | Path, layout: Layout, split: str | None, columns: Columns) -> Iterator[tuple[str, Prompt]]:
    """Yield (place, prompt) for each record."""
    wanted = (columns.prompt,) if columns.prompt else layout.prompt
    groups = (columns.group,) if columns.group else layout.group
    completions = (columns.completion,) if columns.completion else ()
    # A column `sample` may hold the texts of samples.
    prompt_ids, samples = (
        [name for name in columns if name not in (*wanted, *completions)]
        for columns in (layout.prompt_id, layout.sample)
    )
    names = SampleNames()
    read = (*wanted, *layout.id, *groups, *prompt_ids, *samples, *completions)
    for where, record in records(source, read, split):
        system, text = _text(record, wanted, where)
        group = _first(record, groups)
        if columns.group and columns.group not in record:
            raise InputError(_no_column("--group", columns.group, record, where))
        text_hash = hashlib.blake2b((f"{system}\0{text}" if system else text).encode(), digest_size=8).hexdigest()
        record_id, prompt_id, sample = (_first(record, c) for c in (layout.id, prompt_ids, samples))
        name, sample = names.assign(record_id, prompt_id, sample, text_hash)
        completion = _completion(record, columns.completion, where) if columns.completion else None
        group_name = layout.fixed_group if group is None else str(group)
        _check_text("id", name, where)
        _check_text("group", group_name, where)
        _check_text("sample", sample, where)
        yield where, Prompt(name, text, group_name, completion, system, sample=sample)


def _taken(records: Iterable[tuple[str, Prompt]], choice: Choice) -> Iterator[Prompt]:
    """Yield the prompts that are taken; ids and samples must be unique, and the text of an id the same in all its samples."""
    distinct = DistinctPrompts()
    ids: dict[tuple[str, str], str] = {}  # id by text
    for where, prompt in records:
        text = _text_key(prompt)
        if choice.deduplicate and ids.setdefault(text, prompt.id) != prompt.id:
            continue
        if distinct.add(prompt.id, prompt.sample, text, where, choice.deduplicate) and choice.takes(prompt):
            yield prompt


def _text_key(prompt: Prompt) -> tuple[str, str]:
    """Return what makes two prompts the same: system message and text."""
    return prompt.system, prompt.text


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first of these columns that holds something, or None."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def _text(record: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, str]:
    """Return (system message, text) of a record; see `prompt_text`."""
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None and not any(name in record for name in names):
        raise InputError(_no_column("--column", names[0], record, where))
    try:
        system, text = ("", "") if name is None else prompt_text(record[name])
    except ValueError as error:
        raise InputError(
            f'--prompts: {where}: expected an object with a string "{name}", or turns or messages in it, got {error}'
        ) from None
    if not text:
        raise InputError(f'--prompts: {where}: expected an object with a non-empty string "{name or names[0]}"')
    _check_text("prompt", text + system, where)
    return system, text


def _completion(record: Mapping[str, Any], name: str, where: str) -> str | tuple[int, ...]:
    """Return an answer: its text, or its token ids."""
    value = record.get(name)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    if not isinstance(value, str) or not value:
        raise InputError(f'--completions: {where}: expected a non-empty string "{name}", or a list of token ids')
    _check_text("completion", value, where)
    return value


def _check_text(what: str, text: str, where: str) -> None:
    if not is_text(text):
        raise InputError(f"--prompts: {where}: the {what} has {SURROGATE}")


def _no_column(option: str, name: str, record: Mapping[str, Any], where: str) -> str:
    names = ", ".join(map(str, record)) or "nothing"
    return (
        f'--prompts: {where}: expected an object with a non-empty string "{name}", but it has {names}'
        f"{close_match(name, map(str, record))}; collect takes another one with {option}"
    )


def _fraction(seed: int, purpose: str, name: str) -> float:
    """Return a number in [0, 1) that depends on the arguments alone."""
    digest = hashlib.blake2b(f"{seed} {purpose} {name}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") / 2**64)
