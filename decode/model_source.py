"""The models of a pair as the source of rounds: the draft proposes, the target verifies, caches hold what both have read.

S texts are decoded side by side. Each model reads for all of them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array, DraftStep, StopPolicy
from ..policies.errors import InputError
from ..policies.features import DRAFT_HIDDEN, ROUTE_FEATURES, SIGNALS, TARGET_HIDDEN, History
from .device_policies import DevicePolicy, device_policy
from .drafters import Drafter
from .feature_reader import FeatureReader
from .hooks import Hook, Timer
from .models.attention import Part, TreeRows
from .models.cuda import open_cache
from .models.device import upload
from .models.outputs import check_rows, start_check
from .models.pair import Pair
from .models.view import readable
from .round_state import DraftScores, RoundState, Rows
from .settings import Settings, resolve_sampling
from .texts import Anchor, Request, Text
from .topology import Topology
from .verify.modes import Verification, is_trimming
from .verify.noise import Choices, KeyedSource
from .verify.sampler import Sampler, require_token


class ModelSource:
    """See `rounds.RoundSource`.

    Args:
        pair: target and draft.
        drafters: propose candidates, one for each drafter of the topology.
        mode: draws candidates and accepts them.
        topology: of a round, no deeper than settings and policy allow.
        settings: of the run.
        policy: of the run.
        timer: receives the laps of draft, verification and policy.
        widths: H of the last hidden states to keep, by name (`features.HIDDEN_STATES`).
        padded: by number of candidates, the number that their verification is padded to; () = never.
        open_source: returns the random source of a stream for (key, window); None = keyed noise.
        streams: S.
        hooks: observe draft steps and verifications.

    Attributes:
        texts: by stream, the text that is decoded; None = the stream is free.
    """

    def __init__(
        self,
        pair: Pair,
        drafters: Sequence[Drafter],
        mode: Verification,
        topology: Topology,
        settings: Settings,
        policy: StopPolicy,
        timer: Timer,
        widths: dict[str, int],
        padded: Sequence[int] = (),
        open_source: Callable[[int, int], KeyedSource] | None = None,
        streams: int = 1,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.pair, self.drafters, self.mode, self.topology, self.settings = pair, drafters, mode, topology, settings
        self.timer, self._hooks, self._open_source, self._size = timer, hooks, open_source, streams
        # Under rejection modes, what is sent must not depend on tokens drawn later. So policies select level by level, and
        # policies that trim also decide about candidates that end a text.
        self.decides_ended, self.selects_levels = mode.hides and policy.trims, mode.hides and is_trimming(policy)
        self.eos = frozenset(() if settings.ignore_eos else pair.eos)
        self._temperature = settings.temperature
        self._widths = widths
        layers = [layer for drafter in drafters for layer in drafter.layers]
        self._layers = tuple(dict.fromkeys((*layers, *((-1,) if TARGET_HIDDEN in widths else ()))))
        self._padded = () if pair.ropes else padded  # padding could pass the length at which a rope changes
        self.texts: list[Text | None] = [None] * streams
        # By depth and drafter: the branches that it can extend, and the rows of all streams that are fed for them.
        self._branches: list[list[list[int]]] = []
        self._all_inner: list[list[Rows]] = []
        for level, owners in zip(topology.levels, topology.drafter_of_branch, strict=True):
            row_of = level if level[0] else level * len(owners)
            branches = [np.flatnonzero(owners == index).tolist() for index in range(topology.drafters)]
            inner = [[b for b in own if topology.below(row_of[b], index)] for index, own in enumerate(branches)]
            self._branches.append(inner)
            self._all_inner.append([[(s, [row_of[b] for b in one]) for s in range(streams)] for one in inner])
        self._round: RoundState | None = None
        self.read_for(policy)
        self._open(0)

    def read_for(self, policy: StopPolicy) -> None:
        """Read the features of this policy from now on."""
        self.reader = FeatureReader(
            policy,
            self.topology,
            self._temperature,
            self._widths,
            self._size,
            partial(read_signals, [drafter.signals if drafter.has_signals else None for drafter in self.drafters]),
        )
        self._device_policy: DevicePolicy | None = None
        if self.topology.is_chain and all(type(hook).on_draft_step is Hook.on_draft_step for hook in self._hooks):
            self._device_policy = device_policy(policy, self.reader, self.topology.deepest, self.eos)
        if self._round is not None:  # a fallback may replace a policy in the middle of a round
            self._round.device_policy = None
            self.reader.begin(self._round)

    def reserve(self, tokens: int, requests: Sequence[Request] = ()) -> None:
        """Empty both caches, with room for texts of `tokens` and a round beyond them.

        Args:
            tokens: length of the longest text.
            requests: may use slots and positions of the target beyond their tokens (`Request.excess`).
        """
        shift, offset = (max(values) for values in zip((0, 0), *(request.excess for request in requests), strict=True))
        if any(request.read is not None for request in requests):
            self.pair.check_length(tokens + offset)
        # The last round reads beyond the limit.
        capacity = tokens + shift + max(len(self.topology), len(self._padded)) + 1
        self._readable = capacity - shift
        draft_limit = min(drafter.readable for drafter in self.drafters)
        for role, limit, more in (("target", readable(self.pair.target), offset), ("draft", draft_limit, 0)):
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
        for drafter in self.drafters:
            drafter.reserve(self._size, capacity)
        self.texts = [None] * self._size

    def _open(self, capacity: int) -> None:
        pair = self.pair
        self.target = open_cache(
            pair.target, capacity, pair.vocabulary, self._layers, self._size, device=pair.device, reading=pair.readings[0]
        )  # fmt: skip

    def open(self, stream: int, request: Request) -> Text:
        """Read a prompt with the target and draw its first token; the drafter reads when it first drafts."""
        device, prompt, read = self.pair.device, list(request.prompt), request.read
        sampling = self.settings.sampling
        if request.sampling is not None:
            sampling = resolve_sampling(self.pair, request.sampling, self.settings.max_new_tokens)
        processors = sampling.build(self._temperature, [*request.padding, *prompt], tuple(self.eos), device)
        if read is None:
            self.target.roll_back(0, stream)
            logits = self.target.read(upload([prompt], device), rows=1, stream=stream)[0]
            states = None if self.target.states is None else self.target.states[0]
            ids, shift = prompt, 0
        else:
            self.target.adopt(read, stream)
            logits, ids, states, shift = read.logits, read.ids, read.states, read.slots - len(prompt)
        check_rows(logits)
        for drafter in self.drafters:
            drafter.begin(stream)
        hidden = self._commit(stream, ids, states)
        window = self.topology.deepest + 1
        if self._open_source is not None:
            source = self._open_source(request.key, window)
        else:
            source = KeyedSource(request.key, self.pair.vocabulary, window, self.pair.logits_dtype, device)
        sampler = Sampler(processors, self._temperature, request.padding)
        text = self.texts[stream] = Text(prompt, len(prompt), source, sampler, Anchor(logits, 0, hidden), shift)
        sampled = sampler(logits, lambda: [prompt])[0]
        if sampler.has_grammar:
            require_token(sampled)
        first = self.mode.start(sampled, Choices(source, 0, len(prompt), self._temperature == 0.0))
        text.extend([first], self.settings.max_new_tokens, self.eos, self.settings.stops)
        return text

    def _commit(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> Tensor | None:
        """Pass tokens [n] and the target's states [n, layers x H] to the drafters.

        Returns:
            [1, H] the last layer of the last token, if the policy reads it.
        """
        layers = None if states is None else states.unflatten(-1, (len(self._layers), -1))
        for drafter in self.drafters:
            own = [self._layers.index(layer) for layer in drafter.layers]
            part = None if layers is None or not own else layers
            if part is not None:
                is_first = own == list(range(len(own)))  # a view
                part = (part[:, : len(own)] if is_first else part[:, own]).flatten(1)
            drafter.committed(stream, tokens, part)
        return None if layers is None or TARGET_HIDDEN not in self._widths else layers[-1:, self._layers.index(-1)]

    def begin(self) -> RoundState:
        """See `rounds.RoundSource`."""
        greedy, deepest = self._temperature == 0.0, self.topology.deepest
        active, context = np.zeros(self._size, dtype=bool), np.zeros(self._size, dtype=np.int64)
        backlogs = [drafter.backlog() for drafter in self.drafters]
        backlog = backlogs[0] if len(backlogs) == 1 else np.stack(backlogs, 1)
        round = self._round = RoundState(self.topology, active, context, backlog)
        round.texts = [None if text is None or text.ended else text for text in self.texts]
        round.anchors = [None if text is None else text.anchor for text in round.texts]
        choices: dict[int, Choices] = {}
        for stream, text in enumerate(round.texts):
            if text is None:
                continue
            length = len(text.tokens)
            active[stream], context[stream], round.tokens[stream, 0] = True, length, text.tokens[-1]
            choices[stream] = Choices(text.source, len(text.records) + 1, length - 1, greedy)
            allowed = self.settings.max_new_tokens - text.generated - 1  # the target adds one token
            allowed = min([allowed, *(rope.allowed(length - 1, allowed) for rope in self.pair.ropes)])
            if allowed < deepest:
                round.limit = np.full(self._size, deepest) if round.limit is None else round.limit
                round.limit[stream] = allowed
        round.choices, round.ends = choices, self.eos
        reads_tokens = any(text.sampler.reads_tokens for text in round.texts if text is not None)
        if self._device_policy is not None and self.drafters[0].skips and not reads_tokens:
            round.device_policy = self._device_policy
        self.reader.begin(round)
        return round

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `rounds.CandidateSource`."""
        return self.reader.step(depth, alive, history)

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """See `rounds.CandidateSource`."""
        self.reader.read_path(self.timer)  # before the next level replaces it
        tree, span, policy = self.topology, self.topology.spans[depth + 1], round.device_policy
        ended: list[tuple[int, int]] = []
        drawn = round.drawn[:, span]  # a view: the numbers of random choices count what earlier drafters drew
        if policy is not None and policy.has_stopped():
            return drawn, drawn
        levels = []
        for index in range(len(self.drafters)):
            rows = self._fed_rows(depth, feeding, index)
            level, tokens = self._draw(round, depth, rows, index) if rows else (None, ())
            if level is None:
                continue
            levels.append(level)
            if isinstance(tokens, Tensor):
                drawn[[stream for stream, _ in level.rows]] = True
                if round.has_fixed_length or depth + 1 == tree.deepest or policy is not None:
                    self._defer(round, depth + 1, level.rows, tokens)
                    if policy is not None:
                        mark = self.timer.mark()
                        policy.step(depth + 1, level, tokens)
                        self.timer.add("policy", mark)
                    continue
                mark = self.timer.mark()
                tokens = [[token] for token in self.reader.fetch(depth + 1, level, tokens)]
                self.timer.add("policy", mark)
            candidates, round_tokens = iter(tokens), round.tokens
            for stream, parents in level.rows:
                for row in parents:
                    for child, token in zip(tree.below(row, index), next(candidates), strict=False):
                        round_tokens[stream, child] = token
                        drawn[stream, child - span.start] = True
                        if token in self.eos:
                            ended.append((stream, child))
        round.levels.append(levels)
        drawn = drawn.copy()
        if not levels:
            return drawn, drawn
        if not round.has_fixed_length and policy is None:
            self.reader.drawn(depth + 1, levels)
        for hook in self._hooks:
            hook.on_draft_step(round, depth + 1)
        if not ended:
            return drawn, drawn
        round.ended_rows.update(ended)
        continuing = drawn.copy()
        for stream, child in ended:
            continuing[stream, child - span.start] = False
        return drawn, continuing

    def _fed_rows(self, depth: int, feeding: Array, drafter: int) -> Rows:
        """Return the rows that a drafter is fed, given `feeding` [S, B]."""
        branches, rows = self._branches[depth][drafter], self._all_inner[depth][drafter]
        fed = feeding if len(self.drafters) == 1 else feeding[:, branches]
        if np.count_nonzero(fed) == len(rows) * len(branches) > 0:
            return rows
        if len(self.drafters) == 1:
            fed = feeding[:, branches]
        at = rows[0][1]
        chosen = ((stream, np.flatnonzero(fed[stream]).tolist()) for stream in range(self._size))
        return [(stream, [at[index] for index in indices]) for stream, indices in chosen if indices]

    def _defer(self, round: RoundState, depth: int, rows: Rows, tokens: Tensor) -> None:
        """Set the candidates [R] of a depth of chains without waiting for the device."""
        if round.device_tokens is None:
            round.device_tokens = upload(round.tokens, tokens.device)
        if len(rows) == self._size:
            round.device_tokens[:, depth] = tokens
        else:
            streams = upload([stream for stream, _ in rows], tokens.device)
            round.device_tokens[:, depth].index_copy_(0, streams, tokens)

    def _draw(
        self, round: RoundState, depth: int, rows: Rows, drafter: int
    ) -> tuple[DraftScores | None, Sequence[Sequence[int]] | Tensor]:
        """Feed rows to a drafter and draw below them.

        Returns:
            What was drawn from, None if nothing was drawn, and the candidates of each row. A tensor [R] if the host need not
            know them before the verification: one candidate of each row of chains, on a device or if no policy is called.
        """
        mark = self.timer.mark()
        proposal = self.drafters[drafter].propose(round, depth, rows)
        self.timer.add("draft", mark)
        raw, states = proposal.dense(self.pair.vocabulary), proposal.states if DRAFT_HIDDEN in self._widths else None
        sampled, untruncated = process(round, rows, raw)
        samplers = [text.sampler for stream, _ in rows if (text := round.texts[stream]) is not None]
        # The drafter may know no token, and a grammar may leave none.
        if proposal.ids is not None or any(sampler.has_grammar for sampler in samplers):
            possible = torch.isfinite(sampled).any(-1).tolist()
            if not all(possible):
                flags = iter(possible)
                rows = [(stream, [row for row in stream_rows if next(flags)]) for stream, stream_rows in rows]
                rows = [(stream, stream_rows) for stream, stream_rows in rows if stream_rows]
                raw, sampled = raw[possible], sampled[possible]
                untruncated = None if untruncated is None else untruncated[possible]
                states = None if states is None else states[possible]
            if not rows:
                return None, ()
        draw = self.mode.draw(round, rows, sampled, drafter)
        tokens: Sequence[Sequence[int]] | Tensor = draw.tokens
        if isinstance(tokens, Tensor):
            needs_none = round.has_fixed_length or round.device_policy is not None
            is_deferred = self.topology.is_chain and (needs_none or not tokens.is_cpu)
            if not is_deferred or any(sampler.reads_tokens for sampler in samplers):
                tokens = tokens[:, None].tolist()
        counts = [1] * len(tokens) if isinstance(tokens, Tensor) else list(map(len, tokens))
        if not any(counts):  # rows that no token can be drawn from
            return None, ()
        scores = DraftScores(rows, counts, raw, None, None, draw.scores, draw.best, states, drafter)
        if self._temperature > 0 and any(sampler.reads_prefix for sampler in samplers):
            scores.sampled, scores.untruncated = sampled, untruncated
        return scores, tokens

    def verify(self, round: RoundState) -> None:
        """See `rounds.RoundSource`."""
        tree, is_deferred = self.topology, round.device_tokens is not None
        rows: list[tuple[int, list[int]]] = []
        for stream in np.flatnonzero(round.active).tolist():
            of_chain = tree.is_chain and tree.paths[int(round.verified[stream])]
            rows.append((stream, of_chain or np.flatnonzero(round.sent[stream]).tolist()))
        round.target_rows = rows
        raw, check_finite = self._read_target(round)
        sampled, _ = process(round, rows, raw)
        round.target_raw, round.target_sampled = raw, sampled
        if has_grammar := any(text.sampler.has_grammar for text in round.texts if text is not None):
            # A candidate may lead to a row for which the grammar allows no token. It matters only if it is accepted.
            round.target_sampled = torch.where(sampled.amax(-1, keepdim=True) > -torch.inf, sampled, raw)
        round.next_anchors = self.reader.next_anchors(raw, self._last_states)
        try:
            accepted = self.mode.accept(round, rows, round.target_sampled)
        finally:  # after the host has waited for the accepted paths
            check_finite()
        round.accepted, round.next_tokens, first = np.zeros(self._size, dtype=np.int64), {}, 0
        for (stream, sent), (path, token) in zip(rows, accepted, strict=True):
            if has_grammar:
                require_token(sampled[first + sent.index(path[-1])])
            first += len(sent)
            round.on_path[stream, path] = True
            round.accepted[stream], round.next_tokens[stream] = len(path) - 1, token
        if is_deferred and self.eos:
            round.end_texts()
        for hook in self._hooks:
            hook.on_verified(round)

    def _read_target(self, round: RoundState) -> tuple[Tensor, Callable[[], None]]:
        """Return the target's raw logits [R, V] after the rows sent, and a function that checks them."""
        mark = self.timer.mark()
        parts, padding, on_device = [], 0, round.device_tokens
        for stream, sent in round.target_rows:
            if len(sent) == self.topology.depth[sent[-1]] + 1:  # a single path
                padding = self._padding(round) if stream == round.target_rows[-1][0] else 0  # its rows are the last
                if on_device is None:
                    tokens = round.tokens[stream, sent].tolist()
                    parts.append(Part(stream, tokens + tokens[-1:] * padding))
                else:
                    row = on_device[stream, : len(sent)]
                    parts.append(Part(stream, torch.cat([row, row[-1:].expand(padding)]) if padding else row))
            else:
                text = round.texts[stream]
                assert text is not None
                tree_rows = TreeRows(self.topology, text.slot, [], sent)
                parts.append(Part(stream, round.tokens[stream, sent].tolist(), tree=tree_rows))
        logits = self.target.read_parts(parts)
        logits = logits[:-padding] if padding else logits
        check_finite = start_check(logits)
        self.timer.add("verify", mark)
        return logits, check_finite

    def _last_states(self) -> Tensor:
        """Return the last hidden states [R, H] of the tokens that the target has just read."""
        assert self.target.states is not None
        states: Tensor = self.target.states[0].unflatten(-1, (len(self._layers), -1))
        return states[:, self._layers.index(-1)]

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
        states, first = self.target.states, 0
        for stream, sent in round.target_rows:
            text, path = round.texts[stream], round.path(stream)
            assert text is not None
            indices = path if self.topology.is_chain else [sent.index(row) for row in path]
            tokens = round.tokens[stream, path].tolist()
            self.target.keep(text.slot, [text.slot + index for index in indices], stream)
            kept = None  # [path, layers x H]
            if states is not None and self.topology.is_chain:  # a list of indices would have to be copied to the device
                kept = states[0, first : first + len(path)]
            elif states is not None:
                kept = states[0, [first + index for index in indices]]
            hidden = self._commit(stream, tokens, kept)
            text.anchor = Anchor(round.target_raw, first + indices[-1], hidden)
            first += len(sent)
            new_tokens = [*tokens[1:], round.next_tokens[stream]]
            round.committed[stream] = text.extend(
                new_tokens, self.settings.max_new_tokens, self.eos, self.settings.stops
            )
            round.ended[stream] = text.ended


