"""Where candidates come from: a draft model, or the text itself (prompt lookup)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..policies.errors import InputError
from .candidates import Candidates
from .captured import open_cache
from .finite import check_rows
from .hidden import hidden_width
from .pair import Pair
from .transfer import upload


class Drafter(Protocol):
    """Scores the tokens that may follow each place of a round.

    The loop feeds places depth by depth, so a drafter that knows all depths after one pass (heads on the target) answers
    the later calls from what it kept, and leaves the choice of what to verify to the policy's `select`.

    Attributes:
        partial: may leave a place without any candidate: a row of -inf.
        reads_hidden: wants the target's hidden state at the place behind which a round starts.
    """

    partial: bool
    reads_hidden: bool

    def reserve(self, tokens: int) -> None:
        """Forget the last text and make room for `tokens`, those of a round's candidates included."""

    def backlog(self, text: Sequence[int]) -> int:
        """Return how many tokens of the committed text it has not read."""

    def feed(
        self, text: Sequence[int], base: int, found: Candidates, feeding: Sequence[int], hidden: Tensor | None
    ) -> Tensor:
        """Return [len(feeding), V] raw logits of what follows each place.

        Args:
            text: committed so far.
            base: position of the round's roots in the text.
            found: drafted so far.
            feeding: places of one depth; all above them were fed before.
            hidden: [1, H] the target's last hidden state before the roots, if `reads_hidden`.
        """

    def commit(self, base: int, path: Sequence[int]) -> None:
        """Keep the accepted path (places, from a root on) and forget every other candidate."""


class ModelDrafter:
    """A smaller language model of the same tokenizer.

    Args:
        pair: whose draft it is.

    Attributes:
        states: see `hidden.KeepsStates`.
    """

    partial = reads_hidden = False

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._hidden = False
        self._model = open_cache(pair.draft, 0, pair.vocabulary)
        self._looked_at = False  # the first logits of a text tell a broken model
        self._fed: list[int] = []  # places in the cache, in the order of its slots behind the text
        self.states: Tensor | None = None

    def keep_states(self) -> int:
        """See `hidden.KeepsStates`."""
        if not self._hidden:
            self._hidden = True
            self._model = open_cache(self._pair.draft, 0, self._pair.vocabulary, True)
        return hidden_width(self._pair.draft)

    def reserve(self, tokens: int) -> None:
        """See `Drafter`."""
        if self._model.capacity < tokens:
            self._model = open_cache(self._pair.draft, tokens, self._pair.vocabulary, self._hidden)
        self._model.roll_back(0)
        self._looked_at = False

    def prepare(self, lengths: Sequence[int]) -> None:
        """Do ahead what drafting chains in texts of these lengths takes to be done once (`CachedModel.prepare`)."""
        self._model.prepare([(1, 1), (2, 1)], lengths)

    def backlog(self, text: Sequence[int]) -> int:
        """See `Drafter`."""
        return len(text) - self._model.length

    def feed(
        self, text: Sequence[int], base: int, found: Candidates, feeding: Sequence[int], hidden: Tensor | None
    ) -> Tensor:
        """See `Drafter`."""
        tokens = [found.tokens[place] for place in feeding]
        if found.depth[feeding[0]] == 0:
            self._fed = []
            unread = list(text[self._model.length : base])
            if found.roots > 1 and unread:  # the roots do not see each other
                self._read(unread)
            elif found.roots == 1:
                tokens = unread + tokens
        if len(feeding) == 1 and len(self._fed) == found.depth[feeding[0]]:  # all it has read leads to this place
            logits = self._read(tokens)
        else:
            before, rows = ([found.rows[place] for place in places] for places in (self._fed, feeding))
            logits = self._model.read_tree(tokens, base, found.topology, before, rows)[0]
        if not self._looked_at:
            check_rows(logits, "draft")
            self._looked_at = True
        if self._model.states is not None:
            self.states = self._model.states[0, -len(logits) :]
        self._fed.extend(feeding)
        return logits

    def _read(self, tokens: Sequence[int]) -> Tensor:
        return self._model.read(upload([list(tokens)], self._pair.device), rows=1)[0]

    def commit(self, base: int, path: Sequence[int]) -> None:
        """See `Drafter`."""
        if self._model.length <= base:  # nothing was drafted: the backlog grows
            return
        slot = {place: base + at for at, place in enumerate(self._fed)}
        self._model.keep(base, [slot[place] for place in path if place in slot])


class LookupDrafter:
    """Prompt lookup: what followed the longest earlier occurrence of the last tokens, weighted by how often (free).

    Saxena's prompt lookup decoding takes one occurrence; the counts of all of them make a distribution, so that trees
    and sampling work as with any draft. Later occurrences win between equals.

    Args:
        pair: for the vocabulary and the device.
        longest: tokens of context to look for, at most.
    """

    partial, reads_hidden = True, False

    def __init__(self, pair: Pair, longest: int = 3) -> None:
        self._vocabulary, self._device, self._dtype = pair.vocabulary, pair.device, pair.logits_dtype
        self._longest = longest
        self._index: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def reserve(self, tokens: int) -> None:
        """See `Drafter`."""
        self._index, self._indexed = {}, 0

    def backlog(self, text: Sequence[int]) -> int:
        """Return 0: reading is free."""
        return 0

    def feed(
        self, text: Sequence[int], base: int, found: Candidates, feeding: Sequence[int], hidden: Tensor | None
    ) -> Tensor:
        """See `Drafter`."""
        self._extend(text)
        rows = [self._followers([*text[:base], *found.tokens_to(place)]) for place in feeding]
        logits = torch.zeros(len(rows), self._vocabulary, dtype=self._dtype, device=self._device)
        for logit, counts in zip(logits, rows, strict=True):
            if counts:
                logit[list(counts)] = torch.tensor(list(counts.values()), dtype=logit.dtype, device=logit.device)
        return logits.log()

    def _extend(self, text: Sequence[int]) -> None:
        """Note what followed every run of tokens of the text that is not noted yet."""
        for at in range(max(self._indexed, 1), len(text)):
            for length in range(1, min(self._longest, at) + 1):
                self._index.setdefault(tuple(text[at - length : at]), []).append(text[at])
        self._indexed = len(text)

    def _followers(self, prefix: Sequence[int]) -> dict[int, float]:
        """Return the weights of the tokens that followed the longest known suffix; a later one counts a trifle more."""
        for length in range(min(self._longest, len(prefix)), 0, -1):
            seen = self._index.get(tuple(prefix[-length:]))
            if seen:
                last = {token: at for at, token in enumerate(seen)}
                return {t: n + 1e-3 * (last[t] + 1) / len(seen) for t, n in Counter(seen).items()}
        return {}

    def commit(self, base: int, path: Sequence[int]) -> None:
        """Do nothing: the next round reads the committed text."""


def find_drafter(name: str, pair: Pair) -> Drafter:
    """Return the drafter called `name`: `model`, or `lookup` (`lookup:4` looks for four tokens at most).

    Raises:
        InputError: there is none of that name.
    """
    kind, _, length = name.partition(":")
    if name == "model":
        return ModelDrafter(pair)
    if name == "lookup":
        return LookupDrafter(pair)
    if kind == "lookup" and length.isdigit() and int(length) > 0:
        return LookupDrafter(pair, int(length))
    raise InputError(f"--drafter: expected model, lookup or lookup:LENGTH, not {name!r}")
