"""Which request of an engine is which row of the draft's cache, told by its tokens.

An engine hands over texts by their place in its batch, and places move: requests end, are preempted and come back, new ones
take their places. So a row is found again by what it holds. Where the engine's names of the requests are known they tell
apart requests of equal tokens; without them such rows are the same to all that is asked of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...policies.contract import Array


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request is kept.

    Attributes:
        row: its row.
        same: its text goes on where the row's ended; else the row begins anew with it.
        kept: tokens at its beginning that the row held already.
        new: tokens after them.
    """

    row: int
    same: bool
    kept: int
    new: list[int]


class Rows:
    """The texts that R rows hold.

    Args:
        count: R.

    Attributes:
        length: [R] int64, tokens of each.
        seen: [R] int64, the step in which each was last there; 0 = never.
    """

    def __init__(self, count: int) -> None:
        self._text = np.zeros((count, 256), dtype=np.int32)
        self.length = np.zeros(count, dtype=np.int64)
        self.seen = np.zeros(count, dtype=np.int64)
        self._named: dict[str, int] = {}
        self._at: list[int] = []  # by place of the last step, its row
        self._step = 0

    def text(self, row: int) -> Array:
        """Return the tokens of a row, [length] int32."""
        return self._text[row, : self.length[row]]

    def place(
        self, texts: Sequence[Array], grown: Sequence[int], names: Sequence[str] | None = None
    ) -> list[Placed | None]:
        """Find the rows of the requests of a step, and take in what their texts have grown by.

        Args:
            texts: by place, each [n] whole numbers, at least one.
            grown: [R], by how much the text of a row can have grown since it was last seen: without names, a text that
                has grown by more is another one that begins with the same tokens.
            names: of the requests, where they are known.

        Returns:
            By place; None where there are more requests than rows.
        """
        self._step += 1
        rows = self._by_tokens(texts, grown) if names is None else self._by_name(texts, names)
        same = [row >= 0 for row in rows]
        if not all(same):
            self._give(rows, names)
        self._at = rows
        return [
            self._take_in(row, text, goes_on) if row >= 0 else None
            for row, text, goes_on in zip(rows, texts, same, strict=True)
        ]

    def _give(self, rows: list[int], names: Sequence[str] | None) -> None:
        """Give rows to those that have none, in place, while there are any."""
        # Taken from the end: the one that was not seen for longest, as a request that was left out may be back. Attention
        # reads all rows up to the last one in use, so it is one of the first 2 n for n requests while there are any.
        most = 2 * max(2, len(rows))
        free = sorted(
            set(range(len(self.length))).difference(rows),
            key=lambda row: (row >= most, int(self.seen[row]), row),
            reverse=True,
        )
        for at, row in enumerate(rows):
            if row < 0 and names is not None and self._named.get(names[at]) in free:
                rows[at] = self._named[names[at]]  # another text under the name of an older one
                free.remove(rows[at])
        for at, row in enumerate(rows):
            if row < 0 and free:
                rows[at] = free.pop()
        if names is not None:
            # A name stays with its row until another request takes that: a preempted one may come back.
            taken = set(rows)
            self._named = {name: row for name, row in self._named.items() if row not in taken}
            self._named |= {name: row for name, row in zip(names, rows, strict=True) if row >= 0}

    def _by_name(self, texts: Sequence[Array], names: Sequence[str]) -> list[int]:
        """Return the row of each text, -1 for those that go on no row of their name."""
        rows = [self._named.get(name, -1) for name in names]
        return [row if row >= 0 and self._goes_on(row, text) else -1 for row, text in zip(rows, texts, strict=True)]

    def _by_tokens(self, texts: Sequence[Array], grown: Sequence[int]) -> list[int]:
        """Return the row of each text, -1 for those that go on no row; a row at its old place is looked at first."""
        rows, free = [-1] * len(texts), set(range(len(self.length)))

        def fits(row: int, text: Array) -> bool:
            return len(text) - self.length[row] <= grown[row] and self._goes_on(row, text)

        for at, (text, row) in enumerate(zip(texts, self._at, strict=False)):
            if row in free and fits(row, text):
                rows[at] = row
                free.remove(row)
        # Of several rows that a text begins with, the longest: a shorter one may be another request's.
        for at, text in enumerate(texts):
            if rows[at] < 0:
                found = [row for row in free if fits(row, text)]
                rows[at] = max(found, key=lambda row: (int(self.length[row]), int(self.seen[row])), default=-1)
                free.discard(rows[at])
        return rows

    def _goes_on(self, row: int, text: Array) -> bool:
        """Whether a text begins with all that the row holds."""
        length = int(self.length[row])
        # The last token tells most texts apart, so that few are compared as a whole.
        if not 0 < length <= len(text) or self._text[row, length - 1] != text[length - 1]:
            return False
        return bool((self._text[row, :length] == text[:length]).all())

    def _take_in(self, row: int, text: Array, same: bool) -> Placed:
        kept = int(self.length[row])
        if not same:
            kept = min(kept, len(text))
            # Another text: what it begins with alike the draft model need not read again.
            differs = np.flatnonzero(self._text[row, :kept] != text[:kept])
            kept = int(differs[0]) if len(differs) else kept
        if len(text) > self._text.shape[1]:
            wider = np.zeros((len(self._text), max(len(text), 2 * self._text.shape[1])), dtype=np.int32)
            wider[:, : self._text.shape[1]] = self._text
            self._text = wider
        self._text[row, kept : len(text)] = text[kept:]
        self.length[row], self.seen[row] = len(text), self._step
        return Placed(row, same, kept, text[kept:].tolist())
