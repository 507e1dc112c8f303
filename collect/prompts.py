"""Prompts: reading them from files, pipes and data sets, samples of prompts, chat templates, and token ids.

Several texts of one prompt are samples: they share the id of the prompt and differ in the name of the sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..policies.arguments import as_list, check_limits
from ..policies.errors import InputError, SpecstopWarning, TraceError, close_match
from ..policies.files import SURROGATE, is_text, strict_loads
from .schema import stream_name
from .store import PROMPTS_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

Record = tuple[str, Mapping[str, Any]]
"""The place of a record ("FILE, line 3"), and its columns."""

PROMPT_COLUMNS = ("prompt", "messages", "conversations", "turns", "question")
ID_COLUMNS = ("id", "task_id", "question_id")
GROUP_COLUMNS = ("group", "category")
"""Columns that are read by default, of which the first one present is used, also in GSM8K, HumanEval and Spec-Bench."""

HUB, HUB_FORM = "hf:", "hf:organisation/name[:configuration[:split]]"
STANDARD_INPUT = "-"
BATCH_ROWS = 4096
"""Rows of a Parquet file that are read together."""


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

    Raises:
        InputError: an attribute is not a text, or has a lone surrogate.
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
            value = getattr(self, name)
            if name != "completion" and not isinstance(value, str):
                raise InputError(f"--prompts: expected a text as the {name} of prompt {self.id!a}, not {value!r:.40}")
            if not is_text(value):
                raise InputError(f"--prompts: the {name} of prompt {self.id!a} has {SURROGATE}")


def as_prompts(prompts: Prompt | str | Sequence[Prompt | str]) -> list[Prompt]:
    """Return prompts; a text becomes a prompt with its index as the id.

    Raises:
        InputError: there is no prompt, or an item is neither a text nor a `Prompt`; see also `check_distinct`.
    """
    items = as_list(prompts, Prompt)
    converted = [Prompt(str(at), item) if isinstance(item, str) else item for at, item in enumerate(items)]
    if not converted or not all(isinstance(item, Prompt) for item in converted):
        raise InputError(
            "--prompts: expected at least one text, or a list of Prompt(id, text) as read_prompts returns it"
        )
    check_distinct(converted)
    return converted


def read_prompts(
    source: str | Path, limit: int | None = None, *, column: str | None = None, completion: str | None = None
) -> list[Prompt]:
    """Read prompts from a JSON (Lines), CSV, Parquet or .txt file, a data set, or a pipe; see `read_records`.

    A record without an id gets the hash of its prompt as id. Columns `sample` and `prompt_id` name samples of a prompt;
    see `prompt_and_sample`. Blank lines are skipped. The source is read as far as `limit` requires.

    Args:
        source: of the prompts.
        limit: maximum number of prompts.
        column: column of the prompt: a text, a list of turns, or chat messages; default: `PROMPT_COLUMNS`.
        completion: column of an answer, which is read only if it is named.

    Raises:
        InputError: the source is missing or empty, or a record is invalid; the message says where. Also if two records
            have the same id and sample, or the same id and different texts.

    Warns:
        SpecstopWarning: prompts with different ids have equal texts.
    """
    check_limits(limit=limit)
    columns = (column,) if column else PROMPT_COLUMNS
    prompts = [
        _parse_record(record, columns, completion, where)
        for where, record in itertools.islice(read_records(source, columns[0]), limit)
    ]
    if not prompts:
        name = "standard input" if os.fspath(source) == STANDARD_INPUT else source
        raise InputError(f'--prompts: {name} is empty; expected one JSON object with a "prompt" a line')
    check_distinct(prompts)
    ids: dict[tuple[str, str], str] = {}
    repeats = {p.id for p in prompts if ids.setdefault((p.system, p.text), p.id) != p.id}
    if repeats:
        warnings.warn(
            f"{len(repeats)} of {len(prompts)} prompts repeat the text of an earlier one; equal texts count as one prompt "
            "in splits and intervals",
            SpecstopWarning,
            stacklevel=2,
        )
    return prompts


def _parse_record(record: Mapping[str, Any], columns: Sequence[str], completion: str | None, where: str) -> Prompt:
    """Return the prompt of a record; arguments as of `read_prompts`, `columns` in order of preference."""
    name = next((name for name in columns if record.get(name) is not None), columns[0])
    if name not in record:
        raise InputError(
            f'--prompts: {where}: expected an object with a non-empty string "{name}", but it has '
            f"{', '.join(map(str, record)) or 'nothing'}{close_match(name, map(str, record))}; name another with --column"
        )
    try:
        system, text = prompt_text(record[name])
    except ValueError as error:
        raise InputError(
            f'--prompts: {where}: expected an object with a non-empty string "{name}", or turns or messages in it, '
            f"got {error}"
        ) from None
    # The column of the prompt or of its answer may have one of these names.
    prompt_id, sample = (
        None if other in (name, completion) else record.get(other) for other in ("prompt_id", "sample")
    )
    text_hash = hashlib.blake2b((f"{system}\0{text}" if system else text).encode("utf-8", "replace"), digest_size=8)
    id, sample = prompt_and_sample(_first(record, ID_COLUMNS), prompt_id, sample, text_hash.hexdigest())
    answer = None if completion is None else record.get(completion)
    if isinstance(answer, list) and answer and all(type(token) is int for token in answer):
        answer = tuple(answer)
    elif completion is not None and not (isinstance(answer, str) and answer):
        raise InputError(
            f'--completions: {where}: expected a non-empty string "{completion}", or a list of token ids in it'
        )
    group = _first(record, GROUP_COLUMNS)
    return Prompt(id, text, "" if group is None else str(group), answer, system, sample=sample)


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of these columns that has one, or None."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def prompt_text(value: Any) -> tuple[str, str]:
    """Return the system message and the prompt text of a value.

    Args:
        value: a text, a list of turns, or a list of messages with keys role and content, or from and value (ShareGPT).
            The first turn or the first user message is the prompt. Contents may be lists of text parts.

    Raises:
        ValueError: the value has another form or no text; the message describes it.
    """
    is_list_of_objects = isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    if not is_list_of_objects or all("type" in item and "content" not in item for item in value):
        is_turns = isinstance(value, list) and not is_list_of_objects
        return "", _content(value[0] if is_turns and value else value)
    roles = [str(message.get("role", message.get("from"))) for message in value]
    user = next((at for at, role in enumerate(roles) if role in ("user", "human")), None)
    if user is None:
        raise ValueError(f"messages of {', '.join(dict.fromkeys(roles))}, none of them of role user")
    contents = [message.get("content", message.get("value")) for message in value]
    return _content(contents[roles.index("system")]) if "system" in roles else "", _content(contents[user])


def _content(value: Any) -> str:
    """Return a text, or the texts of a list of parts joined by newlines. Raises `ValueError` for anything else."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"a value of type {type(value).__name__}" if value else "an empty value")
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in value]
    kinds = [str(part.get("type")) if isinstance(part, Mapping) else "text" for part in value]
    if not {*kinds} <= {"text", "input_text"} or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"parts of type {', '.join(kinds)}; only parts with a text are supported")
    return "\n".join(texts)


