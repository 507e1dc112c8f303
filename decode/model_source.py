"""The models of a pair as the source of rounds: the draft proposes, the target verifies, caches hold what both have read.

S texts are decoded side by side. What the models do, they do for all of them in one call; what is a text's own (its tokens,
its candidates in the order in which they were drawn, its random choices) is kept apart, in a `Stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array, DraftStep, DraftTree, StopPolicy
from ..policies.errors import InputError
from ..policies.features.history import History
from ..policies.features.summary import Token
from .candidates import draft_tree
from .drafted import Drafted
from .drafters import Drafter, Proposal
from .drafters.base import Chooses
from .models.cuda.graph import open_cache
from .models.cuda.transfer import upload
from .models.finite import FiniteRows, check_rows
from .models.long_rope import readable
from .models.packed import Part, TreeRows
from .models.pair import Pair
from .policy.reader import Logits
from .policy.round_reader import RoundReader
from .settings import Settings
from .stream import Anchor, Request, Stream, Text, sampled_rows, without_dead_ends
from .topology import Topology
from .verify.base import Verification
from .verify.noise import KeyedSource, Source
from .verify.sampling import Sampler, require_token


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
        padded: how many tokens a verification of so many is best filled up to, of one stream; none = it never is.
        source: makes the random source of a stream from (key, window); None = the keyed noise.
        streams: S.

    Attributes:
        texts: S, those that are decoded; None where there is none.
        streams: of the round that is played, those that have one.
        rows: [R, V] each, the target's logits after all places sent in it, stream by stream, and the processed ones.
    """

    texts: list[Text | None]
    streams: list[Stream]
    rows: tuple[Tensor, Tensor]

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
        streams: int = 1,
    ) -> None:
        self.pair, self.drafter, self.mode, self.topology, self.settings = pair, drafter, mode, topology, settings
        # What rejection sends to the target must not depend on tokens drawn later, so policies select level by level. For
        # the same reason a token that ends its branch is dropped as readily as any other: trimming is asked about it.
        self.asks_ended, self.selects_levels = mode.hides and trimming[0], mode.hides and trimming[1]
        self.eos = frozenset(() if settings.ignore_eos else pair.eos)
        self._keeps, self._layers = keeps, tuple(dict.fromkeys((*drafter.layers, *((-1,) if keeps[0] else ()))))
        self._padded = () if pair.ropes else padded  # filled up, a call could reach beyond a boundary of the factors
        self._chooses = drafter if isinstance(drafter, Chooses) else None
        self._source, self._temperature, self._size = source, settings.temperature, streams
        self.texts, self.streams = [None] * streams, []
        self._whole = [np.ones((streams, len(level)), dtype=bool) for level in topology.levels]  # [S, B] by depth
        self._open(0)

    def read_for(self, policy: StopPolicy, widths: dict[str, int]) -> None:
        """Show this policy what it wants to know, from now on; `widths` are those of hidden states."""
        self.reader = RoundReader(policy, widths, self._size, self.topology, self._temperature, self.streams)

    def reserve(self, tokens: int, shift: int = 0, offset: int = 0, is_shifted: bool = False) -> None:
        """Empty both caches, with room for texts of `tokens` and a round beyond them.

        Args:
            tokens: of the longest text.
            shift, offset: slots and positions of the target in excess of a text's tokens (`Request.excess`).
            is_shifted: whether the target has read a prompt by itself (`Request.read`).
        """
        beyond = max(len(self.topology), len(self._padded)) + 1  # the last round reads beyond the limit
        capacity = tokens + shift + beyond
        self._readable = capacity - shift
        if is_shifted:
            self.pair.check_length(tokens + offset)
        for role, limit, more in (("target", readable(self.pair.target), offset), ("draft", self.drafter.readable, 0)):
            self._readable = min(self._readable, limit - more)
            if tokens + more > limit:
                raise InputError(
                    f"prompt and new tokens are {tokens + more} together, but the {role} reads at most {limit}; "
                    "shorten the prompt or lower --max-new-tokens"
                )
        if self.target.capacity < capacity:
            self._open(capacity)
        else:
            self.target.refresh()
        self.drafter.reserve(self._size, capacity)
        self.texts = [None] * self._size

    def _open(self, capacity: int) -> None:
        pair, layers, size = self.pair, self._layers, self._size
        self.target = open_cache(
            pair.target, capacity, pair.vocabulary, layers, size, device=pair.device, reading=pair.readings[0]
        )

    def open(self, number: int, request: Request) -> Text:
        """Read a prompt with the target and draw the first roots; the drafter reads when it is first asked.

        Args:
            number: of the stream, whose text before has ended.
            request: its prompt, and how to decode it.
        """
        settings, device, prompt, read = self.settings, self.pair.device, list(request.prompt), request.read
        padding = list(request.padding)
        seen = [*padding, *prompt]
        shaping = request.shaping or settings.shaping
        processors = shaping.build(settings.temperature, len(seen), tuple(self.eos), device, seen)
        if read is None:
            self.target.roll_back(0, number)
            logits = self.target.read(upload([prompt], device), rows=1, stream=number)[0]
            states = self.target.states
            ids, told, shift = prompt, None if states is None else states[0], 0
        else:
            self.target.adopt(read, number)
            logits, ids, told, shift = read.logits, read.ids, read.states, read.slots - len(prompt)
        check_rows(logits)
        self.drafter.begin(number)
        self.drafter.committed(number, ids, self._told(told))
        sampler = Sampler(processors, settings.temperature, padding)
        anchor = Anchor(logits, 0, self._hidden(told))
        text = Text(prompt, len(prompt), self._open_source(request.key), sampler, [], anchor, shift=shift)
        self.texts[number] = text
        sampled = sampler(logits, lambda: [prompt])[0]
        if sampler.constrained:
            require_token(sampled)
        choices = text.choices(len(prompt), self._temperature == 0.0)
        text.roots = self.mode.start(sampled, self.topology.roots, choices)
        if not self.mode.deferred:
            self._extend(text, text.roots)
        return text

    def _open_source(self, key: int) -> Source:
        window, pair = self.topology.deepest + 1, self.pair
        if self._source is not None:
            return self._source(key, window)
        return KeyedSource(key, pair.vocabulary, window, pair.logits_dtype, pair.device)

    def _hidden(self, states: Tensor | None) -> Tensor | None:
        """Return [1, H], the last layer's of the last of [n, layers x H] states, if a policy or an observer wants it."""
        if states is None or not self._keeps[0]:
            return None
        width, at = states.shape[-1] // len(self._layers), self._layers.index(-1)
        return states[-1:, at * width : (at + 1) * width]

    def _told(self, states: Tensor | None) -> Tensor | None:
        """Return [n, layers x H], what the drafter is told of the target's states [n, .]."""
        layers = len(self.drafter.layers)
        if states is None or not layers:
            return None
        return states[:, : states.shape[-1] // len(self._layers) * layers]  # the drafter's layers are the first ones

    def begin(self) -> tuple[Array, Array, Array, Array, Array | None]:
        """See `rounds.RoundSource`."""
        deferred, greedy, deepest = self.mode.deferred, self._temperature == 0.0, self.topology.deepest
        begun = [(number, text) for number, text in enumerate(self.texts) if text is not None and not text.ended]
        self.streams = [Stream.begin(number, text, self.topology, deferred, greedy, self.eos) for number, text in begun]
        active, context = np.zeros(self._size, dtype=bool), np.zeros(self._size, dtype=np.int64)
        limit: Array | None = None
        for (number, text), own in zip(begun, self.streams, strict=True):
            active[number], context[number] = True, len(text.tokens)
            allowed = self.settings.max_new_tokens - text.generated - 1  # one place is the target's
            allowed = min([allowed, *(rope.allowed(own.base, allowed) for rope in self.pair.ropes)])
            if allowed < deepest:
                limit = np.full(self._size, deepest) if limit is None else limit
                limit[number] = allowed
        self.reader.begin(self.streams)
        alive = self._grown = self._marked(0, [own.latest for own in self.streams])  # known again in `grow`
        return active, alive, context, self.drafter.backlog(), limit

    def drafted_unread(self, found: Drafted) -> Array | None:
        """See `rounds.RoundSource`."""
        if (chooses := self._chooses) is None:
            return None
        drafted = enumerate((found.drafted > 0).tolist())  # else no drafter may have been called
        return np.array([some and not chooses.reads(number) for number, some in drafted])

    def step(self, depth: int, alive: Array, history: History) -> DraftStep:
        """See `rounds.RoundSource`."""
        return self.reader.step(depth, alive, history)

    def grow(self, depth: int, feeding: Array) -> tuple[Array, Array]:
        """See `rounds.RoundSource`."""
        tree, fed = self.topology, [own.latest for own in self.streams]
        if feeding is not self._grown and np.count_nonzero(feeding) < sum(map(len, fed)):
            first = tree.spans[depth].start
            for at, own in enumerate(self.streams):
                row = feeding[own.number].tolist()
                fed[at] = [place for place in own.latest if row[own.found.rows[place] - first]]
        if self.reader.passed:  # before what is drawn next takes its place
            self.note()
        places, logits = self.draw(fed)
        self.reader.drawn(depth + 1, places, logits)
        drawn = self._grown = self._marked(depth + 1, places)
        if any(own.ended for own in self.streams):
            going = [[p for p in own.latest if p not in own.ended] for own in self.streams]
            return drawn, self._marked(depth + 1, going)
        return drawn, drawn

    def _marked(self, depth: int, places: Sequence[Sequence[int]]) -> Array:
        """Return [S, B] bool, the rows of a depth that these places of the streams of the round stand at."""
        whole = self._whole[depth]
        if sum(map(len, places)) == whole.size:
            return whole
        marked, first = np.zeros_like(whole), self.topology.spans[depth].start
        for own, some in zip(self.streams, places, strict=True):
            for place in some:
                marked[own.number, own.found.rows[place] - first] = True
        return marked

    def draw(self, fed: list[list[int]]) -> tuple[list[list[int]], Logits | None]:
        """Feed places, draw below them, and return the new places with the logits that they were drawn from.

        Args:
            fed: by stream of the round, all of one depth.
        """
        streams = self.streams
        for own in streams:
            own.latest, own.ended = [], set()
        asked, places = _feeding(streams, fed)
        proposal = self.feed(asked, places)
        raw, states = proposal.dense(self.pair.vocabulary), proposal.states if self._keeps[1] else None
        sampled, untruncated = sampled_rows(asked, places, raw)
        # The drafter may know of no token, and a grammar may leave none.
        if proposal.ids is not None or any(own.text.sampler.constrained for own in asked):
            known = torch.isfinite(sampled).any(-1).tolist()
            rows = iter(known)
            asked, places = _feeding(asked, [[place for place in some if next(rows)] for some in places])
            raw, sampled = raw[known], sampled[known]
            untruncated = None if untruncated is None else untruncated[known]
            states = None if states is None else states[known]
            if not asked:
                return [own.latest for own in streams], None
        children = self.topology.children
        below = [children[own.found.rows[place]] for own, some in zip(asked, places, strict=True) for place in some]
        drawn = self.mode.draw(
            sampled,
            [len(rows) for rows in below],
            [own.turn(some) for own, some in zip(asked, places, strict=True)],
        )
        tokens: list[Token] = []
        row = 0
        for own, some in zip(asked, places, strict=True):
            found = own.found
            for place in some:
                if drawn.source is not None:
                    found.drawn_from[place] = drawn.source[row]
                siblings = list(zip(below[row], drawn.tokens[row], strict=False))  # fewer where no more are known
                for rank, (node, token) in enumerate(siblings):
                    own.latest.append(new := found.add(place, node, token))
                    if token in self.eos:
                        own.ended.add(new)
                    tokens.append((row, token, found.tokens[place], rank, len(siblings), found.depth[new]))
                row += 1
        if not tokens:  # rows that no token can be drawn from
            return [own.latest for own in streams], None
        shaped = sampled if self._temperature > 0 and any(o.text.sampler.reads_prefix for o in asked) else None
        untruncated = None if shaped is None else untruncated
        logits = Logits(raw, tokens, shaped, drawn.scores, states, drawn.best, untruncated)
        return [own.latest for own in streams], logits

    def feed(self, streams: Sequence[Stream], places: Sequence[Sequence[int]]) -> Proposal:
        """Return what the drafter proposes after places of streams."""
        return self.drafter.propose([own.number for own in streams], [own.found for own in streams], places)

    def note(self) -> None:
        """Read what the policy was not asked about, for the paths through it."""
        self.reader.read()

    def tree(self, sent: Array) -> DraftTree:
        """See `rounds.RoundSource`."""
        found = {own.number: own.found for own in self.streams}
        return draft_tree([found.get(number) for number in range(self._size)], sent, self.mode.hides)

    def verify(self, found: Drafted) -> Array:
        """See `rounds.RoundSource`."""
        streams, accepted = self.streams, np.zeros(self._size, dtype=np.int64)
        less = found.verified < found.drafted
        for own in streams:
            own.select(found.sent[own.number].tolist() if less[own.number] else None)
        raw, finite = self.read(streams)
        sampled, require = without_dead_ends(streams, raw, sampled_rows(streams, [own.sent for own in streams], raw)[0])
        with finite:  # on a device it is checked while it is waited for anyway
            results = self.mode.accept([own.turn(own.sent) for own in streams], sampled)
        self.rows, first = (raw, sampled), 0
        for own, (path, roots) in zip(streams, results, strict=True):
            own.first, first = first, first + len(own.sent)
            require(own, path[-1])
            own.path, own.text.roots, own.found.accepted = path, roots, path
            accepted[own.number] = len(path) - 1
        return accepted

    def read(self, streams: Sequence[Stream]) -> tuple[Tensor, FiniteRows]:
        """Return the target's raw logits [R, V] of what follows each place sent, stream by stream, and the check of them."""
        parts, padding = [], 0
        for own in streams:
            tokens = [own.found.tokens[place] for place in own.sent]
            if own.sends_path:
                padding = self._padding(streams) if own is streams[-1] else 0  # its rows are the last
                parts.append(Part(own.number, tokens + tokens[-1:] * padding))
            else:
                rows = [own.found.rows[place] for place in own.sent]
                parts.append(Part(own.number, tokens, tree=TreeRows(self.topology, own.slot, [], rows)))
        logits = self.target.read_parts(parts)
        if padding:
            logits = logits[:-padding]
        return logits, FiniteRows(logits)

    def _padding(self, streams: Sequence[Stream]) -> int:
        """Return how many tokens the last stream reads again to fill a verification up: a larger one may be cheaper."""
        last, sent = streams[-1], sum(len(own.sent) for own in streams)
        more = 0
        if len(streams) == 1 and sent <= len(self._padded):
            more = self._padded[sent - 1] + 1 - sent  # the table counts drafted tokens, `sent` the root too
        return more if last.base + len(last.sent) + more <= self._readable else 0

    def commit(self, found: Drafted) -> tuple[Array, Array]:
        """Append accepted paths, and the next roots unless they are deferred; compact both caches along the paths."""
        committed, ended = np.zeros(self._size, dtype=np.int64), np.zeros(self._size, dtype=bool)
        states, (raw, _) = self.target.states, self.rows
        for own in self.streams:
            text, path, sent = own.text, own.path, own.sent
            rows = path if len(sent) == len(own.found.rows) else [sent.index(place) for place in path]
            self.target.keep(own.slot, [own.slot + row for row in rows], own.number)
            accepted = [own.found.tokens[place] for place in path]
            told = None if states is None else states[0, [own.first + row for row in rows]]  # [path, layers x H]
            self.drafter.committed(own.number, accepted, self._told(told))
            text.anchor = Anchor(raw, own.first + rows[-1], self._hidden(told))  # that the next roots were drawn from
            new = accepted if self.mode.deferred else [*accepted[1:], *text.roots]  # one root is text already
            committed[own.number], ended[own.number] = self._extend(text, new), text.ended
        return committed, ended

    def _extend(self, text: Text, new: Sequence[int]) -> int:
        settings = self.settings
        return text.extend(new, settings.max_new_tokens, self.eos, settings.stops)


def _feeding(streams: list[Stream], places: list[list[int]]) -> tuple[list[Stream], list[list[int]]]:
    """Return the streams that have places, and these."""
    if all(places):
        return streams, places
    return [own for own, some in zip(streams, places, strict=True) if some], [some for some in places if some]
