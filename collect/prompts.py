"""Prompts: reading them from a source, chat templates, token ids, and samples of prompts.

Several texts of one prompt are samples: they share the id of the prompt and differ in the name of the sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..policies.arguments import check_limits
from ..policies.errors import InputError, SpecstopWarning, TraceError, close_match
from ..policies.files import SURROGATE, is_text
from .prompt_files import STANDARD_INPUT, lines, records
from .schema import stream_name
from .store import PROMPTS_FILE, write_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

PROMPT_COLUMNS = ("prompt", "messages", "conversations", "turns", "question")
ID_COLUMNS = ("id", "task_id", "question_id")
GROUP_COLUMNS = ("group", "category")
"""Columns that are read by default, of which the first one present is used, also in GSM8K, HumanEval and Spec-Bench."""

_SAMPLE_ID = re.compile(r"(.*(?:\d|[0-9a-f]{8}))[-_/#]\d+", re.DOTALL | re.IGNORECASE)
"""An id that looks like a sample: the id of a prompt, which ends in a number or a hash, and a number. `HumanEval/3`
does not."""

_SAMPLE_SHARE = 0.2
"""Share of all ids that must look like samples before a warning is issued."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: unique among the prompts of a run, except for samples of a prompt. Random numbers and shard depend on it.
        text: the text that the models read.
        group: under which it is reported.
        completion: an answer that came with it, as text or as token ids, or None.
        system: the system message that came with it; used under a chat template only.
        templated: `text` is the result of a chat template and has its special tokens.
        sample: name of the sample, "" if the prompt has one text. Samples of a prompt have the same id and text.
    """

    id: str
    text: str
    group: str = ""
    completion: str | tuple[int, ...] | None = None
    system: str = ""
    templated: bool = False
    sample: str = ""

    @property
    def stream_name(self) -> str:
        """Name that the random numbers of the text are keyed by; see `schema.stream_name`."""
        return stream_name(self.id, self.sample)

    def __post_init__(self) -> None:
        for name in ("id", "text", "group", "completion", "system", "sample"):
            if not is_text(getattr(self, name)):
                raise InputError(f"--prompts: the {name} of prompt {self.id!a} has {SURROGATE}")


def as_prompts(prompts: str | Sequence[Prompt | str]) -> list[Prompt]:
    """Return prompts; a text becomes a prompt with its index as the id."""
    items = [prompts] if isinstance(prompts, str) else list(prompts)
    return [Prompt(str(at), item) if isinstance(item, str) else item for at, item in enumerate(items)]


def read_prompts(
    source: str | Path,
    limit: int | None = None,
    *,
    column: str | None = None,
    group: str | None = None,
    completion: str | None = None,
    split: str | None = None,
) -> list[Prompt]:
    """Read prompts from a JSON (Lines), CSV, Parquet or .txt file, a data set, or a pipe; see `prompt_files.records`.

    A record without an id gets the hash of its prompt as id. Columns `sample` and `prompt_id` name samples of a prompt;
    see `SampleNames`. Blank lines are skipped. The source is read as far as `limit` requires.

    Args:
        source: of the prompts.
        limit: maximum number of prompts.
        column: column of the prompt: a text, a list of turns, or chat messages; default: `PROMPT_COLUMNS`.
        group: column of the group; default: `GROUP_COLUMNS`.
        completion: column of an answer, which is read only if it is named.
        split: of a data set.

    Raises:
        InputError: the source is missing or empty, or a record is invalid; the message says where. Also if two records
            have the same id and sample, or the same id and different texts.

    Warns:
        SpecstopWarning: prompts with different ids have equal texts.
    """
    check_limits(limit=limit)
    name = os.fspath(source)
    wanted = (column,) if column else PROMPT_COLUMNS
    groups = (group,) if group else GROUP_COLUMNS
    # A column `sample` may hold the texts of samples.
    other = [name for name in ("prompt_id", "sample") if name not in (*wanted, completion)]
    prompts: list[Prompt] = []
    places: list[str] = []
    names = SampleNames()
    for where, record in records(name, (*wanted, *ID_COLUMNS, *groups, *other, *filter(None, [completion])), split):
        system, text = _prompt_of(record, wanted, where)
        if group and group not in record:
            raise InputError(_no_column("--group", group, record, where))
        text_hash = hashlib.blake2b((f"{system}\0{text}" if system else text).encode(), digest_size=8).hexdigest()
        prompt_id, sample = (record.get(name) if name in other else None for name in ("prompt_id", "sample"))
        id, sample = names.assign(_first(record, ID_COLUMNS), prompt_id, sample, text_hash)
        group_value = _first(record, groups)
        group_name = "" if group_value is None else str(group_value)
        answer = _completion_of(record, completion, where) if completion else None
        _check_text(where, id=id, group=group_name, sample=sample)
        prompts.append(Prompt(id, text, group_name, answer, system, sample=sample))
        places.append(where)
        if len(prompts) == limit:
            break
    if not prompts:
        shown = "standard input" if name == STANDARD_INPUT else name
        raise InputError(f'--prompts: {shown} is empty; expected one JSON object with a "prompt" a line')
    check_distinct(prompts, places)
    _warn_equal_texts(prompts)
    return prompts


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of these columns that has one, or None."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def _prompt_of(record: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, str]:
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
    _check_text(where, prompt=text + system)
    return system, text


def _completion_of(record: Mapping[str, Any], name: str, where: str) -> str | tuple[int, ...]:
    """Return an answer: its text, or its token ids."""
    value = record.get(name)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    if not isinstance(value, str) or not value:
        raise InputError(f'--completions: {where}: expected a non-empty string "{name}", or a list of token ids')
    _check_text(where, completion=value)
    return value


def _check_text(where: str, **texts: str) -> None:
    for what, text in texts.items():
        if not is_text(text):
            raise InputError(f"--prompts: {where}: the {what} has {SURROGATE}")


def _no_column(option: str, name: str, record: Mapping[str, Any], where: str) -> str:
    names = ", ".join(map(str, record)) or "nothing"
    return (
        f'--prompts: {where}: expected an object with a non-empty string "{name}", but it has {names}'
        f"{close_match(name, map(str, record))}; collect takes another one with {option}"
    )


def prompt_text(value: Any) -> tuple[str, str]:
    """Return the system message and the prompt text of a value.

    Args:
        value: a text, a list of turns, or a list of messages with keys role and content, or from and value (ShareGPT).
            The first turn or the first user message is the prompt. Contents may be lists of text parts.

    Raises:
        ValueError: the value has another form; the message describes it.
    """
    if not isinstance(value, list):
        return "", _content(value)
    if not value:
        raise ValueError("an empty list")
    if not all(isinstance(item, Mapping) for item in value):
        return "", _content(value[0])
    if all("content" in item or "value" in item for item in value):
        roles = [str(message.get("role", message.get("from"))) for message in value]
        contents = [message["content"] if "content" in message else message["value"] for message in value]
        user = next((index for index, role in enumerate(roles) if role in ("user", "human")), None)
        if user is None:
            raise ValueError(f"only messages of {', '.join(dict.fromkeys(roles))}; a user message is required")
        return _content(contents[roles.index("system")]) if "system" in roles else "", _content(contents[user])
    if all("type" in item for item in value):
        return "", _content(value)
    names = ", ".join(map(str, value[0])) or "nothing"
    raise ValueError(f"a list of objects with {names}; messages have role and content, or from and value")


def _content(value: Any) -> str:
    """Return a text, or the texts of a list of parts joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(_kind(value))
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in ("text", "input_text"):
            raise ValueError(f"a part of type {kind!r}; only parts of type text are supported, remove such prompts")
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"a part with {_kind(text)} as its text")
        texts.append(text)
    return "\n".join(texts)


