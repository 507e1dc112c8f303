"""Candidates from the text so far, and optionally from a file and earlier texts: suffix decoding."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from heapq import nlargest
from itertools import islice
from pathlib import Path

from ...policies.errors import InputError
from ..models.pair import Pair
from .lookup import TextDrafter, TextIndex

MAX_PROPOSED, MAX_SINGLE = 32, 256
"""Maximum number of tokens proposed after a row, and of single tokens that share the weight which no suffix explains."""

MAX_COUNTED = 64
"""Suffixes that are counted at each token, the longest first. More exist only in texts that repeat themselves immediately,
where each has one continuation anyway."""

START = 0


class SuffixAutomaton:
    """Suffix automaton of the substrings of one or several texts (Blumer et al., 1985), with their counts.

    Attributes:
        next: by state, the next state by token.
        link: by state, the state of its longest suffix that also occurs elsewhere; -1 for the start.
        length: by state, the length of its longest substring.
        count: by state, the number of its occurrences.
        last: state of the current text.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.last = START

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add a whole text."""
        self.last = START
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token to the current text."""
        existing = self.next[self.last].get(token)
        if existing is None:
            self.last = self._grow(token)
        else:  # of an earlier text; its state is split if it also has longer substrings
            is_exact = self.length[existing] == self.length[self.last] + 1
            self.last = existing if is_exact else self._split(self.last, token, existing)
        state = self.last
        for _ in range(MAX_COUNTED):
            if state == START:
                break
            self.count[state] += 1
            state = self.link[state]

    def _grow(self, token: int) -> int:
        """Return the new state of the text with one more token."""
        new, state = self._add(self.length[self.last] + 1, {}, START, 0), self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            old = self.next[state][token]
            self.link[new] = old if self.length[old] == self.length[state] + 1 else self._split(state, token, old)
        return new

    def _split(self, state: int, token: int, old: int) -> int:
        """Return a separate state for the substrings of `old` that end with those of `state` and a token."""
        copy = self._add(self.length[state] + 1, dict(self.next[old]), self.link[old], self.count[old])
        self.link[old] = copy
        while state >= 0 and self.next[state].get(token) == old:
            self.next[state][token] = copy
            state = self.link[state]
        return copy

    def _add(self, length: int, successors: dict[int, int], link: int, count: int) -> int:
        self.next.append(successors)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return state and length of the longest suffix of a substring and one more token that occurs in the texts."""
        while token not in self.next[state]:
            if state == START:
                return START, 0
            state = self.link[state]
            length = self.length[state]
        return self.next[state][token], length + 1

    def match(self, tokens: Sequence[int], state: int = START, length: int = 0) -> tuple[int, int]:
        """Return state and length of the longest suffix that occurs in the texts, of a substring followed by `tokens`."""
        for token in tokens:
            state, length = self.step(state, length, token)
        return state, length

    def earlier(self) -> tuple[int, int]:
        """Return state and length of the longest suffix of the current text that occurs earlier."""
        state = max(self.link[self.last], START)  # the link of the start is -1
        return state, self.length[state]

    def followers(self, state: int) -> dict[int, float]:
        """Return the weights of the tokens after a substring and after its suffixes, by PPM-C.

        After n continuations, d of them different, the share d / (n + d) goes to the shorter suffix.
        """
        weights: dict[int, float] = {}
        share, is_matched = 1.0, False
        while state >= 0 and share > 1e-6:
            successors = self.next[state].items()
            pairs = list(islice(successors, MAX_SINGLE) if state == START else successors)
            if pairs and (is_matched or state != START):  # unconditional counts alone say nothing
                is_matched = True
                counts = [self.count[after] for _, after in pairs]
                total = sum(counts) + len(counts)  # n + d
                for (token, _), count in zip(pairs, counts, strict=True):
                    weights[token] = weights.get(token, 0.0) + share * count / total
                share *= len(counts) / total
            state = self.link[state]
        # Ties are broken by token id, so that the order of the texts does not matter.
        return dict(nlargest(MAX_PROPOSED, weights.items(), key=lambda item: (item[1], -item[0])))


class SuffixIndex(TextIndex):
    """The automaton of a text, and the longest suffix of the text in `shared`, the automaton of a file and earlier texts."""

    def __init__(self, shared: SuffixAutomaton) -> None:
        self.text: list[int] = []
        self._automaton, self._shared, self.shared_match = SuffixAutomaton(), shared, (START, 0)

    def append(self, token: int) -> None:
        """See `TextIndex`."""
        self.text.append(token)
        self._automaton.append(token)
        self.shared_match = self._shared.step(*self.shared_match, token)

    def followers(self, path: Sequence[int]) -> dict[int, float]:
        """See `TextIndex`."""
        text_state, text_length = self._automaton.match(path, *self._automaton.earlier())
        state, length = self._shared.match(path, *self.shared_match)
        if length > text_length:
            return self._shared.followers(state)
        return self._automaton.followers(text_state) if text_length else {}

    def match(self) -> tuple[int, int]:
        """See `TextIndex`."""
        text_state, text_length = self._automaton.earlier()
        state, length = self.shared_match
        if length > text_length:
            return length, self._shared.count[state]
        return text_length, self._automaton.count[text_state] - 1 if text_length else 0  # without the end of the text


class SuffixDrafter(TextDrafter):
    """What followed the longest suffix that occurred before, weighted by how often (SuffixDecoding, arXiv 2411.04975).

    The counts are mixed with those after shorter suffixes (`SuffixAutomaton.followers`): the scores of a long and of a
    short repetition differ, and a policy can read them.

    Args:
        pair: for the vocabulary and the device.
        path: a text file that is searched in addition to each text; "" = none.
        keep: 1 = earlier texts are searched too, 0 = they are not.

    Raises:
        InputError: `keep` has another value, the file cannot be read, or the pair has no tokenizer to read it with.
    """

    _indexes: list[SuffixIndex]  # type: ignore[assignment]

    def __init__(self, pair: Pair, path: str = "", keep: int = 0) -> None:
        if keep not in (0, 1):
            raise InputError(f"--drafter suffix: expected for keep 0 or 1, not {keep!r}")
        self.carries = bool(keep)
        self._file: list[int] = []
        if path:
            if pair.tokenizer is None:
                raise InputError("--drafter suffix: the pair has no tokenizer to read a file with")
            self._file = list(map(int, pair.tokenizer(_read_text(path), add_special_tokens=False)["input_ids"]))
        super().__init__(pair, lambda: SuffixIndex(self._shared))

    def reset(self) -> None:
        """See `Drafter`. The contents of the file are kept."""
        self._indexes, self._shared = [], SuffixAutomaton()
        self._shared.add_text(self._file)
        super().reset()

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        if self.carries:
            for index in self._indexes:
                self._shared.add_text(index.text)
        super().reserve(streams, tokens)

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        if self.carries:
            self._shared.add_text(self._indexes[stream].text)
            for index in self._indexes:  # the new text may have split states
                index.shared_match = self._shared.match(index.text)
        super().begin(stream)


def file_hash(path: str) -> str:
    """Return a short hash of a text file; raise `InputError` if it cannot be read."""
    return hashlib.blake2b(_read_text(path).encode(), digest_size=8).hexdigest()


def _read_text(path: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"--drafter suffix: expected a text file, but {path} cannot be read: {reason}") from None