def prompt_and_sample(record_id: Any, prompt_id: Any, sample: Any, default: str) -> tuple[str, str]:
    """Return (prompt id, sample) of a record; the sample is "" if the record names none.

    Args:
        record_id: id of the record, or None. It names the sample if `prompt_id` names the prompt.
        prompt_id: id of the prompt that the record is a sample of, or None.
        sample: name of the sample, or None.
        default: prompt id of a record without ids.
    """
    record_id, prompt_id, sample = ("" if value is None else str(value) for value in (record_id, prompt_id, sample))
    if not prompt_id:
        return record_id or default, sample
    return prompt_id, sample or (record_id if record_id != prompt_id else "")


def sample_text(prompt_id: str, sample: str) -> str:
    """Return the name of a text in messages: its prompt, and the sample if there is one."""
    return f"sample {sample!r} of prompt {prompt_id!r}" if sample else f"prompt {prompt_id!r}"


def check_distinct(prompts: Sequence[Prompt]) -> None:
    """Raise `InputError` if two prompts have the same id and sample, or the same id and different texts."""
    first: dict[str, Prompt] = {}  # by id
    numbers: dict[str, int] = {}  # by stream name
    for number, prompt in enumerate(prompts, 1):
        other = first.setdefault(prompt.id, prompt)
        if (other.system, other.text) != (prompt.system, prompt.text):
            raise InputError(
                f"--prompts: prompt number {number}: expected the text of the earlier prompt with the id {prompt.id!r}, got "
                "another text; use another id or prompt_id, or `group` for related prompts"
            )
        if (earlier := numbers.setdefault(prompt.stream_name, number)) != number:
            raise InputError(
                f"--prompts: {sample_text(prompt.id, prompt.sample)} appears twice, as prompts number {earlier} and "
                f"{number}; remove repeated records, or name the samples of a prompt in a column `sample`"
            )