def _kind(value: Any) -> str:
    """Return a description of a value's type for messages."""
    if isinstance(value, list):
        return f"a list of {type(value[0]).__name__}" if value else "an empty list"
    return f"a value of type {type(value).__name__}" if not isinstance(value, Mapping) else "an object"


class SampleNames:
    """Assigns prompt ids and sample names to records, and numbers the records of a prompt that name no sample."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def assign(self, record_id: Any, prompt_id: Any, sample: Any, default: str) -> tuple[str, str]:
        """Return (prompt id, sample) of a record; the sample is "" if the record names neither a prompt nor a sample.

        Args:
            record_id: id of the record, or None. It names the sample if `prompt_id` names the prompt.
            prompt_id: id of the prompt that the record is a sample of, or None.
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
    """Return the name of a text in messages: its prompt, and the sample if there is one."""
    return f"sample {sample!r} of prompt {prompt_id!r}" if sample else f"prompt {prompt_id!r}"


def check_distinct(prompts: Sequence[Prompt], places: Sequence[str]) -> None:
    """Check that no two prompts have the same id and sample, and that prompts with the same id have the same text.

    Args:
        prompts: to check.
        places: of each prompt, for messages: "FILE, line 3".

    Raises:
        InputError: a prompt contradicts an earlier one.
    """
    first: dict[str, tuple[Prompt, str]] = {}  # by id
    earlier: dict[str, str] = {}  # places by stream name
    for prompt, place in zip(prompts, places, strict=True):
        other, other_place = first.setdefault(prompt.id, (prompt, place))
        if (other.system, other.text) != (prompt.system, prompt.text):
            raise InputError(
                f"--prompts: {place}: prompt id {prompt.id!r} appears in {other_place.rpartition(', ')[2]} too, with another "
                "text; use another prompt_id, or `group` for related prompts"
            )
        if (same := earlier.setdefault(prompt.stream_name, place)) != place:
            raise InputError(
                f"--prompts: {place}: {sample_text(prompt.id, prompt.sample)} appears in {same.rpartition(', ')[2]} too; "
                "remove repeated records, or name the samples of a prompt in a column `sample`"
            )


