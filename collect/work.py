"""One prompt to collect, the columns that all rows of its text share, and some of many such things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

Item = TypeVar("Item")


class Work(NamedTuple):
    """One prompt to collect.

    Attributes:
        sequence: its number in the run.
        prompt_id, group: of the prompt.
        tokens: of the prompt.
        key: of the stream.
    """

    sequence: int
    prompt_id: str
    group: str
    tokens: list[int]
    key: int = 0

    def columns(self, rows: int, text_tokens: int) -> dict[str, Any]:
        """Return the columns that are the same in all rows of the text, which has so many tokens beside its prompt's."""
        columns: dict[str, Any] = {"prompt_id": [self.prompt_id] * rows, "group": [self.group] * rows}
        counts = {"sequence": self.sequence, "prompt_tokens": len(self.tokens), "text_tokens": text_tokens}
        return columns | {name: np.full(rows, value) for name, value in counts.items()}


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items at even distances, or all."""
    count = min(count, len(items))
    return [items[at * len(items) // count] for at in range(count)]
