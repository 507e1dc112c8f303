"""Candidates from the text so far, and from earlier ones if asked: suffix drafting."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from heapq import nlargest
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from ...policies.contract import Array
from ...policies.errors import InputError
from ..candidates import Candidates
from ..models.long_rope import ENDLESS
from ..models.pair import Pair
from .automaton import START, SuffixAutomaton
from .base import READS_NOTHING, Proposal

KEPT, SINGLE = 32, 256
"""Tokens that are proposed after a place at most; single tokens of a text that share what no longer suffix explains."""

Match = tuple[SuffixAutomaton, int, int]
"""A known substring: whose, its state, its length."""


class SuffixDrafter:
    """What followed the longest suffix that came before, weighted by how often (SuffixDecoding, arXiv 2411.04975).

    The frequencies after the suffix are mixed with those after its own suffixes, down to single tokens, by the escape
    estimate of PPM-C: after n continuations, d of them different, the share d / (n + d) is left to the shorter suffix. So the
    scores tell a long repetition from a short one, and a policy can read how far to trust them. It takes no training and no
    draft model.

    Args:
        pair: for the vocabulary and the device.
        path: a text file that is searched beside each text; "" for none.
        keep: 1 where texts stay known when the next ones begin, 0 where not; what is drafted then depends on their order,
            what is decoded does not.

    Raises:
        InputError: an argument is of another kind, the file cannot be read, or the pair has no tokenizer to read it with.
    """

    layers: tuple[int, ...] = ()
    readable = ENDLESS
    reading = READS_NOTHING

    def __init__(self, pair: Pair, path: str = "", keep: int = 0) -> None:
        if not isinstance(path, str):
            raise InputError(
                f"--drafter suffix: expected for path a text file, not the number {path}; write suffix:{path}"
            )
        if keep not in (0, 1):
            raise InputError(f"--drafter suffix: expected for keep 0 or 1, not {keep!r}")
        self._device, self._dtype = pair.device, pair.logits_dtype
        self.carries, self._texts = bool(keep), [list[int]()]
        self._file = _tokens(pair, path) if path else []
        self._shared = self._begun()
        self.reserve(1, 0)

    def _begun(self) -> SuffixAutomaton | None:
        """Return what is searched beside each text before any has ended: the file, if there is one."""
        if not self.carries and not self._file:
            return None
        shared = SuffixAutomaton()
        _learn(shared, self._file)
        return shared

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        if self.carries and self._shared is not None:
            for text in self._texts:
                _learn(self._shared, text)
        self._texts = [[] for _ in range(streams)]
        self._own = [SuffixAutomaton() for _ in range(streams)]
        self._elsewhere = [(START, 0)] * streams  # of the shared automaton, what the text ends with
        self._ahead = [0] * streams  # 1 where the root of a round has been noted already
        self._at: list[dict[int, list[Match]]] = [{} for _ in range(streams)]  # by place

    def renew(self) -> None:
        """See `Carries`; the file stays known."""
        streams, self._texts = len(self._texts), []
        if self.carries:
            self._shared = self._begun()
        self.reserve(streams, 0)

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        if self.carries and self._shared is not None:
            _learn(self._shared, self._texts[stream])
            # Learning splits states, so that what the other texts end with may stand in another one now.
            for other, text in enumerate(self._texts):
                self._elsewhere[other] = _end(self._shared, text)
        self._texts[stream], self._own[stream], self._at[stream] = [], SuffixAutomaton(), {}
        self._elsewhere[stream], self._ahead[stream] = (START, 0), 0

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        for token in tokens[self._ahead[stream] :]:
            self._note(stream, token)
        self._ahead[stream] = 0

    def _note(self, stream: int, token: int) -> None:
        self._texts[stream].append(token)
        self._own[stream].append(token)
        if self._shared is not None:
            self._elsewhere[stream] = self._shared.step(*self._elsewhere[stream], token)

    def backlog(self) -> Array:
        """Return zeros: reading is free."""
        return np.zeros(len(self._own), dtype=np.int64)

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`."""
        rows: list[dict[int, float]] = []
        for stream, here, places in zip(streams, found, feeding, strict=True):
            for place in places:
                matches = self._at[stream][place] = self._matches(stream, here, place)
                # Of two matches of one length the text's own, which comes first.
                automaton, state, length = max(matches, key=lambda match: match[2])
                rows.append(mixed(automaton, state) if length else {})
        return Proposal.of_weights(rows, self._dtype, self._device)

    def _matches(self, stream: int, here: Candidates, place: int) -> list[Match]:
        """Return what is known of the path to a place: in the text itself, and elsewhere."""
        token, parent = here.tokens[place], here.parent[place]
        if parent >= 0:
            before = self._at[stream][parent]
        elif here.roots == 1:  # committed, though the target has not read it
            self._note(stream, token)
            self._ahead[stream] = 1
            return self._ends(stream)
        else:
            before = self._ends(stream)
        return [(automaton, *automaton.step(state, length, token)) for automaton, state, length in before]

    def _ends(self, stream: int) -> list[Match]:
        """Return what is known of the text's end."""
        own, shared = self._own[stream], self._shared
        return [(own, *own.earlier()), *([] if shared is None else [(shared, *self._elsewhere[stream])])]


def mixed(automaton: SuffixAutomaton, state: int) -> dict[int, float]:
    """Return the weights of the tokens that came after a substring and after its suffixes, by PPM-C."""
    weights: dict[int, float] = {}
    share, count, known = 1.0, automaton.count, False
    # Along the links to shorter suffixes, while what is left to them can still matter.
    while state >= 0 and share > 1e-6:
        successors = automaton.next[state]
        some = list(islice(successors.items(), SINGLE)) if state == START else list(successors.items())
        if some and (known or state != START):  # single tokens alone say nothing
            known = True
            counts = [count[after] for _, after in some]
            total = sum(counts) + len(counts)  # PPM-C: n + d
            for (token, _), times in zip(some, counts, strict=True):
                weights[token] = weights.get(token, 0.0) + share * times / total
            share *= len(counts) / total
        state = automaton.link[state]
    # Equal weights rank by id, whatever order the texts came in.
    best = nlargest(KEPT, weights.items(), key=lambda item: (item[1], -item[0]))
    return dict(best)


def _learn(automaton: SuffixAutomaton, tokens: Sequence[int]) -> None:
    automaton.begin()
    for token in tokens:
        automaton.append(token)


def _end(automaton: SuffixAutomaton, tokens: Sequence[int]) -> tuple[int, int]:
    """Return state and length of the longest suffix of a text that an automaton knows."""
    state, length = START, 0
    for token in tokens:
        state, length = automaton.step(state, length, token)
    return state, length


def file_hash(path: str) -> str:
    """Return a short hash of a text file.

    Raises:
        InputError: it cannot be read.
    """
    return hashlib.blake2b(_text(path).encode(), digest_size=8).hexdigest()


def _tokens(pair: Pair, path: str) -> list[int]:
    if pair.tokenizer is None:
        raise InputError("--drafter suffix: the pair has no tokenizer to read a file with")
    return [int(token) for token in pair.tokenizer(_text(path), add_special_tokens=False)["input_ids"]]


def _text(path: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InputError(f"--drafter suffix: expected a text file, but {path} cannot be read: {reason}") from None