def warn_sample_ids(ids: Sequence[str]) -> None:
    """Warn if ids of texts look like samples of prompts, such as `q1-0` and `q1-1`."""
    members: dict[str, set[str]] = defaultdict(set)
    for name in ids:
        if match := _SAMPLE_ID.fullmatch(name):
            members[match[1]].add(name)
    alike = [sorted(names) for names in members.values() if len(names) > 1]
    count = sum(map(len, alike))
    if alike and count >= _SAMPLE_SHARE * len(ids):
        warnings.warn(
            f"{count} of {len(ids)} ids look like samples of prompts ({alike[0][0]!r}, {alike[0][1]!r}), but each id counts "
            "as a separate prompt in splits and intervals; if they are samples, add a column `prompt_id` or `sample`",
            SpecstopWarning,
            stacklevel=3,
        )


def _warn_equal_texts(prompts: Sequence[Prompt]) -> None:
    first: dict[tuple[str, str], str] = {}
    repeats = {p.id for p in prompts if first.setdefault((p.system, p.text), p.id) != p.id}
    if repeats:
        count = "1 prompt repeats" if len(repeats) == 1 else f"{len(repeats)} prompts repeat"
        warnings.warn(
            f"{count} the text of an earlier one; equal texts count as one prompt in splits and intervals",
            SpecstopWarning,
            stacklevel=3,
        )


def apply_chat_template(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None) -> list[Prompt]:
    """Return the prompts as the model's chat template writes them, up to the beginning of the answer.

    Raises:
        InputError: the tokenizer has no chat template, or the template refuses a prompt.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError("--chat: the tokenizer has no chat template; leave --chat out, or use a chat model")
    rendered = []
    for prompt in prompts:
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages = [*system, {"role": "user", "content": prompt.text}]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise errors of any class
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"--chat: the chat template refuses prompt {prompt.id!r}: {line}") from None
        rendered.append(dataclasses.replace(prompt, text=str(text), templated=True))
    return rendered


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, room: int) -> list[list[int]]:
    """Return the token ids of each prompt; a prompt of more than `room` tokens is an error, see `fit`."""
    return fit(prompts, tokenizer, room, "refuse")[1]


def fit(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, room: int, long: str = "skip"
) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts that the models can read, and the token ids of each.

    Args:
        prompts: to be read.
        tokenizer: of the pair.
        room: maximum number of tokens of a prompt: what the models read, less the new tokens and the depth.
        long: "skip" leaves longer ones out, with a `SpecstopWarning`; "refuse" is an error.

    Raises:
        InputError: there is no room, a prompt has no tokens, or none is left.
    """
    from ..decode.prompts import warn_two_bos  # imports transformers

    if tokenizer is None:
        raise InputError("the pair has no tokenizer to read prompts with")
    if long not in ("skip", "refuse"):
        raise InputError(f"--long: expected skip or refuse, not {long!r}")
    if room < 1:
        raise InputError("--max-new-tokens: leaves no room for a prompt in what this pair can read; lower it")
    encoded = [list(tokenizer(p.text, add_special_tokens=not p.templated)["input_ids"]) for p in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise InputError(f"--prompts: prompt {prompt.id!r} has 0 tokens; expected 1 to {room}")
    warn_two_bos(encoded, tokenizer)
    longer = [f"{p.id!r} has {len(ids)}" for p, ids in zip(prompts, encoded, strict=True) if len(ids) > room]
    if not longer:
        return list(prompts), encoded
    named = ", ".join(longer[:5]) + (", ..." if len(longer) > 5 else "")
    text = f"{len(longer)} of {len(prompts)} prompts have more than {room} tokens ({named})"
    kept = [(prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True) if len(ids) <= room]
    if long == "refuse" or not kept:
        raise InputError(f"--prompts: {text}; that is what the pair reads, less --max-new-tokens and --depth")
    warnings.warn(f"{text} and are left out", SpecstopWarning, stacklevel=2)
    return [prompt for prompt, _ in kept], [ids for _, ids in kept]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items at even distances, or all."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def prompts_json(prompts: Sequence[Prompt]) -> str:
    """Return the contents of `prompts.jsonl` of a trace: one prompt per line."""
    return "".join(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in prompts)


def share_prompts(folder: Path, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Store the prompts of a run unless another process has stored them, and return the stored ones."""
    write_once(folder / PROMPTS_FILE, prompts_json(prompts))
    return stored_prompts(folder)


def stored_prompts(folder: Path) -> list[Prompt]:
    """Return the prompts stored in the folder of a run.

    A resumed run uses them, because a chat template may insert the date, and a pipe can be read only once.

    Raises:
        TraceError: the file is missing or damaged.
    """
    path = folder / PROMPTS_FILE
    try:
        raw = [json.loads(line) for _, line in lines(path)]
        answers = (
            tuple(one["completion"]) if isinstance(one["completion"], list) else one["completion"] for one in raw
        )
        return [Prompt(**{**one, "completion": answer}) for one, answer in zip(raw, answers, strict=True)]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"--resume: {path} is damaged ({error}); collect the trace again") from None
