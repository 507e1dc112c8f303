"""Tables of the accepted length at every position of texts, by drafter, as a dense trace.

Position t of a text is the state after t of its tokens: the round that begins there proposes token t (counted from 0) and
the following ones. It is the anchor t of a trace. The first token of a text follows the prompt without a draft, so position
0 has no round and only counts for agreement.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..decode.topology import Topology, chain, with_drafters
from ..policies.arguments import MAX_ROWS, check_limits
from ..policies.contract import Array
from ..policies.errors import InputError, close_match
from ..policies.features import AGREEMENT_WEIGHT
from ..policies.files import SURROGATE, is_text, prepare_output_dir, staged_folder
from ..policies.registry import NAME
from .prompts import read_records, sample_text
from .schema import MAX_COUNT, UNKNOWN, Header, PromptTask, first_drafters, parents
from .store import Trace, load_trace, open_for_writing, write_shard

SUFFIXES = (".parquet", ".csv", ".jsonl")

KEYS = ("id", "prompt_tokens", "tokens", "group", "sample")
"""What the columns of a table hold besides lengths; the last two are optional."""

_SIGNALS = ("agreement_run", "agreement_rate")


def import_table(
    path: str | Path,
    out: str | Path,
    lengths: Mapping[str, str],
    *,
    columns: Mapping[str, str] | None = None,
    bonus: bool = False,
    free: Collection[str] = (),
    depth: int | None = None,
    target: str = "",
    overwrite: bool = False,
) -> Trace:
    """Turn a table of accepted lengths into a dense trace, on which fixed lengths and routing policies can be replayed.

    The table has a row for each text, which the target decoded greedily. The trace has no features of draft models. Its
    candidates are the tokens of the text where they were accepted, and unknown elsewhere.

    Args:
        path: a Parquet file, JSON Lines, or CSV with lists as JSON. A row has a list of token ids, and for each drafter a
            list of the same length: the number of tokens that it proposes at each position and the target accepts.
        out: folder of the trace.
        lengths: by name of a drafter, the column of its accepted lengths.
        columns: names of the columns of `KEYS` that are called otherwise: id and number of tokens of the prompt, token ids
            of the text, group, and name of the sample if a prompt has several texts.
        bonus: lengths include the token that the target adds in each round.
        free: drafters that read nothing before a round and could propose at each position, such as lookup. The features
            agreement_run and agreement_rate are recorded for them.
        depth: of the trace; longer lengths are cut. Default: the largest length.
        target: name for the header.
        overwrite: replace an older result in `out`.

    Raises:
        InputError: the table is missing or malformed (the message names the row), an argument contradicts it, or as
            `prepare_output_dir`.
    """
    file = Path(path)
    check_limits({"depth": 1}, depth=depth)
    _check_names(lengths, columns or {}, free)
    prepare_output_dir(out, overwrite=overwrite, inputs=[file])
    texts = _read_texts(file, list(lengths.values()), columns or {}, bonus)
    whole = [text for text in texts if len(text.tokens) > 1]
    if not whole:
        raise InputError(f"{file}: expected at least one text of two tokens or more, which has an anchor")
    deepest = max(int(text.accepted[:, 1:].max()) for text in whole)
    if not deepest:
        raise InputError(f"{file}: no token was accepted after the first one of a text, so there is nothing to replay")
    deepest = min(deepest, depth or deepest)
    if deepest * len(lengths) >= MAX_ROWS:
        most_depth = (MAX_ROWS - 1) // len(lengths)
        raise InputError(f"--depth: expected at most {most_depth} with {len(lengths)} drafters, not {deepest}")
    tree, is_free = with_drafters(chain(deepest), len(lengths)), np.array([name in free for name in lengths])
    facts: dict[str, Any] = {
        "drafter": "+".join(lengths),
        "reading": ["nothing" if name in free else "path" for name in lengths],
        "prompts from": file.name,
    }
    if left_out := len(texts) - len(whole):
        facts["prompts left out"] = f"{left_out} of {len(texts)}, with texts of less than two tokens"
    largest = max(int(text.tokens.max()) for text in whole)
    header = Header(
        target=target, draft=facts["drafter"], pair={}, vocabulary=largest + 1, eos=(), temperature=0.0,
        topology=parents(tree), features=(), anchor_features=(), max_new_tokens=max(len(text.tokens) for text in whole),
        seed=0, shards=1, prompts=len(whole), prompts_hash="", drafters=first_drafters(tree),
        signals=_SIGNALS if is_free.any() else (), facts=facts,
    )  # fmt: skip
    with staged_folder(out) as stage:
        open_for_writing(stage, header)
        write_shard(stage, header, 0, [text.columns(at, tree, is_free) for at, text in enumerate(whole)])
    return load_trace(out)


def _read_texts(file: Path, lengths: list[str], columns: Mapping[str, str], bonus: bool) -> list[_Text]:
    """Return the texts of a table, with distinct names; see `import_table` for the columns of `lengths` and the others.

    Raises:
        InputError: a column is missing, a row is malformed, or two texts have one name.
    """
    names = {key: key for key in KEYS} | dict(columns)
    required, present = [*(names[key] for key in KEYS[:3]), *lengths], set[str]()

    def check_columns(where: str, expected: Collection[str], found: Collection[str]) -> None:
        if (missing := next((column for column in expected if column not in found), None)) is not None:
            raise InputError(
                f"{where}: expected a column {missing!r}{close_match(missing, found)}, but it has "
                f"{', '.join(sorted(found)) or 'none'}; name others with --column and --lengths"
            )

    if file.suffix not in SUFFIXES or not file.is_file():
        raise InputError(
            f"source: expected a table ({', '.join(SUFFIXES)}), but {file} does not exist or is no such file"
        )
    texts = []
    try:
        for where, row in read_records(file, columns={*names.values(), *lengths}):
            check_columns(where, required, row)
            present |= row.keys()
            texts.append(_Text.parse(row, names, lengths, bonus, where))
    except InputError as error:
        raise InputError(error.command_line.removeprefix("--prompts: ")) from None
    if texts:
        check_columns(str(file), [names[key] for key in columns], present)
    if len({(text.id, text.sample) for text in texts}) < len(texts):  # ids may be distinct within each group only
        texts = [dataclasses.replace(text, id=f"{text.group}/{text.id}") for text in texts]
    counts = Counter((text.id, text.sample) for text in texts)
    if (most := counts.most_common(1)) and most[0][1] > 1:
        name = sample_text(*most[0][0])
        raise InputError(
            f"{file}: expected distinct ids, got {name} twice; a prompt's samples need --column sample=NAME"
        )
    return texts


def _check_names(lengths: Mapping[str, str], columns: Mapping[str, str], free: Collection[str]) -> None:
    """Raise `InputError` if a name of a drafter or of a column is invalid."""
    for name in lengths:
        if not NAME.fullmatch(name):
            raise InputError(f"--lengths: expected NAME=COLUMN with letters, digits, - and _ in the name, not {name!r}")
    if unknown := next((name for name in free if name not in lengths), None):
        raise InputError(
            f"--free: expected one of {', '.join(lengths)}, not {unknown!r}{close_match(unknown, lengths)}"
        )
    if unknown := next((key for key in columns if key not in KEYS), None):
        raise InputError(f"--column: expected one of {', '.join(KEYS)}, not {unknown!r}{close_match(unknown, KEYS)}")


@dataclass(frozen=True)
class _Text:
    """A row of a table.

    Attributes:
        id, sample, group: see `PromptTask`.
        prompt_tokens: number of tokens of the prompt.
        tokens: [T] int64 token ids.
        accepted: [D, T] int64, accepted length by drafter and position, cut at the end of the text.
    """

    id: str
    sample: str
    group: str
    prompt_tokens: int
    tokens: Array
    accepted: Array

    @classmethod
    def parse(
        cls, row: Mapping[str, Any], names: Mapping[str, str], lengths: Collection[str], bonus: bool, where: str
    ) -> _Text:
        """Return the text of a row; arguments as of `import_table`. Raises `InputError` with the row's place."""
        id, sample, group = (_name(row, names[key], where) for key in ("id", "sample", "group"))
        if not id:
            raise InputError(f"{where}: expected an id in {names['id']!r}, got none")
        count = row[names["prompt_tokens"]]
        if isinstance(count, str) and count.isascii() and count.isdecimal() and len(count) < 11:
            count = int(count)  # of a CSV file
        if type(count) is not int or not 0 <= count < MAX_COUNT:
            raise InputError(f"{where}: expected a number of tokens in {names['prompt_tokens']!r}, got {count!r:.40}")
        tokens = _numbers(row, names["tokens"], 0, where)
        columns = [_numbers(row, name, int(bonus), where) - bonus for name in lengths]
        for name, values in zip(lengths, columns, strict=True):
            if len(values) != len(tokens):
                raise InputError(
                    f"{where}: expected {len(tokens)} lengths in {name!r}, one for each token, got {len(values)}"
                )
        left = len(tokens) - np.arange(len(tokens))
        return cls(id, sample, group, count, tokens, np.minimum(np.stack(columns), left))

    def columns(self, sequence: int, tree: Topology, is_free: Array) -> Mapping[str, Any]:
        """Return the rows of the text, one per anchor; `is_free` [D], the drafters with known agreement."""
        total, depths, owner = len(self.tokens), tree.depths[1:], tree.drafter_of[1:]
        anchor = np.arange(1, total)
        lengths = np.minimum(self.accepted[:, 1:], tree.deepest)  # [D, R]
        own = self.accepted[owner, 1:].T  # [R, N], the length of the drafter of each node
        accepted, last = depths <= own, anchor[:, None] + depths
        zeros = np.zeros(accepted.shape, dtype=np.float32)
        run, rate = _agreement((self.accepted[:, :-1] > 0) & is_free[:, None])
        task = PromptTask(sequence, self.id, self.group, [], sample=self.sample)
        return task.columns(len(anchor), total) | {
            "prompt_tokens": np.full(len(anchor), self.prompt_tokens),
            "anchor": anchor,
            "tokens": np.where(accepted, self.tokens[np.minimum(last - 1, total - 1)], UNKNOWN).astype(np.int32),
            **dict.fromkeys(("draft_prob", "target_prob", "overlap"), zeros),
            "accepted": accepted,
            "observed": (depths <= own + 1) & (last <= total),
            "accepted_length": lengths.max(0),
            "cut": anchor + tree.deepest > total,
            **dict(zip(_SIGNALS, (run.T, rate.T), strict=True)),
        }