def read_records(
    source: str | Path, text_column: str = "prompt", columns: Collection[str] | None = None
) -> Iterator[Record]:
    """Yield the records of a source lazily.

    Args:
        source: a file of JSON Lines or of a JSON array; a .txt file with a prompt per line; a .csv or .parquet file; a
            folder with a data set; `hf:organisation/name[:configuration[:split]]`; or `-` (standard input) or another
            pipe, which is JSON if it begins with a brace or a bracket, and otherwise has a prompt per line.
        text_column: column of lines of plain text.
        columns: that are read of a Parquet file; None = all.

    Raises:
        InputError: the source does not exist, or a record is invalid; the message says where.
    """
    name, path = os.fspath(source), Path(source)
    if name.startswith(HUB) or os.path.isdir(name):  # unlike `Path.is_dir`, False for a name that is too long
        return ((f"{name}, row {number}", row) for number, row in enumerate(_data_set(name), 1))
    if name != STANDARD_INPUT and not os.path.exists(name):
        raise InputError(
            f"--prompts: expected a JSON Lines file, .txt, .csv, .parquet, a folder with a data set, -, or {HUB_FORM}, "
            f"but {name} does not exist or is no file"
        )
    if is_stream(name):
        return _json_records("standard input" if name == STANDARD_INPUT else name, read_lines(path), text_column)
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return ((where, {text_column: line}) for where, line in read_lines(path))
    if suffix in (".csv", ".parquet"):
        rows = _table_rows(path, suffix == ".csv", columns)
        return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))
    return _json_records(name, read_lines(path))


def is_stream(source: str) -> bool:
    """Whether a source is standard input or another pipe, which can be read only once."""
    is_pipe = os.path.exists(source) and not (os.path.isfile(source) or os.path.isdir(source))
    return source == STANDARD_INPUT or source.startswith("/dev/") or is_pipe


def read_lines(path: Path, option: str = "--prompts") -> Iterator[tuple[str, str]]:
    """Yield (place, line) of the lines that are not blank. Only a newline ends one: U+2028 may occur in a string."""
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    try:
        standard: Any = getattr(sys.stdin, "buffer", None) or io.BytesIO()  # None if it is closed
        with contextlib.nullcontext(standard) if str(path) == STANDARD_INPUT else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if line := raw.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    yield f"{name}, line {number}", line
    except UnicodeDecodeError as error:
        raise InputError(f"{option}: {name} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise InputError(f"{option}: {name} cannot be read: {error.strerror or error}") from None


def _json_records(name: str, lines: Iterator[tuple[str, str]], text_column: str | None = None) -> Iterator[Record]:
    """Yield the records of JSON Lines or of a JSON array; with `text_column`, other lines are prompts."""
    first = next(lines, ("", ""))
    lines = itertools.chain([first], lines) if first[1] else iter(())
    parsed: Iterable[tuple[str, Any]]
    if first[1].startswith("["):
        items = _parse_json(name, "\n".join(line for _, line in lines))
        parsed = ((f"{name}, item {number}", item) for number, item in enumerate(items, 1))
    elif text_column and not first[1].startswith("{"):
        parsed = ((where, {text_column: line}) for where, line in lines)
    else:
        parsed = ((where, _parse_json(where, line)) for where, line in lines)
    for where, record in parsed:
        if not isinstance(record, dict):
            raise InputError(f'--prompts: {where}: expected an object with a "prompt", not {type(record).__name__}')
        yield where, record


def _parse_json(where: str, text: str) -> Any:
    try:
        return strict_loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--prompts: {where}: invalid JSON: {error}") from None


def _table_rows(path: Path, is_csv: bool, columns: Collection[str] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a CSV or Parquet file, with a few thousand rows in memory at a time."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        batches: Any
        if is_csv:
            quoted = csv.ParseOptions(newlines_in_values=True)  # prompts have lines
            # The columns must be known before the file is read as text, so it is opened twice.
            names = csv.open_csv(path, parse_options=quoted).schema.names
            text = csv.ConvertOptions(column_types={name: pa.string() for name in names})  # "12" is a prompt too
            batches = csv.open_csv(path, parse_options=quoted, convert_options=text)
        else:
            file = parquet.ParquetFile(path)
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            batches = file.iter_batches(BATCH_ROWS, columns=names)
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"it has several columns {repeated[0]!r}; rename all but one")
        for batch in batches:
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # Python has no date after the year 9999
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"--prompts: {path} cannot be read as {path.suffix.lower()}: {reason[0]}") from None


