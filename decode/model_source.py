"""The models of a pair as the source of rounds: the draft proposes, the target verifies, caches hold what both have read.

S texts are decoded side by side; each model reads for all of them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array, DraftStep, DraftTree, StopPolicy
from ..policies.errors import InputError
from ..policies.history import History
from .drafters import Drafter, FallbackDrafter
from .feature_reader import FeatureReader
from .hooks import Hook, Timer
from .models.attention import Part, TreeRows
from .models.cuda import open_cache
from .models.device import upload
from .models.outputs import FiniteRows, check_rows
from .models.pair import Pair
from .models.view import readable
from .round_state import DraftScores, RoundState, Rows
from .settings import Settings
from .texts import Anchor, Request, Text
from .topology import Topology
from .verify.base import Verification
from .verify.noise import Choices, KeyedSource
from .verify.sampler import Sampler, require_token


class ModelSource:
    """See `rounds.RoundSource`.

    Args:
        pair: target and draft.
        drafter: proposes candidates.
        mode: draws candidates and accepts them.
        topology: of a round, no deeper than settings and policy allow.
        settings: of the run.
        timer: is given the laps of draft, verification and policy.
        trimming: whether the policy may leave out candidates right after they were drawn (`trims`), and at all.
        keeps: whether the last hidden states of the target are kept, and of the draft.
        padded: by number of candidates, the number that their verification is padded to; () = never.
        source: makes the random source of a stream from (key, window); None = the keyed noise.
        streams: S.
        hooks: observe draft steps and verifications.

    Attributes:
        texts: by stream, the text that is decoded; None = the stream is free.
    """

    texts: list[Text | None]

    def __init__(
        self,
        pair: Pair,
        drafter: Drafter,
        mode: Verification,
        topology: Topology,
        settings: Settings,
        timer: Timer,
        trimming: tuple[bool, bool],
        keeps: tuple[bool, bool],
        padded: Sequence[int] = (),
        source: Callable[[int, int], KeyedSource] | None = None,
        streams: int = 1,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.pair, self.drafter, self.mode, self.topology, self.settings = pair, drafter, mode, topology, settings
        self.timer, self._hooks = timer, hooks
        # What rejection sends must not depend on tokens drawn later, so policies select level by level. For the same reason
        # policies that trim are also asked about candidates that end a text.
        self.asks_ended, self.selects_levels = mode.hides and trimming[0], mode.hides and trimming[1]
        self.eos = frozenset(() if settings.ignore_eos else pair.eos)
        self._keeps, self._layers = keeps, tuple(dict.fromkeys((*drafter.layers, *((-1,) if keeps[0] else ()))))
        self._padded = () if pair.ropes else padded  # padding could pass the length at which a rope changes
        self._source, self._temperature, self._size = source, settings.temperature, streams
        self.texts = [None] * streams
        self._all_drawn = [np.ones((streams, len(level)), dtype=bool) for level in topology.levels]  # [S, B] by depth
        extending = [[row for row in level if topology.children[row]] for level in topology.levels]
        self._all_fed: list[Rows] = [[(stream, rows) for stream in range(streams)] for rows in extending]
        self._round: RoundState | None = None
        self._open(0)

    def read_for(self, policy: StopPolicy, widths: dict[str, int]) -> None:
        """Read the features of this policy from now on; `widths` are those of hidden states."""
        self.reader = FeatureReader(policy, self.topology, self._temperature, widths, self._size)
        if self._round is not None:  # a policy may take over in the middle of a round
            self.reader.begin(self._round)

    def reserve(self, tokens: int, shift: int = 0, offset: int = 0, is_shifted: bool = False) -> None:
        """Empty both caches, with room for texts of `tokens` and a round beyond them.

        Args:
            tokens: of the longest text.
            shift, offset: slots and positions of the target beyond a text's tokens (`Request.excess`).
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
        pair = self.pair
        self.target = open_cache(
            pair.target, capacity, pair.vocabulary, self._layers, self._size, device=pair.device, reading=pair.readings[0]
        )  # fmt: skip

    def open(self, stream: int, request: Request) -> Text:
        """Read a prompt with the target and draw its first token; the drafter reads when it first drafts."""
        settings, device, prompt, read = self.settings, self.pair.device, list(request.prompt), request.read
        padding = list(request.padding)
        with_padding = [*padding, *prompt]
        shaping = request.shaping or settings.shaping
        processors = shaping.build(settings.temperature, with_padding, tuple(self.eos), device)
        if read is None:
            self.target.roll_back(0, stream)
            logits = self.target.read(upload([prompt], device), rows=1, stream=stream)[0]
            ids, states, shift = prompt, None if self.target.states is None else self.target.states[0], 0
        else:
            self.target.adopt(read, stream)
            logits, ids, states, shift = read.logits, read.ids, read.states, read.slots - len(prompt)
        check_rows(logits)
        self.drafter.begin(stream)
        self.drafter.committed(stream, ids, self._drafter_states(states))
        sampler = Sampler(processors, settings.temperature, padding)
        anchor = Anchor(logits, 0, self._anchor_state(states))
        text = Text(prompt, len(prompt), request.key, self._open_source(request.key), sampler, anchor, 1, shift=shift)
        self.texts[stream] = text
        sampled = sampler(logits, lambda: [prompt])[0]
        if sampler.constrained:
            require_token(sampled)
        choices = Choices(text.source, 0, len(prompt), self._temperature == 0.0)
        self._extend(text, [self.mode.start(sampled, choices)])
        return text

    def _open_source(self, key: int) -> KeyedSource:
        window, pair = self.topology.deepest + 1, self.pair
        if self._source is not None:
            return self._source(key, window)
        return KeyedSource(key, pair.vocabulary, window, pair.logits_dtype, pair.device)

    def _anchor_state(self, states: Tensor | None) -> Tensor | None:
        """Return [1, H], the last layer of the last of [n, layers x H] states, if it is kept."""
        if states is None or not self._keeps[0]:
            return None
        width, at = states.shape[-1] // len(self._layers), self._layers.index(-1)
        return states[-1:, at * width : (at + 1) * width]

    def _drafter_states(self, states: Tensor | None) -> Tensor | None:
        """Return the layers of the target's states [n, layers x H] that the drafter wants."""
        layers = len(self.drafter.layers)
        if states is None or not layers:
            return None
        return states[:, : states.shape[-1] // len(self._layers) * layers]  # the drafter's layers are the first ones

    def begin(self) -> RoundState:
        """See `rounds.RoundSource`."""
        greedy, deepest = self._temperature == 0.0, self.topology.deepest
        active, context = np.zeros(self._size, dtype=bool), np.zeros(self._size, dtype=np.int64)
        limit: Array | None = None
        texts = [None if text is None or text.ended else text for text in self.texts]
        choices: list[Choices | None] = [None] * self._size
        for stream, text in enumerate(texts):
            if text is None:
                continue
            length = len(text.tokens)
            active[stream], context[stream] = True, length
            choices[stream] = Choices(text.source, text.round, length - 1, greedy)
            text.round += 1
            allowed = self.settings.max_new_tokens - text.generated - 1  # one place is the target's
            allowed = min([allowed, *(rope.allowed(length - 1, allowed) for rope in self.pair.ropes)])
            if allowed < deepest:
                limit = np.full(self._size, deepest) if limit is None else limit
                limit[stream] = allowed
        round = RoundState(self.topology, active, context, self.drafter.backlog(), limit)
        round.texts, round.choices = texts, choices
        round.anchors = [None if text is None else text.anchor for text in texts]
        for stream, text in enumerate(texts):
            if text is not None:
                round.tokens[stream, 0] = text.tokens[-1]
        self._round = round
        self.reader.begin(round)
        return round

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `rounds.CandidateSource`."""
        return self.reader.step(depth, alive, history)

    def tree(self, round: RoundState) -> DraftTree:
        """See `rounds.CandidateSource`."""
        return round.draft_tree(self.mode.hides)

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """See `rounds.CandidateSource`."""
        if self.reader.has_unread_path:  # before the next level takes its place
            mark = self.timer.mark()
            self.reader.read()
            self.timer.add("policy", mark)
        tree, rows, span = self.topology, self._all_fed[depth], self.topology.spans[depth + 1]
        if np.count_nonzero(feeding) < len(rows) * len(rows[0][1]):
            level = tree.levels[depth]
            fed = ((stream, np.flatnonzero(feeding[stream]).tolist()) for stream in range(self._size))
            rows = [(stream, [level[at] for at in branches]) for stream, branches in fed if branches]
        level_scores, tokens = self._draw(round, depth, rows)
        round.levels.append(level_scores)
        drawn = self._all_drawn[depth + 1]
        ended: list[tuple[int, int]] = []
        if level_scores is None:
            return np.zeros_like(drawn), np.zeros_like(drawn)
        if sum(level_scores.counts) < drawn.size:
            drawn = np.zeros_like(drawn)
        at = 0
        for stream, parents in level_scores.rows:
            for row in parents:
                candidates = tokens[at]
                first, at = tree.children[row][0], at + 1
                for child, token in enumerate(candidates, first):
                    round.tokens[stream, child] = token
                    if token in self.eos:
                        ended.append((stream, child))
                if drawn is not self._all_drawn[depth + 1]:
                    drawn[stream, first - span.start : first - span.start + len(candidates)] = True
        round.drawn[:, span] = drawn
        round.ended_rows.update(ended)
        self.reader.drawn(depth + 1, level_scores)
        for hook in self._hooks:
            hook.on_draft_step(round, depth + 1)
        if not ended:
            return drawn, drawn
        going = drawn.copy()
        for stream, child in ended:
            going[stream, child - span.start] = False
        return drawn, going

    def _draw(self, round: RoundState, depth: int, rows: Rows) -> tuple[DraftScores | None, Sequence[Sequence[int]]]:
        """Feed rows and draw below them; return what was drawn from, and the candidates of each row; None for none."""
        mark = self.timer.mark()
        proposal = self.drafter.propose(round, depth, rows)
        self.timer.add("draft", mark)
        raw, states = proposal.dense(self.pair.vocabulary), proposal.states if self._keeps[1] else None
        sampled, untruncated = process(round, rows, raw)
        samplers = [text.sampler for stream, _ in rows if (text := round.texts[stream]) is not None]
        # The drafter may know no token, and a grammar may leave none.
        if proposal.ids is not None or any(sampler.constrained for sampler in samplers):
            known = torch.isfinite(sampled).any(-1).tolist()
            if not all(known):
                flags = iter(known)
                rows = [(stream, [row for row in own if next(flags)]) for stream, own in rows]
                rows = [(stream, own) for stream, own in rows if own]
                raw, sampled = raw[known], sampled[known]
                untruncated = None if untruncated is None else untruncated[known]
                states = None if states is None else states[known]
            if not rows:
                return None, ()
        draw = self.mode.draw(round, rows, sampled)
        tokens = draw.tokens
        counts = list(map(len, tokens))
        if not any(counts):  # rows that no token can be drawn from
            return None, ()
        if self._temperature == 0 or not any(sampler.reads_prefix for sampler in samplers):
            return DraftScores(rows, counts, raw, None, None, draw.scores, draw.best, states), tokens
        return DraftScores(rows, counts, raw, sampled, untruncated, draw.scores, draw.best, states), tokens

    def verify(self, round: RoundState) -> None:
        """See `rounds.RoundSource`."""
        tree = self.topology
        if isinstance(self.drafter, FallbackDrafter):
            reads = [
                bool(drafted) and not self.drafter.has_backlog(s) for s, drafted in enumerate(round.drafted.tolist())
            ]
            round.backlog = np.where(reads, 0, round.backlog)
        rows: list[tuple[int, list[int]]] = []
        for stream in np.flatnonzero(round.active).tolist():
            of_chain = tree.is_chain and tree.paths[int(round.verified[stream])]
            rows.append((stream, of_chain or np.flatnonzero(round.sent[stream]).tolist()))
        round.target_rows = rows
        raw, finite = self.read(round)
        sampled, _ = process(round, rows, raw)
        round.target_raw, round.target_sampled = raw, sampled
        if constrained := any(text.sampler.constrained for text in round.texts if text is not None):
            # A candidate may lead to a row that the grammar leaves no token in, which matters only if it is accepted.
            round.target_sampled = torch.where(sampled.amax(-1, keepdim=True) > -torch.inf, sampled, raw)
        with finite:  # on a device it is checked while the host waits anyway
            accepted = self.mode.accept(round, rows, round.target_sampled)
        round.accepted, first = np.zeros(self._size, dtype=np.int64), 0
        round.next_tokens = {}
        for (stream, sent), (path, token) in zip(rows, accepted, strict=True):
            if constrained:
                require_token(sampled[first + sent.index(path[-1])])
            first += len(sent)
            round.on_path[stream, path] = True
            round.accepted[stream], round.next_tokens[stream] = len(path) - 1, token
        for hook in self._hooks:
            hook.on_verified(round)

    def read(self, round: RoundState) -> tuple[Tensor, FiniteRows]:
        """Return the target's raw logits [R, V] after the rows sent, and the check of them."""
        mark = self.timer.mark()
        parts, padding, rows = [], 0, round.target_rows
        for stream, sent in rows:
            tokens, text = round.tokens[stream, sent].tolist(), round.texts[stream]
            assert text is not None
            if len(sent) == self.topology.depth[sent[-1]] + 1:  # a single path
                padding = self._padding(round) if stream == rows[-1][0] else 0  # its rows are the last
                parts.append(Part(stream, tokens + tokens[-1:] * padding))
            else:
                parts.append(Part(stream, tokens, tree=TreeRows(self.topology, _slot(text), [], sent)))
        logits = self.target.read_parts(parts)
        if padding:
            logits = logits[:-padding]
        finite = FiniteRows(logits)
        self.timer.add("verify", mark)
        return logits, finite

    def _padding(self, round: RoundState) -> int:
        """Return how many tokens a stream reads again to pad a verification: a larger one may be cheaper."""
        stream, sent = round.target_rows[-1]
        if len(round.target_rows) > 1 or len(sent) > len(self._padded):
            return 0
        more = self._padded[len(sent) - 1] + 1 - len(sent)  # the table counts candidates, `sent` the anchor too
        return more if int(round.context[stream]) - 1 + len(sent) + more <= self._readable else 0

    def commit(self, round: RoundState) -> None:
        """See `rounds.RoundSource`; compacts both caches along the accepted paths."""
        round.committed, round.ended = np.zeros(self._size, dtype=np.int64), np.zeros(self._size, dtype=bool)
        states, raw, first = self.target.states, round.target_raw, 0
        for stream, sent in round.target_rows:
            text, path = round.texts[stream], round.path(stream)
            assert text is not None
            indices = path if self.topology.is_chain else [sent.index(row) for row in path]
            slot, tokens = _slot(text), round.tokens[stream, path].tolist()
            self.target.keep(slot, [slot + index for index in indices], stream)
            kept = None if states is None else states[0, [first + index for index in indices]]  # [path, layers x H]
            self.drafter.committed(stream, tokens, self._drafter_states(kept))
            text.anchor = Anchor(raw, first + indices[-1], self._anchor_state(kept))
            first += len(sent)
            round.committed[stream] = self._extend(text, [*tokens[1:], round.next_tokens[stream]])
            round.ended[stream] = text.ended

    def _extend(self, text: Text, new: Sequence[int]) -> int:
        settings = self.settings
        return text.extend(new, settings.max_new_tokens, self.eos, settings.stops)


def _slot(text: Text) -> int:
    """Return the slot of the target's cache that belongs to the anchor of a text."""
    return len(text.tokens) - 1 + text.shift


def process(round: RoundState, rows: Rows, raw: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return processed scores [R, V] after rows, and what they were before a filter removed tokens.

    Each stream has its own processors, which are called with its prefixes.
    """
    own = [(stream, some, text) for stream, some in rows if (text := round.texts[stream]) is not None]
    if len(own) == 1:
        stream, some, text = own[0]
        return text.sampler(raw, partial(_prefixes, round, text, stream, some)), text.sampler.untruncated
    if not any(text.sampler.reads_prefix for _, _, text in own):
        return own[0][2].sampler(raw, list), None  # only the temperature, which all streams share
    out, before = [], []
    for (stream, some, text), scores in zip(own, raw.split([len(some) for _, some in rows]), strict=True):
        out.append(text.sampler(scores, partial(_prefixes, round, text, stream, some)))
        before.append(text.sampler.untruncated)
    if all(kept is None for kept in before):
        return torch.cat(out), None
    return torch.cat(out), torch.cat([rows if kept is None else kept for rows, kept in zip(out, before, strict=True)])


def _prefixes(round: RoundState, text: Text, stream: int, rows: Sequence[int]) -> list[list[int] | None]:
    """Return the text up to and including each row; None where it has ended there, so that nothing is drawn after it."""
    known = text.tokens[:-1]
    return [None if (stream, row) in round.ended_rows else [*known, *round.path_tokens(stream, row)] for row in rows]
