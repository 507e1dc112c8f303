"""Profiles from tables of measured calls, such as those of a GPU on which specstop does not run.

The table is a CSV file with the columns `part,requests,tokens,context,ms` and optionally `error`:

| part | a row is | tokens |
|---|---|---|
| target | a call of the target for `requests` requests | read in all, one anchor a request included |
| draft | a draft step of `requests` requests | empty |
| first draft | the first draft step of a round, if it costs more: that of a drafter that proposes a block | empty |
| outside | the rest of a round of `requests` requests | empty |
| cache | what each token in the caches adds to a call of the target | empty |
| prefill | reading a prompt | of the prompt |

Empty `requests` and `context` stand for any number. `context` is the tokens in the cache of each request. Between rows of one
`requests` a call is linear in the tokens, so that a jump, as from padding to recorded graphs, is two adjacent rows. Costs may
fall with the tokens: a chain is then extended to the cheaper size. In the context a call is a line, fitted by least squares.
`error` is the standard error of `ms`; of rows that differ in `ms` alone it is that of their mean.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .arguments import check_limits
from .contract import Array
from .costs import MAX_CONTEXT, MAX_S, MAX_STREAMS, MIN_CALL_S, read_curve
from .errors import InputError
from .measurements import (
    BATCH_DRAFTS,
    BATCH_FIRST,
    BATCH_VERIFY,
    CONTEXTS,
    FIRST,
    LATER,
    LOST_BLOCKS,
    MAX_COUNT,
    OUTSIDE,
    PLAIN,
    PREFILL,
    VERIFY,
    Key,
    merge_repetitions,
)
from .profile import Profile

COLUMNS = ("part", "requests", "tokens", "context", "ms")
TARGET, DRAFT, FIRST_DRAFT, CACHE = "target", "draft", "first draft", "cache"
TABLE_PARTS = (TARGET, DRAFT, FIRST_DRAFT, OUTSIDE, CACHE, PREFILL)

REPETITIONS = 16
"""Repetitions that stand for a value with an error."""

_DRAWN = REPETITIONS - LOST_BLOCKS
_SCORES = np.array([NormalDist().inv_cdf((at + 0.5) / REPETITIONS) for at in range(REPETITIONS)])
SCORES: Array = _SCORES * math.sqrt(_DRAWN) / _SCORES.std()
"""[16] deviations of the repetitions: their mean is 0, and that of a bootstrap draw of them has the standard deviation 1."""


def profile_from_table(
    path: str | Path, *, depth: int = 10, batch: Sequence[int] = (), temperature: float = 0.0
) -> Profile:
    """Return the profile of a table of measured calls; see the top of this module.

    Args:
        path: a CSV file.
        depth: K, the longest draft.
        batch: batch sizes. Default: all `requests` of the table, if there are several.
        temperature: at which it was measured.

    Raises:
        InputError: the table is missing or malformed (the message names the row), or has no calls of such a size.
    """
    file = Path(path)
    check_limits({"depth": 1}, depth=depth)
    rows = _Rows(file, list(_read(file)))
    if (largest := rows.curves(TARGET, 1).most - 1) < depth:
        raise InputError(
            f"--depth: expected at most {largest}, because the largest call for one request in {file} reads {largest + 1} "
            f"tokens, got {depth}"
        )
    repetitions: list[dict[Key, list[float]]] = [{} for _ in range(rows.repetitions)]
    for side, context in zip(CONTEXTS, rows.contexts, strict=True):
        for what, counts, ms in rows.parts(context, depth, batch):
            least = MIN_CALL_S if what in (PLAIN, VERIFY, BATCH_VERIFY) else 0.0
            seconds = np.broadcast_to(np.maximum(ms * 1e-3, least), rows.repetitions)
            for repetition, value in zip(repetitions, seconds.tolist(), strict=True):
                repetition[Key(what, side, counts)] = [value]
    facts = {"device": "from a table", "table": file.name, "rows": len(rows.all)}
    return Profile.measured(merge_repetitions(repetitions), rows.contexts, depth, temperature, facts)


@dataclass(frozen=True)
class _Row:
    """A row; None stands for any number.

    Attributes:
        ms: [1] or [`REPETITIONS`] values.
    """

    part: str
    requests: int | None
    tokens: int | None
    context: float | None
    ms: Array


class _Curves:
    """Calls by tokens, measured at one or several contexts.

    Args:
        points: (context, tokens, ms [repetitions]).
        repetitions: number of them.
    """

    def __init__(self, points: Iterable[tuple[float, int, Array]], repetitions: int) -> None:
        self._curves: dict[float, list[tuple[int, Array]]] = defaultdict(list)
        for context, tokens, ms in sorted(points, key=lambda point: point[:2]):
            self._curves[context].append((tokens, np.broadcast_to(ms, repetitions)))
        self.tokens = {tokens for curve in self._curves.values() for tokens, _ in curve}
        # The most tokens that were measured at every context.
        self.most = min(curve[-1][0] for curve in self._curves.values())

    def at(self, tokens: ArrayLike, context: float) -> Array:
        """Return the ms [T, repetitions] of calls [T]: linear in the tokens, then a least-squares line in the context."""
        contexts, calls = np.array(list(self._curves)), []
        for curve in self._curves.values():
            counts, columns = [n for n, _ in curve], np.stack([ms for _, ms in curve], 1)  # [repetitions, P]
            calls.append(np.stack([read_curve(tuple(zip(counts, ms, strict=True)), tokens) for ms in columns], -1))
        if len(contexts) == 1:
            return calls[0]
        centred = contexts - contexts.mean()
        weights = 1.0 / len(contexts) + (context - contexts.mean()) * centred / (centred**2).sum()
        line: Array = np.tensordot(weights, np.stack(calls), 1)
        return line


class _Rows:
    """The rows of a table.

    Args:
        file: for messages.
        rows: all of them.
    """

    def __init__(self, file: Path, rows: Sequence[_Row]) -> None:
        self.all, self._file = rows, file
        self.repetitions = max((row.ms.size for row in rows), default=1)
        for part in (TARGET, DRAFT):
            if not any(row.part == part for row in rows):
                raise InputError(f"{file}: expected at least one row of the part {part!r}")
        for part in (CACHE, PREFILL):
            counts = [row.tokens for row in rows if row.part == part]
            if len(set(counts)) < len(counts):
                raise InputError(
                    f"{file}: expected one row of the part {part!r} for each number of tokens, whatever requests and context"
                )
        self._cache = next((row.ms for row in rows if row.part == CACHE), np.zeros(1))
        measured = sorted({row.context for row in rows if row.part == TARGET and row.context is not None})
        low = measured[0] if measured else 0.0
        high = measured[-1] if measured else low
        if self._cache.any() and high < low + 1.0:
            high = low + 1024.0  # a line: any second context gives the same costs
        self.contexts = low, high

    def sizes(self, part: str) -> list[int]:
        """Return the numbers of requests that were measured, ascending."""
        return sorted({row.requests for row in self.all if row.part == part and row.requests is not None})

    def curves(self, part: str, requests: int) -> _Curves:
        """Return the calls of so many requests: their rows, or those of any number.

        Raises:
            InputError: there are none.
        """
        rows = [row for row in self.all if row.part == part and row.requests == requests]
        rows = rows or [row for row in self.all if row.part == part and row.requests is None]
        if not rows:
            raise InputError(
                f"{self._file}: expected rows of the part {part!r} for {requests} requests, or with empty requests; it has "
                f"{', '.join(map(str, self.sizes(part)))}"
            )
        known = {row.context for row in rows}
        if None in known and len(known) > 1:
            raise InputError(
                f"{self._file}: expected a context in all rows of {part!r} for {requests} requests, or none"
            )
        return _Curves(((row.context or 0.0, row.tokens or 1, row.ms) for row in rows), self.repetitions)

    def calls(self, requests: int, tokens: Sequence[int], context: float) -> Array:
        """Return the ms [T, repetitions] of calls of the target, caches included."""
        return self.curves(TARGET, requests).at(tokens, context) + self._cache * (requests * context)

    def step(self, part: str, requests: int, context: float) -> Array:
        """Return the ms [repetitions] of a draft step or of the rest of a round, linear between numbers of requests."""
        sizes = self.sizes(part)
        if not any(row.part == part for row in self.all):
            return self.step(DRAFT, requests, context) if part == FIRST_DRAFT else np.zeros(1)
        if requests in sizes or not sizes or not sizes[0] <= requests <= sizes[-1]:
            alone: Array = self.curves(part, requests).at([1], context)[0]
            return alone
        above = next(at for at, size in enumerate(sizes) if size > requests)
        low, high = sizes[above - 1], sizes[above]
        ends = [self.curves(part, size).at([1], context)[0] for size in (low, high)]
        out: Array = ends[0] + (ends[1] - ends[0]) * ((requests - low) / (high - low))
        return out

    def parts(self, context: float, depth: int, batch: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...], Array]]:
        """Yield what was timed, its counts and the ms [repetitions]: all that `measurements.estimate` reads."""
        plain, *verify = self.calls(1, range(1, depth + 2), context)
        yield PLAIN, (), plain
        yield from ((VERIFY, (n,), ms) for n, ms in enumerate(verify, 1))
        yield FIRST, (1,), self.step(FIRST_DRAFT, 1, context)
        yield LATER, (2,), self.step(DRAFT, 1, context)
        yield OUTSIDE, (0,), self.step(OUTSIDE, 1, context)
        read = {row.tokens or 1: row.ms for row in self.all if row.part == PREFILL}
        if len(read) == 1:  # proportional to the tokens
            ((tokens, ms),) = read.items()
            read[1] = ms / tokens
        yield from ((PREFILL, (tokens,), ms) for tokens, ms in read.items())
        sizes = sorted({*(batch or (*self.sizes(TARGET), *self.sizes(DRAFT)))})
        for size in sizes if sizes not in ([], [1]) else ():
            counts = sorted({size, *(tokens for tokens in self.curves(TARGET, size).tokens if tokens > size)})
            outside = self.step(OUTSIDE, size, context)
            for tokens, ms in zip(counts, self.calls(size, counts, context), strict=True):
                yield BATCH_VERIFY, (size, tokens), ms + outside
            yield BATCH_FIRST, (size,), self.step(FIRST_DRAFT, size, context)
            yield BATCH_DRAFTS, (size, 1), self.step(DRAFT, size, context)


def _read(file: Path) -> Iterator[_Row]:
    """Yield the rows of a table; those that differ in `ms` alone as one."""
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for where, raw in _raw_rows(file):
        part = (raw["part"] or "").strip()
        if part not in TABLE_PARTS:
            raise InputError(f"{where}: expected one of {', '.join(TABLE_PARTS)} in 'part', got {part!r:.40}")
        requests = _number(raw, "requests", where, 1, MAX_STREAMS)
        tokens = _number(raw, "tokens", where, 1, MAX_COUNT)
        context = _number(raw, "context", where, 0, MAX_CONTEXT, whole=False)
        ms = _number(raw, "ms", where, 0, MAX_S * 1e3, whole=False)
        error = _number(raw, "error", where, 0, MAX_S * 1e3, whole=False) or 0.0
        if ms is None or (part == TARGET and ms == 0.0):
            raise InputError(f"{where}: expected milliseconds in 'ms', got {raw['ms']!r:.40}")
        if (tokens is not None) != (part in (TARGET, PREFILL)):
            raise InputError(f"{where}: expected tokens in rows of {TARGET!r} and {PREFILL!r}, and in no others")
        if part == TARGET and requests is not None and tokens is not None and tokens < requests:
            raise InputError(f"{where}: expected at least one token for each of {requests} requests, got {tokens}")
        groups[part, requests and int(requests), tokens and int(tokens), context].append((ms, error))
    for at, ((part, requests, tokens, context), values) in enumerate(groups.items()):
        mean, error = (float(np.mean([pair[i] for pair in values])) for i in (0, 1))
        if len(values) > 1:
            error = max(error, float(np.std([ms for ms, _ in values], ddof=1)) / math.sqrt(len(values)))
        # Errors of different rows are independent.
        scores = np.random.default_rng(at).permutation(SCORES) if error else np.zeros(1)
        yield _Row(part, requests, tokens, context, mean + error * scores)


def _raw_rows(file: Path) -> Iterable[tuple[str, dict[str, str | None]]]:
    """Return (place, row) of the lines of a CSV file."""
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream, restkey="")
            names = reader.fieldnames or ()
            if missing := [name for name in COLUMNS if name not in names]:
                raise InputError(f"{file}: expected a CSV table with the columns {', '.join(COLUMNS)}; "
                                 f"{', '.join(missing)} is missing")  # fmt: skip
            rows: list[tuple[str, dict[str, str | None]]] = []
            for raw in reader:
                where = f"{file}, line {reader.line_num}"
                if "" in raw or None in raw.values():
                    raise InputError(f"{where}: expected {len(names)} values")
                rows.append((where, raw))
            return rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no CSV table ({error})"
        raise InputError(f"--from: {file} cannot be read: {reason}") from None


def _number(
    raw: Mapping[str, str | None], name: str, where: str, low: float, high: float, *, whole: bool = True
) -> float | None:
    """Return a number of a row; None if it is empty."""
    text = (raw.get(name) or "").strip()
    if not text:
        return None
    try:
        value = float(int(text)) if whole else float(text)
    except (ValueError, OverflowError):
        value = math.nan
    if not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise InputError(f"{where}: expected {kind} from {low:g} to {high:g} in {name!r}, got {text!r:.40}")
    return value