def _agreement(agrees: Array) -> tuple[Array, Array]:
    """Return agreement_run and agreement_rate [D, T] float32 after tokens that the drafters predicted or not [D, T]."""
    from scipy.signal import lfilter  # slow to import

    index = np.arange(agrees.shape[1])
    run = index - np.maximum.accumulate(np.where(agrees, -1, index), 1)
    rate = lfilter([1.0 - AGREEMENT_WEIGHT], [1.0, -AGREEMENT_WEIGHT], agrees.astype(np.float64), axis=1)
    return run.astype(np.float32), rate.astype(np.float32)


def _name(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return a name, "" if there is none."""
    value = row.get(column)
    text = "" if value is None else str(value)
    if not is_text(text):
        raise InputError(f"{where}: {column!r} has {SURROGATE}")
    return text


def _numbers(row: Mapping[str, Any], column: str, least: int, where: str) -> Array:
    """Return a list of whole numbers of at least `least` as an array."""
    values = row[column]
    if isinstance(values, str):  # of a CSV file
        try:
            values = json.loads(values)
        except (ValueError, RecursionError):
            values = None
    if not isinstance(values, list) or not all(type(n) is int and least <= n < MAX_COUNT for n in values):
        hint = ", the target's token included" if least else ""
        raise InputError(f"{where}: expected a list of whole numbers of {least} or more in {column!r}{hint}")
    return np.array(values, dtype=np.int64)
