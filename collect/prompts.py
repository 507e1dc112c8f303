"""Prompts from JSON Lines: `prompt`, and optionally `id` and `group` (or `category`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..policies.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """One prompt: an id unique in its file, the text, and the group it is reported under."""

    id: str
    text: str
    group: str = ""


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a JSON Lines file.

    A record without an id is known by the hash of its prompt. Blank lines are skipped.

    Raises:
        InputError: the file is missing or empty, or a line is not what is expected; the message gives its number.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"--prompts: expected a JSON Lines file, but {file} does not exist or is no file")
    if limit is not None and limit < 1:
        raise InputError(f"--limit: expected 1 or more, not {limit}")
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts: {file} is not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _prompt(line, f"{file}, line {number}")
        if prompt.id in seen:
            raise InputError(f"--prompts: {file}, line {number}: id {prompt.id!r} stands in line {seen[prompt.id]} too")
        seen[prompt.id] = number
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise InputError(f'--prompts: {file} is empty; expected one JSON object with a "prompt" a line')
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"--prompts: {where}: invalid JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise InputError(f'--prompts: {where}: expected an object with a non-empty string "prompt"')
    text = record["prompt"]
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError(f"--prompts: {where}: the prompt has half a surrogate pair, which is no text")
    name = record.get("id")
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if name is None else str(name)
    group = record.get("group", record.get("category"))
    return Prompt(name, text, "" if group is None else str(group))


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, room: int) -> list[list[int]]:
    """Return the token ids of each prompt.

    Raises:
        InputError: a prompt has no token, or more than `room`, what the models can read beside the new tokens.
    """
    if tokenizer is None:
        raise InputError("the pair has no tokenizer to read prompts with")
    encoded = [list(tokenizer(prompt.text)["input_ids"]) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not 0 < len(ids) <= room:
            raise InputError(
                f"--prompts: prompt {prompt.id!r} has {len(ids)} tokens; expected 1 to {room} with this pair and "
                "--max-new-tokens"
            )
    return encoded
