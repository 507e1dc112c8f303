"""Drafts for all requests of a serving engine. A step observes the outcomes of the last drafts, then drafts for all requests
side by side while the policy ends each draft.

Each request has a row, which is a stream of policy and drafter. A step may omit requests (their rows are idle), trim drafts,
or commit tokens that were not drafted. Therefore the outcome of a draft is what follows in the text. Policies and drafters
cannot read what an engine does not pass on: logits and states of the target, noise.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array, DraftStep, RoundOutcome, StopPolicy
from ...policies.errors import InputError, SpecstopWarning
from ...policies.failures import error_text
from ...policies.features import DrawnTokens, History, Layout
from ...policies.fixed import FixedLength
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from ..drafters.base import Drafter
from ..feature_reader import FeatureReader, set_anchors
from ..hooks import Timer
from ..round_state import DraftScores, RoundState, Rows
from ..rounds import draft
from ..topology import chain
from ..verify.noise import best_of_rows

_INITIAL_TOKENS = 512
"""Length of a text that drafters have room for at the beginning."""


@dataclass(slots=True)
class EngineDraft:
    """A draft that was proposed to the engine, and its outcome.

    Attributes:
        row: row of the request.
        context: number of tokens of the text before the draft.
        tokens: the proposed tokens.
        drafted, decisions, backlog: tokens drawn, calls of the policy, committed tokens that the drafter had to read.
        hit_limit: an end of text ended the draft, not the policy.
        begin_s: time at which the step began.
        new: tokens that followed, at least one after `set_outcome`.
        accepted, verified: number of tokens of the draft.
    """

    row: int
    context: int
    tokens: list[int]
    drafted: int = 0
    decisions: int = 0
    backlog: int = 0
    hit_limit: bool = False
    begin_s: float = 0.0
    new: list[int] = field(default_factory=list)
    accepted: int = 0
    verified: int = 0

    def set_outcome(self, new: list[int]) -> None:
        """Compare the draft with the tokens that followed."""
        agreed = 0
        while agreed < min(len(self.tokens), len(new)) and self.tokens[agreed] == new[agreed]:
            agreed += 1
        self.new, self.accepted, self.verified = new, agreed, len(self.tokens)
        if agreed == len(new):  # the engine trimmed the draft: the last new token is the one that the target adds
            self.accepted = self.verified = agreed - 1


class EngineObserver(Protocol):
    """Observes the drafts of an engine, such as a recorder of traces."""

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """Observe a new text in a row, and the engine's name of the request."""

    def on_draft_step(self, depth: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """Observe the tokens of a depth, drawn in `rows` [R] from logits [R, V]."""

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """Observe the drafts of a step, and the seconds for drafting them."""

    def on_outcomes(self, drafts: Sequence[EngineDraft], step_s: Sequence[float]) -> None:
        """Observe the outcome of drafts, and the seconds since each was begun."""


@dataclass(slots=True)
class RequestRow:
    """A row and the request in it.

    Attributes:
        index: number of the row.
        text: token ids in the last step with the request.
        name: the engine's name of the request, if it is known.
        last_step: number of that step.
        continued: the text continues that of the step before; otherwise the request is new in this row.
        kept: length of the common prefix with the text before.
        new: tokens after that prefix.
        committed: number of tokens that the drafter has received.
        draft, round: the last draft, if its outcome is not known yet, and its round.
    """

    index: int
    text: Array
    name: str | None = None
    last_step: int = 0
    continued: bool = False
    kept: int = 0
    new: list[int] = field(default_factory=list)
    committed: int = 0
    draft: EngineDraft | None = None
    round: RoundState | None = None


class RequestRows:
    """Assigns requests to rows by their texts, since their places in the engine's batch change.

    If the engine's names of the requests are known, they distinguish requests with equal tokens.
    """

    def __init__(self, count: int) -> None:
        self.rows = [RequestRow(index, np.zeros(0, dtype=np.int32)) for index in range(count)]
        self._previous: list[int] = []  # row of each place in the last step
        self._step = 0

    def place(self, texts: Sequence[Array], names: Sequence[str] | None = None) -> list[RequestRow | None]:
        """Store the texts of a step and return their rows. None for requests that exceed the rows."""
        self._step += 1
        rows, free = [-1] * len(texts), set(range(len(self.rows)))
        labels: Sequence[str | None] = names or [None] * len(texts)
        # The row of the same place is tried first. Of other rows the longest is taken: a shorter one may belong to another.
        for candidates in ([{row} for row in self._previous], [free] * len(texts)):
            for at, allowed in zip(range(len(texts)), candidates, strict=False):
                fits = [r for r in allowed & free if rows[at] < 0 and self._continues(r, texts[at], labels[at])]
                if fits:
                    rows[at] = max(fits, key=lambda r: (len(self.rows[r].text), self.rows[r].last_step))
                    free.remove(rows[at])
        continued = [row >= 0 for row in rows]
        # New requests take the row that was unused for longest, because a request that was omitted may return. It is one of
        # the first 2 n rows for n requests, because attention reads all rows up to the last one in use.
        limit = 2 * max(2, len(texts))
        for at, name in enumerate(labels):
            if not continued[at] and free:
                rows[at] = min(
                    free,
                    key=lambda r: (name is None or self.rows[r].name != name, r >= limit, self.rows[r].last_step, r),
                )
                free.remove(rows[at])
        self._previous = rows
        return [
            self._store(row, text, name, is_continued) if row >= 0 else None
            for row, text, name, is_continued in zip(rows, texts, labels, continued, strict=True)
        ]

    def _continues(self, index: int, text: Array, name: str | None) -> bool:
        """Whether a text begins with the text of the row and may be of the same request."""
        row = self.rows[index]
        length, growth = len(row.text), 1 if row.draft is None else len(row.draft.tokens) + 1
        if not 0 < length <= len(text) or (len(text) - length > growth if name is None else row.name != name):
            return False
        # Most texts differ in the last token already.
        return bool(row.text[-1] == text[length - 1]) and np.array_equal(row.text, text[:length])

    def _store(self, index: int, text: Array, name: str | None, continued: bool) -> RequestRow:
        row = self.rows[index]
        kept = min(len(row.text), len(text))
        if not continued:  # the drafter may not have to read a common prefix again
            differs = np.flatnonzero(row.text[:kept] != text[:kept])
            kept = int(differs[0]) if len(differs) else kept
        row.continued, row.kept, row.new = continued, kept, text[kept:].tolist()
        row.text, row.name, row.last_step = text.astype(np.int32), name, self._step
        return row


@dataclass
class DraftingStats:
    """Number of steps and of drafted tokens, and seconds: in total, of the drafter, and of decisions including features."""

    steps: int = 0
    drafted: int = 0
    total_s: float = 0.0
    drafter_s: float = 0.0
    policy_s: float = 0.0


@dataclass(frozen=True)
class Options:
    """Limits of drafting in an engine.

    Attributes:
        rows: R, maximum number of requests with drafts.
        depth: K, maximum length of a draft.
        readable: maximum length of a text for drafter and target.
        vocabulary: V, number of tokens that the target scores.
        temperature: of sampling, for features that read it.
        eos: tokens after which nothing is drafted.
        fallback: draft length after a policy has failed.
    """

    rows: int
    depth: int
    readable: int
    vocabulary: int
    temperature: float = 0.0
    eos: tuple[int, ...] = ()
    fallback: int = 4


class Drafting:
    """Drafts for the requests of an engine.

    Args:
        drafter: proposes the tokens; reads no hidden states of the target.
        policy: ends each draft; see `settings.check_engine_policy`.
        options: limits.
        profile: models the seconds of rounds for policies that observe them; None = rounds take 0 seconds.
        observer: observes the drafts.

    Attributes:
        stats: time and numbers so far.
        host: of the policy.
    """

    def __init__(
        self,
        drafter: Drafter,
        policy: StopPolicy,
        options: Options,
        profile: Profile | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.options, self.stats, self.observer = options, DraftingStats(), observer
        self.eos, self.timer = frozenset(options.eos), Timer(torch.device("cpu"))
        self._drafter: Drafter | None = drafter
        self._failed = ""  # why the drafter is not called any more
        self._profile, self._texts = profile, 0
        self._requests, self._capacity = RequestRows(options.rows), _INITIAL_TOKENS
        drafter.reserve(options.rows, self._capacity)
        self.use(policy)

    def use(self, policy: StopPolicy) -> None:
        """Use this policy from the next text on."""
        fallback = FixedLength(min(self.options.fallback, self.options.depth))
        policy = policy.limited(self.options.depth)
        self.host = PolicyHost(policy, batch=self.options.rows, fallback=fallback, on_replaced=self._read_for)
        self._has_round = False  # the policy has not observed the outcome of its last decisions
        self._read_for(policy)
        self.host.start(np.arange(self.options.rows, dtype=np.int64))

    def _read_for(self, policy: StopPolicy) -> None:
        self._topology = chain(min(policy.max_depth, self.options.depth))
        self._reader = FeatureReader(policy, self._topology, self.options.temperature, streams=self.options.rows)
        self._reads_outcomes = self.host.observes or bool(Layout(policy.features).history)

    @property
    def policy(self) -> StopPolicy:
        """The policy in use."""
        return self.host.policy

    def check_failed(self) -> None:
        """Raise if drafter or policy has failed: drafts of the fallback are no trace or profile of them.

        Raises:
            InputError: the drafter has failed.
            PolicyFailure: the policy has failed.
        """
        if self._failed:
            raise InputError(f"the drafter failed ({self._failed}); nothing was recorded after that")
        if self.host.failure is not None:
            raise self.host.failure

    @torch.inference_mode()
    def propose(self, texts: Sequence[Array], names: Sequence[str] | None = None) -> list[list[int]]:
        """Return a draft for each text, possibly empty.

        Args:
            texts: [n] token ids of each request that has committed a token in this step.
            names: of the requests, if the engine has them.
        """
        begin_s = time.perf_counter()
        placed = self._requests.place(texts, names)
        rows = [row for row in placed if row is not None]
        self._observe([row for row in rows if row.continued], begin_s)
        self._begin([row for row in rows if not row.continued])
        longest = self.options.readable - self._topology.deepest
        # Features also read the token before the anchor, so a text of one token has no draft.
        rows = [row for row in rows if 1 < len(row.text) <= longest]
        drafts = self._draft(rows, begin_s) if rows and self._topology.deepest else {}
        self.stats.steps += 1
        self.stats.total_s += time.perf_counter() - begin_s
        return [[] if row is None else drafts.get(row.index, []) for row in placed]

    def _observe(self, rows: Sequence[RequestRow], now: float) -> None:
        """Pass the outcomes of the last drafts to policy and observer, and mark the tokens that the drafter is to keep."""
        drafts = []
        for row in rows:
            if row.draft is not None and row.round is not None and row.new:
                row.draft.set_outcome(row.new)
                row.round.on_path[row.index, : row.draft.accepted + 1] = True
                drafts.append(row.draft)
                row.draft = None
        if drafts and self.observer is not None:
            self.observer.on_outcomes(drafts, [now - one.begin_s for one in drafts])
        # A policy observes each round, like in the live loop, even if all of its requests were omitted from this step.
        if not (self._reads_outcomes and (drafts or self._has_round)):
            return
        self._has_round = False
        counts, seconds = np.zeros((6, self.options.rows), dtype=np.int64), np.zeros(self.options.rows)
        active, cut = np.zeros((2, self.options.rows), dtype=bool)
        for one in drafts:
            active[one.row], seconds[one.row] = True, now - one.begin_s
            cut[one.row] = one.hit_limit or not self.eos.isdisjoint(one.new)
            counts[:, one.row] = one.context, one.drafted, one.verified, one.backlog, one.decisions, one.accepted
        context, drafted, verified, backlog, decisions, accepted = counts
        if not self.policy.reads_clock:
            seconds[:] = 0.0
            if self._profile is not None and self.policy.reads_seconds:
                price = self._profile.decision(self.policy.cost_name)
                seconds = self._profile.round_seconds(context, drafted, verified, backlog, decisions, price) * active
        self.host.observe(RoundOutcome(active, drafted, verified, accepted, cut, seconds))

    def _begin(self, rows: Sequence[RequestRow]) -> None:
        """Begin new texts in rows."""
        for row in rows:
            row.draft = row.round = None
            kept = min(row.kept, row.committed, len(row.text) - 1)
            row.committed = self._call(methodcaller("keep_prefix", row.index, kept)) or 0
            if self.observer is not None:
                self.observer.on_begin(row.index, row.text, row.name)
        if rows:
            keys = np.arange(self._texts, self._texts + len(rows), dtype=np.int64)  # numbers of the texts
            self._texts += len(rows)
            self.host.refill(np.array([row.index for row in rows], dtype=np.int64), keys)

    def _call(self, call: Callable[[Drafter], Any]) -> Any:
        """Return the result of a call of the drafter; None after it has failed."""
        begin, result = time.perf_counter(), None
        try:
            if self._drafter is not None:
                result = call(self._drafter)
        except Exception as error:  # a plugin may raise anything; the engine must continue
            self._drafter, self._failed = None, error_text(error)
            text = f"the drafter failed ({self._failed}); nothing is drafted from now on"
            warnings.warn(text, SpecstopWarning, stacklevel=3)
        self.stats.drafter_s += time.perf_counter() - begin
        return result

    def scores(self, round: RoundState, depth: int, rows: Rows) -> Tensor:
        """Return the logits [R, V] after R rows of a depth; without scores after the drafter has failed."""
        shape = len(rows), self.options.vocabulary
        logits = self._call(lambda drafter: drafter.propose(round, depth, rows).dense(shape[1]).reshape(shape))
        return torch.full((len(rows), 1), -math.inf) if logits is None else logits

    def _commit(self, rows: Sequence[RequestRow]) -> None:
        """Pass the committed tokens of the texts to the drafter, all but the last, the anchor."""
        needed = max(len(row.text) for row in rows) + self._topology.deepest + 1
        if needed > self._capacity:
            self._capacity = 2 ** (needed - 1).bit_length()
            self._call(methodcaller("reserve", self.options.rows, self._capacity))
            for row in self._requests.rows:  # the drafter has forgotten all texts
                row.committed = 0
        for row in rows:
            if new := row.text[row.committed : -1].tolist():
                self._call(methodcaller("committed", row.index, new, None))
                row.committed = len(row.text) - 1

    def _draft(self, rows: Sequence[RequestRow], begin_s: float) -> dict[int, list[int]]:
        """Return the drafts of texts by their row."""
        self._commit(rows)
        count, at = self.options.rows, [row.index for row in rows]
        active, context = np.zeros(count, dtype=bool), np.zeros(count, dtype=np.int64)
        active[at], context[at] = True, [len(row.text) for row in rows]
        backlog = self._call(lambda drafter: np.where(active, drafter.backlog(), 0))
        round = RoundState(self._topology, active, context, np.zeros_like(context) if backlog is None else backlog)
        set_anchors(round, {row.index: row.text[-2:].tolist() for row in rows})
        self._reader.begin(round)
        self.timer.restart()
        draft(_Source(self, self._reader), self.host, round)
        self._has_round = True
        self.stats.policy_s += sum(self.timer.laps["policy"])
        drafts = []
        for row in rows:
            index, drafted, decisions = row.index, int(round.drafted[row.index]), int(round.decisions[row.index])
            tokens = round.tokens[index, 1 : 1 + round.verified[index]].tolist()
            row.draft = EngineDraft(
                index, len(row.text), tokens, drafted, decisions, int(round.backlog[index]), bool(round.hit_limit[index]),
                begin_s,
            )  # fmt: skip
            row.round = round
            drafts.append(row.draft)
            self.stats.drafted += drafted
        if self.observer is not None:
            self.observer.on_drafts(drafts, time.perf_counter() - begin_s)
        return {one.row: one.tokens for one in drafts}


class _Source:
    """`rounds.CandidateSource` of chains with the most likely tokens."""

    decides_ended = selects_levels = False

    def __init__(self, drafting: Drafting, reader: FeatureReader) -> None:
        self.timer, self._drafting, self._reader = drafting.timer, drafting, reader

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """Feed the streams [S, 1]; return which have drawn a token, and which of these continue."""
        self._reader.read_path()
        at = np.flatnonzero(feeding[:, 0])
        logits = self._drafting.scores(round, depth, [(row, [depth]) for row in at.tolist()])
        best_tokens = best_of_rows(logits)
        best, token = logits.gather(-1, best_tokens[:, None])[:, 0], best_tokens.cpu().numpy()
        if not math.isfinite(float(best.sum())):  # a lookup may have no candidate; logits of a broken model may be NaN
            finite = torch.isfinite(best)
            at, token, logits = at[finite.cpu().numpy()], token[finite.cpu().numpy()], logits[finite]
        round.tokens[at, depth + 1] = token
        drawn = np.zeros_like(feeding)
        drawn[at] = True
        round.drawn[:, depth + 1] = drawn[:, 0]
        if len(at):
            # The most likely token is drawn, so the logits are also the scores of which it is the largest.
            scores = DraftScores([(i, [depth]) for i in at.tolist()], [1] * len(at), logits, scores=logits)
            self._reader.drawn(depth + 1, [scores])
            if self._drafting.observer is not None:
                self._drafting.observer.on_draft_step(depth + 1, at, logits, round.drawn_tokens(scores)[0])
        going = drawn.copy()
        going[at[[one in self._drafting.eos for one in token.tolist()]]] = False
        return drawn, drawn if np.array_equal(drawn, going) else going

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `rounds.CandidateSource`."""
        return self._reader.step(depth, alive, history)
