"""One text to collect and the columns that its rows share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

Item = TypeVar("Item")


def stream_name(prompt_id: str, sample: str) -> str:
    """Return the name that random numbers of a text are keyed by: samples of one prompt draw different numbers."""
    return f"{prompt_id}\0{sample}" if sample else prompt_id


class Work(NamedTuple):
    """One text to collect.

    Attributes:
        sequence: index of the text in the run.
        prompt_id, group: of the prompt.
        tokens: token ids of the prompt.
        key: of the stream.
        sample: name of the sample; "" where the prompt has a single text.
    """

    sequence: int
    prompt_id: str
    group: str
    tokens: list[int]
    key: int = 0
    sample: str = ""

    @property
    def text_hash(self) -> str:
        """Hash of the prompt's token ids: equal texts have equal hashes, whatever their ids. "" without tokens."""
        if not self.tokens:
            return ""
        return hashlib.blake2b(np.array(self.tokens, dtype="<i8").tobytes(), digest_size=8).hexdigest()

    def columns(self, rows: int, text_tokens: int) -> dict[str, Any]:
        """Return the columns that are constant over the rows of the text.

        Args:
            rows: number of rows.
            text_tokens: number of generated tokens.
        """
        names = {"prompt_id": self.prompt_id, "sample": self.sample, "text_hash": self.text_hash, "group": self.group}
        columns: dict[str, Any] = {name: [value] * rows for name, value in names.items()}
        counts = {"sequence": self.sequence, "prompt_tokens": len(self.tokens), "text_tokens": text_tokens}
        return columns | {name: np.full(rows, value) for name, value in counts.items()}


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items at even distances, or all."""
    count = min(count, len(items))
    return [items[at * len(items) // count] for at in range(count)]
