"""Where candidates come from: a draft model, the text itself (prompt lookup), or what a plugin brings."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array
from ..policies.errors import InputError, PolicyError, close_match
from ..policies.plugin_code import loading
from ..policies.storage.registry import SWITCH
from .candidates import Candidates
from .captured import open_cache
from .finite import check_rows
from .hidden import hidden_width
from .pair import ENDLESS, Pair, readable
from .transfer import upload

GROUP = "specstop.drafters"
"""The entry points of plugins: functions or classes that make a drafter of a pair."""


@dataclass(slots=True)
class Proposal:
    """What a drafter says of the tokens that may come after R places.

    Attributes:
        scores: [R, V] logits or log-probabilities; of a sparse proposal [R, n] those of the tokens `ids`. A row that knows
            fewer tokens, or none, ends in -inf.
        ids: [R, n] int64; None = all tokens in their order.
        states: [R, H] the hidden states that the scores were computed from, where they are kept (`hidden.KeepsStates`).
    """

    scores: Tensor
    ids: Tensor | None = None
    states: Tensor | None = None

    def dense(self, vocabulary: int) -> Tensor:
        """Return [R, V] scores, -inf for the tokens that are not proposed."""
        if self.ids is None:
            return self.scores
        rows = self.scores.new_full((len(self.scores), vocabulary), -torch.inf)
        return rows.scatter_reduce_(1, self.ids, self.scores, "amax")


class Drafter(Protocol):
    """Proposes candidates for S streams, and is told what was committed.

    Places are fed depth by depth, so a drafter that knows all depths after one pass (heads on the target) answers the later
    calls from what it kept, and leaves the choice of what to verify to the policy's `select`.

    Attributes:
        layers: of the target, whose hidden states it wants to be told, as transformers counts `hidden_states`: 0 = the
            embeddings, -1 = what the output layer reads. None for none.
        readable: the longest text that it reads.
    """

    layers: tuple[int, ...]
    readable: int

    def reserve(self, streams: int, tokens: int) -> None:
        """Forget all texts, and make room for as many of `tokens`, those of a round's candidates included."""

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """Take in what the target has read of a text for good: the prompt, then each round's root and accepted path.

        Candidates that are not on the path (`Candidates.accepted`) are forgotten.

        Args:
            stream: of the text.
            tokens: n, in their order. What the target drew last it has not read: that is the root of the next round.
            states: [n, layers x H] its hidden states at these tokens, layer by layer, if `layers` are wanted.
        """

    def backlog(self) -> Array:
        """Return [S] int64, the committed tokens that it has to read before it can propose, the root included."""

    def propose(self, found: Sequence[Candidates], feeding: Sequence[Sequence[int]]) -> Proposal:
        """Return what may come after places, stream by stream.

        Args:
            found: S, drafted so far.
            feeding: S, places of one depth; all their parents were fed before.
        """