def read_signals(
    signals: Sequence[Callable[[int, int], Sequence[float]] | None], round: RoundState, history: History
) -> Array:
    """Return the ROUTE features [S, D, .] of a round, and set `RoundState.signals`; given the signals of each drafter.

    Not a method: a reader that refers to its source is a cycle, which keeps the memory of recorded calls from being reused.
    """
    values = np.zeros((len(round.active), len(signals), len(ROUTE_FEATURES)), dtype=np.float32)
    for stream, text in enumerate(round.texts):
        if text is not None:
            values[stream, :, -1] = text.prompt_tokens
            for index, signals_of in enumerate(signals):
                if signals_of is not None:
                    values[stream, index, : len(SIGNALS)] = signals_of(stream, text.tokens[-1])
    if history.idle is not None:
        values[..., -2] = history.idle
    round.signals = values
    return values


def process(round: RoundState, rows: Rows, raw: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return processed scores [R, V] after rows, and what they were before a filter removed tokens.

    Each stream has its own processors, which are called with its prefixes.
    """
    parts = [(stream, stream_rows, text) for stream, stream_rows in rows if (text := round.texts[stream]) is not None]
    stream, stream_rows, text = parts[0]
    if len(parts) == 1 or not any(text.sampler.reads_prefix for _, _, text in parts):  # streams share the temperature
        return text.sampler(raw, partial(_prefixes, round, text, stream, stream_rows)), text.sampler.untruncated
    outputs, before = [], []
    for (stream, stream_rows, text), scores in zip(parts, raw.split([len(part[1]) for part in parts]), strict=True):
        outputs.append(text.sampler(scores, partial(_prefixes, round, text, stream, stream_rows)))
        before.append(text.sampler.untruncated)
    if all(scores is None for scores in before):
        return torch.cat(outputs), None
    pairs = zip(outputs, before, strict=True)
    return torch.cat(outputs), torch.cat([output if scores is None else scores for output, scores in pairs])


def _prefixes(round: RoundState, text: Text, stream: int, rows: Sequence[int]) -> list[list[int] | None]:
    """Return the text up to and including each row; None where it has ended there, so that nothing is drawn after it."""
    committed = text.tokens[:-1]
    return [
        None if (stream, row) in round.ended_rows else [*committed, *round.path_tokens(stream, row)] for row in rows
    ]