def _data_set(name: str) -> Any:
    """Load a data set from the hub or a folder: files that `load_dataset` reads, or what `save_to_disk` wrote."""
    import datasets

    folder, configuration, split = Path(name), None, None
    path: str | None = str(folder.absolute())  # the relative path "data" could be the name of a data set on the hub
    if name.startswith(HUB):
        parts = [part or None for part in name.removeprefix(HUB).split(":", 2)]
        path, configuration, split = [*parts, None, None][:3]
        if not path or path.count("/") > 1:
            raise InputError(f"--prompts: expected {HUB_FORM}, not {name!r}")
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded: Any = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(path, configuration, split=split)
    except Exception as error:  # of many unrelated classes: offline, no such name, no such split, no data files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"--prompts: no data set can be read from {name}: {reason}") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if "train" not in loaded and len(loaded) > 1:
        raise InputError(
            f"--prompts: {name} has the splits {', '.join(loaded)}; name one of them: {HUB_FORM}, or a file of the folder"
        )
    return loaded["train" if "train" in loaded else next(iter(loaded))]


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


def tokenize_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
    max_prompt_tokens: int,
    skip_long: bool = True,
) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts that the models can read, and the token ids of each.

    Args:
        prompts: to be read.
        tokenizer: of the pair.
        max_prompt_tokens: what the models read, less the new tokens and the depth.
        skip_long: leave longer prompts out with a `SpecstopWarning`; otherwise they are an error.

    Raises:
        InputError: `max_prompt_tokens` is below 1, a prompt has no tokens, or no prompt is left.
    """
    from ..decode.prompts import warn_two_bos  # imports transformers

    if tokenizer is None:
        raise InputError("the pair has no tokenizer to read prompts with")
    if max_prompt_tokens < 1:
        raise InputError("--max-new-tokens: leaves no room for a prompt in what this pair can read; lower it")
    encoded = [list(tokenizer(p.text, add_special_tokens=not p.templated)["input_ids"]) for p in prompts]
    pairs = list(zip(prompts, encoded, strict=True))
    if empty := [prompt.id for prompt, ids in pairs if not ids]:
        raise InputError(f"--prompts: prompt {empty[0]!r} has 0 tokens; expected 1 to {max_prompt_tokens}")
    warn_two_bos(encoded, tokenizer)
    kept = [(prompt, ids) for prompt, ids in pairs if len(ids) <= max_prompt_tokens]
    if len(kept) < len(pairs):
        longer = [f"{prompt.id!r} has {len(ids)}" for prompt, ids in pairs if len(ids) > max_prompt_tokens]
        named = ", ".join(longer[:5]) + (", ..." if len(longer) > 5 else "")
        text = f"{len(longer)} of {len(prompts)} prompts have more than {max_prompt_tokens} tokens ({named})"
        if not skip_long or not kept:
            raise InputError(f"--prompts: {text}; that is what the pair reads, less --max-new-tokens and --depth")
        warnings.warn(f"{text} and are left out", SpecstopWarning, stacklevel=2)
    return [prompt for prompt, _ in kept], [ids for _, ids in kept]


def select_evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items at even distances, or all."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def prompts_json(prompts: Sequence[Prompt]) -> str:
    """Return the contents of `prompts.jsonl` of a trace: one prompt per line."""
    return "".join(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in prompts)


def stored_prompts(folder: Path) -> list[Prompt]:
    """Return the prompts stored in the folder of a run.

    A resumed run uses them, because a chat template may insert the date, and a pipe can be read only once.

    Raises:
        TraceError: the file is missing or damaged.
    """
    path = folder / PROMPTS_FILE
    try:
        fields = [json.loads(line) for _, line in read_lines(path)]
        answers = [
            tuple(one["completion"]) if isinstance(one["completion"], list) else one["completion"] for one in fields
        ]
        return [Prompt(**{**one, "completion": answer}) for one, answer in zip(fields, answers, strict=True)]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"--resume: {path} is damaged ({error}); collect the trace again") from None