class ModelDrafter:
    """A smaller language model of the same tokenizer, for one stream.

    Args:
        pair: whose draft it is.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, pair: Pair) -> None:
        self._pair, self._draft = pair, pair.draft_model
        self.readable = readable(self._draft)
        self._hidden = False
        self._model = open_cache(self._draft, 0, pair.vocabulary)
        self._looked_at = False  # the first logits of a text tell a broken model
        self._text: list[int] = []
        self._found: Candidates | None = None
        self._fed: list[int] = []  # places in the cache, in the order of its slots after the text

    def keep_states(self) -> int:
        """See `hidden.KeepsStates`."""
        if not self._hidden:
            self._hidden = True
            self._model = open_cache(self._draft, 0, self._pair.vocabulary, True)
        return hidden_width(self._draft)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        if self._model.capacity < tokens:
            self._model = open_cache(self._draft, tokens, self._pair.vocabulary, self._hidden)
        self._model.roll_back(0)
        self._text, self._found = [], None
        self._looked_at = False

    def prepare(self, lengths: Sequence[int]) -> None:
        """Do ahead what drafting chains in texts of these lengths takes to be done once (`CachedModel.prepare`)."""
        self._model.prepare([(1, 1), (2, 1)], lengths)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        found, base = self._found, len(self._text)
        if found is not None and self._model.length > base:  # else nothing was drafted, and the backlog grows
            slot = {place: base + at for at, place in enumerate(self._fed)}
            self._model.keep(base, [slot[place] for place in found.accepted if place in slot])
        self._found = None
        self._text.extend(tokens)

    def backlog(self) -> Array:
        """See `Drafter`."""
        return np.array([len(self._text) + 1 - self._model.length])

    def propose(self, found: Sequence[Candidates], feeding: Sequence[Sequence[int]]) -> Proposal:
        """See `Drafter`."""
        (here,), (places,) = found, feeding
        depth, base = here.depth[places[0]], len(self._text)
        tokens = [here.tokens[place] for place in places]
        if depth == 0:
            self._found, self._fed = here, []
            unread = self._text[self._model.length :]
            if here.roots > 1 and unread:  # the roots do not see each other
                self._read(unread)
            elif here.roots == 1:
                tokens = unread + tokens
        if len(places) == 1 and len(self._fed) == depth:  # all it has read leads to this place
            logits = self._read(tokens)
        else:
            before, rows = ([here.rows[place] for place in some] for some in (self._fed, places))
            logits = self._model.read_tree(tokens, base, here.topology, before, rows)[0]
        if not self._looked_at:
            check_rows(logits, "draft")
            self._looked_at = True
        self._fed.extend(places)
        states = self._model.states
        return Proposal(logits, None, None if states is None else states[0, -len(logits) :])

    def _read(self, tokens: Sequence[int]) -> Tensor:
        return self._model.read(upload([list(tokens)], self._pair.device), rows=1)[0]


class LookupDrafter:
    """Prompt lookup: what followed the longest earlier occurrence of the last tokens, weighted by how often (free).

    Saxena's prompt lookup decoding takes one occurrence; the counts of all of them make a distribution, so that trees
    and sampling work as with any draft. Later occurrences win between equals. It needs no draft model.

    Args:
        pair: for the vocabulary and the device.
        longest: tokens of context to look for, at most.
    """

    layers: tuple[int, ...] = ()
    readable = ENDLESS

    def __init__(self, pair: Pair, longest: int = 3) -> None:
        if longest < 1:
            raise InputError(f"lookup: expected a length of 1 or more, not {longest}")
        self._device, self._dtype, self._longest = pair.device, pair.logits_dtype, longest
        self.reserve(1, 0)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        self._texts: list[list[int]] = [[] for _ in range(streams)]
        self._index: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(streams)]
        self._ahead = [0] * streams  # 1 where the root of a round has been noted already

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        for token in tokens[self._ahead[stream] :]:
            self._note(stream, token)
        self._ahead[stream] = 0

    def _note(self, stream: int, token: int) -> None:
        """Note what came after every run of tokens that ends the text."""
        text, index = self._texts[stream], self._index[stream]
        for length in range(1, min(self._longest, len(text)) + 1):
            index.setdefault(tuple(text[-length:]), []).append(token)
        text.append(token)

    def backlog(self) -> Array:
        """Return zeros: reading is free."""
        return np.zeros(len(self._texts), dtype=np.int64)

    def propose(self, found: Sequence[Candidates], feeding: Sequence[Sequence[int]]) -> Proposal:
        """See `Drafter`."""
        rows = []
        for stream, (here, places) in enumerate(zip(found, feeding, strict=True)):
            if here.depth[places[0]] == 0 and here.roots == 1:  # committed, though the target has not read it
                self._note(stream, here.tokens[0])
                self._ahead[stream] = 1
            rows += [self._followers(stream, here.tokens_to(place)[self._ahead[stream] :]) for place in places]
        most = max(1, *map(len, rows))
        ids = [[*row, *[0] * (most - len(row))] for row in rows]
        weights = [[*row.values(), *[0.0] * (most - len(row))] for row in rows]
        scores = torch.tensor(weights, dtype=self._dtype, device=self._device).log_()
        return Proposal(scores, upload(ids, self._device))

    def _followers(self, stream: int, path: Sequence[int]) -> dict[int, float]:
        """Return the weights of the tokens that came after the longest known suffix; a later one counts a trifle more."""
        prefix = [*self._texts[stream][-self._longest :], *path]
        for length in range(min(self._longest, len(prefix)), 0, -1):
            seen = self._index[stream].get(tuple(prefix[-length:]))
            if seen:
                last = {token: at for at, token in enumerate(seen)}
                return {t: n + 1e-3 * (last[t] + 1) / len(seen) for t, n in Counter(seen).items()}
        return {}


BUILTINS: dict[str, tuple[Callable[..., Drafter], str]] = {
    "model": (ModelDrafter, ""),
    "lookup": (LookupDrafter, "longest"),
}
"""By name: what makes a drafter of a pair, and the parameter that a number after the colon sets."""


def find_drafter(name: str, pair: Pair) -> Drafter:
    """Return the drafter that a spec names.

    Args:
        name: `model`, `lookup`, `lookup:4` (looks for four tokens at most), or a plugin's: `name?key=value`.
        pair: that it drafts for.

    Raises:
        InputError: there is none of that name, or it cannot be made so.
    """
    kind, _, query = name.partition("?")
    kind, colon, number = kind.partition(":")
    build, parameter = BUILTINS.get(kind, (None, ""))
    options: dict[str, Any] = {}
    if colon:
        if not parameter or not number.isdigit() or int(number) < 1:
            raise _unknown(name)
        options[parameter] = int(number)
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise InputError(f"--drafter: {name!r}: expected key=value after the question mark, not {part!r}")
        options[key] = int(value) if value.isdigit() else value
    if build is not None:
        _check_options(name, build, pair, options)
        return build(pair, **options)
    point = _plugin(kind)
    if point is None:
        raise _unknown(name)
    try:
        with loading("--drafter", f"loading {name!r} ({point.value})"):
            found: Callable[..., Drafter] = point.load()
        _check_options(name, found, pair, options)
        with loading("--drafter", f"making {name!r} ({point.value})"):
            return found(pair, **options)
    except PolicyError as error:  # what a plugin raised, told in a line
        raise InputError(str(error)) from None


def _check_options(name: str, build: Callable[..., Drafter], pair: Pair, options: dict[str, Any]) -> None:
    try:
        inspect.signature(build).bind(pair, **options)
    except TypeError as error:
        raise InputError(f"--drafter: {name!r}: {error}") from None


def _installed() -> list[EntryPoint]:
    """Return the entry points of plugins; none where `SPECSTOP_PLUGINS=0` turns them off."""
    return [] if os.environ.get(SWITCH) == "0" else list(entry_points(group=GROUP))


def _plugin(name: str) -> EntryPoint | None:
    """Return the entry point of an installed plugin; None where there is none."""
    points = [point for point in _installed() if point.name == name]
    if len(points) > 1:
        raise InputError(f"--drafter: two drafters are called {name!r}; uninstall one")
    return points[0] if points else None


def _unknown(name: str) -> InputError:
    known = sorted({*BUILTINS, *(point.name for point in _installed())})
    others = [kind for kind in known if kind not in BUILTINS]
    more = f", or a plugin's ({', '.join(others)})" if others else ""
    meant = close_match(name, known)
    return InputError(f"--drafter: expected model, lookup or lookup:LENGTH{more}, not {name!r}{meant}")
