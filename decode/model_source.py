"""The models of a pair as the source of rounds: the draft proposes, the target verifies, caches hold what both have read.

One stream so far: its text is a list, its candidates are listed in the order in which they were drawn, and its caches are
written in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array, DraftStep, DraftTree, StopPolicy
from ..policies.errors import InputError
from ..policies.features.history import History
from .candidates import Candidates
from .drafted import Drafted
from .drafters import Drafter, Proposal
from .models.cuda_graph import open_cache
from .models.finite import FiniteRows, check_rows
from .models.pair import Pair, readable
from .models.transfer import upload
from .reader import Base, Level, Logits, Reader
from .settings import Settings, Text
from .topology import Topology
from .verify.base import Verification
from .verify.noise import Choices, KeyedSource, Source
from .verify.sampling import Sampler

_ACTIVE = np.ones(1, dtype=bool)


class ModelSource:
    """See `rounds.RoundSource`.

    Args:
        pair: target and draft.
        drafter: proposes.
        mode: draws candidates and accepts them.
        topology: of a round, no deeper than settings and policy allow.
        settings: of the run.
        trimming: whether the policy may leave drawn tokens out, of those that were drawn (`trims`) and at all.
        keeps: whether the target's hidden states are wanted, and the draft's.
        padded: how many tokens a verification of so many is best filled up to; none = it never is.
        source: makes the random source of a stream from (key, window); None = the keyed noise.

    Attributes:
        text: that is decoded; `found`, `sent`, `path`: its last round's candidates, what the target read of them, and
            what it accepted.
        raw, sampled: [len(sent), V] the target's logits there, and the processed ones.
    """

    text: Text
    found: Candidates
    _ended: set[int]  # places drawn last that end their branch
    sent: list[int]
    path: list[int]
    raw: Tensor
    sampled: Tensor

    def __init__(
        self,
        pair: Pair,
        drafter: Drafter,
        mode: Verification,
        topology: Topology,
        settings: Settings,
        trimming: tuple[bool, bool],
        keeps: tuple[bool, bool],
        padded: Sequence[int] = (),
        source: Callable[[int, int], Source] | None = None,
    ) -> None:
        self.pair, self.drafter, self.mode, self.topology, self.settings = pair, drafter, mode, topology, settings
        # What rejection sends to the target must not depend on tokens drawn later, so policies select level by level. For
        # the same reason a token that ends its branch is dropped as readily as any other: trimming is asked about it.
        self.asks_ended, self.selects_levels = mode.hides and trimming[0], mode.hides and trimming[1]
        self.eos = frozenset(() if settings.ignore_eos else pair.eos)
        self._keeps, self._layers = keeps, tuple(dict.fromkeys((*drafter.layers, *((-1,) if keeps[0] else ()))))
        if pair.engines[0] == "compact" and set(self._layers) - {-1}:
            raise InputError(
                f"{type(drafter).__name__} wants states of the target's layers: load it with --engine plain"
            )
        self._padded, self._source, self._temperature = padded, source, settings.temperature
        self._whole = [np.ones((1, len(level)), dtype=bool) for level in topology.levels]
        self.target = open_cache(pair.target, 0, pair.vocabulary, self._layers)

    def read_for(self, policy: StopPolicy, widths: dict[str, int]) -> None:
        """Show this policy what it wants to know, from now on; `widths` are those of hidden states."""
        self.reader = Reader(policy, widths)
        self._base: Base | None = None
        self._level: Level | None = None

    def reserve(self, tokens: int) -> None:
        """Empty both caches, with room for `tokens` and a round beyond them."""
        capacity = tokens + max(len(self.topology), len(self._padded)) + 1
        self._readable = capacity
        for role, limit in (("target", readable(self.pair.target)), ("draft", self.drafter.readable)):
            self._readable = min(self._readable, limit)
            if tokens > limit:
                raise InputError(
                    f"prompt and new tokens are {tokens} together, but the {role} reads at most {limit}; "
                    "shorten the prompt or lower --max-new-tokens"
                )
        if self.target.capacity < capacity:
            self.target = open_cache(self.pair.target, capacity, self.pair.vocabulary, self._layers)
        self.target.roll_back(0)
        self.drafter.reserve(1, capacity)

    def open(self, prompt: list[int], key: int, padding: Sequence[int]) -> Text:
        """Read a prompt with the target and draw the first roots; the drafter reads when it is first asked."""
        if not prompt:
            raise InputError("the prompt is empty: expected at least one token")
        settings, device = self.settings, self.pair.device
        self.reserve(len(prompt) + settings.max_new_tokens)
        seen = len(padding) + len(prompt)
        processors = settings.shaping.build(settings.temperature, seen, tuple(self.eos), device)
        logits = self.target.read(upload([prompt], device), rows=1)[0]
        check_rows(logits)
        self.drafter.committed(0, prompt, self._told(slice(None)))
        sampler = Sampler(processors, settings.temperature, padding)
        self.text = text = Text(prompt, len(prompt), self._open_source(key), sampler, [], logits, self._hidden(-1))
        sampled = sampler(logits, lambda: [prompt])[0]
        text.roots = self.mode.start(sampled, self.topology.roots, self._choices(len(prompt)))
        if not self.mode.deferred:
            self._extend(text.roots)
        return text

    def _open_source(self, key: int) -> Source:
        window, pair = self.topology.deepest + 1, self.pair
        if self._source is not None:
            return self._source(key, window)
        return KeyedSource(key, pair.vocabulary, window, pair.logits_dtype, pair.device)

    def _hidden(self, row: int) -> Tensor | None:
        """Return [1, H], the target's last hidden state of a row of its last call, if a policy or an observer wants it."""
        states = self.target.states
        if states is None or not self._keeps[0]:
            return None
        width, at = states.shape[-1] // len(self._layers), self._layers.index(-1)
        return states[:, row, at * width : (at + 1) * width]

    def _told(self, rows: slice | list[int]) -> Tensor | None:
        """Return [n, layers x H], what the drafter is told of rows of the target's last call."""
        states, layers = self.target.states, len(self.drafter.layers)
        if states is None or not layers:
            return None
        return states[0, rows, : states.shape[-1] // len(self._layers) * layers]

    def _choices(self, position: int) -> Choices:
        """Return the random choices of the next round, whose roots stand at `position`."""
        text = self.text
        choices = Choices(text.source, text.round, position, self._temperature == 0.0)
        text.round += 1
        return choices

    def begin(self) -> tuple[Array, Array, Array, Array, Array | None]:
        """See `rounds.RoundSource`."""
        text = self.text
        context = len(text.tokens)
        self.base = context if self.mode.deferred else context - 1
        self.before = text.anchor_row, text.hidden
        self.choices = self._choices(self.base)
        self.found = Candidates.at(text.roots, self.topology)
        self._latest = list(range(len(text.roots)))
        self._base = self._level = None
        allowed = self.settings.max_new_tokens - text.generated - 1  # one place is the target's
        alive = self._grown = self._marked(0, [place for place in self._latest if text.roots[place] not in self.eos])
        limit = np.array([allowed]) if allowed < self.topology.deepest else None
        return _ACTIVE, alive, np.array([context]), self.drafter.backlog(), limit

    def step(self, depth: int, alive: Array, history: History) -> DraftStep:
        """See `rounds.RoundSource`."""
        text = self.text
        if self._base is None:
            before = text.tokens[self.base - 1]
            self._base = self.reader.base(
                text.anchor_row, text.roots[0], before, history, self._temperature, text.hidden
            )
        return self.reader.step(depth, self._base, self._level, self.found, alive)

    def grow(self, depth: int, feeding: Array) -> tuple[Array, Array]:
        """See `rounds.RoundSource`."""
        found, tree, places = self.found, self.topology, self._latest
        if feeding is not self._grown and np.count_nonzero(feeding) < len(places):
            fed, first = feeding[0].tolist(), tree.spans[depth].start
            places = [place for place in places if fed[found.rows[place] - first]]
        self._latest, logits = self.draw(places)
        if logits is not None and self.reader.wants(depth + 1, tree.deepest):
            self.note(self._latest, logits)
        drawn = self._grown = self._marked(depth + 1, self._latest)
        if self._ended:
            return drawn, self._marked(depth + 1, [place for place in self._latest if place not in self._ended])
        return drawn, drawn

    def _marked(self, depth: int, places: Sequence[int]) -> Array:
        """Return [1, B] bool, the rows of a depth that these places stand at."""
        whole, span = self._whole[depth], self.topology.spans[depth]
        if len(places) == whole.size:
            return whole
        marked = [False] * whole.size
        for place in places:
            marked[self.found.rows[place] - span.start] = True
        return np.array([marked])

    def draw(self, feeding: list[int]) -> tuple[list[int], Logits | None]:
        """Feed places, draw below them, and return the new places with the logits that they were drawn from."""
        text, found, base = self.text, self.found, self.base
        self._ended = set()
        proposal = self.feed(feeding)
        raw, states = proposal.dense(self.pair.vocabulary), proposal.states if self._keeps[1] else None
        sampler = text.sampler
        sampled = sampler(raw, lambda: [[*text.tokens[:base], *found.tokens_to(place)] for place in feeding])
        if proposal.ids is not None:  # it may know of no token
            known = torch.isfinite(sampled).any(-1).tolist()
            feeding = [place for place, any_ in zip(feeding, known, strict=True) if any_]
            raw, sampled = raw[known], sampled[known]
            if sampler.untruncated is not None:
                sampler.untruncated = sampler.untruncated[known]
            states = None if states is None else states[known]
            if not feeding:
                return [], None
        below = [self.topology.children[found.rows[place]] for place in feeding]
        drawn = self.mode.draw(sampled, [len(rows) for rows in below], found, feeding, self.choices)
        places, owner = [], []
        for at, place in enumerate(feeding):
            if drawn.source is not None:
                found.drawn_from[place] = drawn.source[at]
            for row, token in zip(below[at], drawn.tokens[at], strict=False):  # fewer where the draft knows no more
                places.append(new := found.add(place, row, token))
                if token in self.eos:
                    self._ended.add(new)
                owner.append(at)
        if not places:  # rows that no token can be drawn from
            return [], None
        shaped = sampled if sampler.reads_prefix and self._temperature > 0 else None
        untruncated = sampler.untruncated if shaped is not None else None
        return places, Logits(raw, shaped, drawn.scores, owner, states, drawn.best, untruncated)

    def feed(self, feeding: list[int]) -> Proposal:
        """Return what the drafter proposes after places."""
        return self.drafter.propose([self.found], [feeding])

    def note(self, places: Sequence[int], logits: Logits) -> None:
        """Take from the logits of the tokens just drawn what a policy will be shown."""
        self._level = self.reader.level(self.found, places, logits, self._temperature, self._level)

    def tree(self, sent: Array) -> DraftTree:
        """See `rounds.RoundSource`."""
        return self.found.tree(sent, self.mode.hides)

    def verify(self, found: Drafted) -> Array:
        """See `rounds.RoundSource`."""
        drawn = self.found
        self.sent = sent = list(range(len(drawn.rows)))
        if found.verified[0] < found.drafted[0]:
            rows = found.sent[0].tolist()
            self.sent = sent = [place for place in sent if rows[drawn.rows[place]]]
        text, base = self.text, self.base
        self.raw, finite = self.read(sent)
        self.sampled = text.sampler(self.raw, lambda: [[*text.tokens[:base], *drawn.tokens_to(p)] for p in sent])
        with finite:
            self.path, text.roots = self.mode.accept(drawn, sent, self.sampled, self.choices)
        drawn.accepted = self.path
        return np.array([len(self.path) - 1])

    def read(self, sent: list[int]) -> tuple[Tensor, FiniteRows]:
        """Return the target's raw logits [len(sent), V] of what follows each place sent, and the check of them."""
        found = self.found
        tokens = [found.tokens[place] for place in sent]
        if len(sent) == found.depth[sent[-1]] + 1:  # a single path
            padding = self._padding(len(self.text.tokens), len(sent) - 1)
            read = upload([tokens + tokens[-1:] * padding], self.pair.device)
            logits = self.target.read(read)[0, : len(sent)]
        else:
            rows = [found.rows[place] for place in sent]
            logits = self.target.read_tree(tokens, self.base, found.topology, [], rows)[0]
        return logits, FiniteRows(logits)

    def _padding(self, context: int, proposed: int) -> int:
        """Return how many tokens to fill a verification up with: a larger one may be cheaper."""
        size = self._padded[proposed] if proposed < len(self._padded) else proposed
        return size - proposed if context + size <= self._readable else 0

    def commit(self, found: Drafted) -> tuple[Array, Array]:
        """Append the accepted path, and the next root unless it is deferred; compact both caches along the path."""
        text, drawn, path, base = self.text, self.found, self.path, self.base
        row = {place: at for at, place in enumerate(self.sent)}
        rows = [row[place] for place in path]
        self.target.keep(base, [base + at for at in rows])
        accepted = [drawn.tokens[place] for place in path]
        self.drafter.committed(0, accepted, self._told(rows))
        last = rows[-1]
        text.anchor_row, text.hidden = self.raw[last : last + 1], self._hidden(last)
        committed = self._extend(accepted if self.mode.deferred else [*accepted[1:], *text.roots])
        return np.array([committed]), np.array([text.ended])

    def _extend(self, new: Sequence[int]) -> int:
        """Commit tokens one by one until the text ends: EOS, a stopping criterion, the limit. Return their number."""
        text = self.text
        before = len(text.tokens)
        for token in new:
            text.tokens.append(token)
            text.ended = text.generated >= self.settings.max_new_tokens or token in self.eos or self._stops()
            if text.ended:
                break
        return len(text.tokens) - before

    def _stops(self) -> bool:
        """Ask transformers' stopping criteria, as plain decoding does after each token."""
        if not self.settings.stops:
            return False
        ids = torch.tensor([[*self.text.sampler.padding, *self.text.tokens]], device=self.pair.device)
        return any(bool(torch.as_tensor(stop(ids, None)).all()) for stop in self.settings.stops)
