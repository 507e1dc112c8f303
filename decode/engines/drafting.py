"""Drafts for all requests of a serving engine. A step observes the outcomes of the last drafts, then drafts for all requests
side by side while the policy ends each draft. A policy may also choose the drafter of each request, or none. A draft is a
chain of one drafter, because engines verify chains.

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
from functools import partial
from operator import methodcaller
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.errors import InputError, SpecstopWarning
from ...policies.failures import error_text
from ...policies.features import SIGNALS, DrawnTokens, History, Layout
from ...policies.fixed import FixedLength
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from ...policies.routing import OneDrafter
from ..drafters.base import Drafter
from ..feature_reader import FeatureReader, set_anchors
from ..hooks import Timer
from ..model_source import read_signals
from ..round_state import DraftScores, RoundState, Rows
from ..rounds import draft
from ..topology import chain, with_drafters
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
        drafter: index of their drafter; -1 = none drafted.
        drafted, decisions, backlog: tokens drawn, calls of the policy, committed tokens that the drafter had to read.
        hit_limit: an end of text ended the draft, not the policy.
        ran_out: the drafter had no further token.
        signals: [D, .] float32, `policies.features.ROUTE_FEATURES`; None if the policy reads none.
        begin_s: time at which the step began.
        new: tokens that followed, at least one after `set_outcome`.
        accepted, verified: number of tokens of the draft.
    """

    row: int
    context: int
    tokens: list[int]
    drafter: int = -1
    drafted: int = 0
    decisions: int = 0
    backlog: int = 0
    hit_limit: bool = False
    ran_out: bool = False
    signals: Array | None = None
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

    def on_draft_step(self, depth: int, drafter: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """Observe the tokens of a depth, drawn in `rows` [R] from logits [R, V] of a drafter."""

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
        prompt_tokens: number of tokens of the prompt.
        committed: by drafter, number of tokens that it has received.
        draft, round: the last draft, if its outcome is not known yet, and its round.
    """

    index: int
    text: Array
    committed: list[int]
    name: str | None = None
    last_step: int = 0
    continued: bool = False
    kept: int = 0
    new: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    draft: EngineDraft | None = None
    round: RoundState | None = None


class RequestRows:
    """Assigns requests to rows by their texts, since their places in the engine's batch change.

    If the engine's names of the requests are known, they distinguish requests with equal tokens.
    """

    def __init__(self, count: int, drafters: int) -> None:
        self.rows = [RequestRow(index, np.zeros(0, dtype=np.int32), [0] * drafters) for index in range(count)]
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
        drafters: propose the tokens; they read no hidden states of the target. A policy that does not route uses the first.
        policy: chooses the drafter and ends each draft; see `settings.check_engine_policy`.
        options: limits.
        profile: models the seconds of rounds for policies that observe them; None = rounds take 0 seconds.
        observer: observes the drafts.

    Attributes:
        stats: time and numbers so far.
        host: of the policy.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: StopPolicy,
        options: Options,
        profile: Profile | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.options, self.stats, self.observer = options, DraftingStats(), observer
        self.eos, self.timer = frozenset(options.eos), Timer(torch.device("cpu"))
        self._drafters: list[Drafter | None] = list(drafters)  # None after a failure
        self._failed = ""  # why a drafter is not called any more
        self._profile, self._texts = profile, 0
        self._requests, self._capacity = RequestRows(options.rows, len(drafters)), _INITIAL_TOKENS
        for drafter in drafters:
            drafter.reserve(options.rows, self._capacity)
        self.use(policy)

    def use(self, policy: StopPolicy) -> None:
        """Use this policy from the next text on."""
        policy, length = policy.limited(self.options.depth), min(self.options.fallback, self.options.depth)
        observes_seconds = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
        self.host = PolicyHost(
            policy,
            profile=None if policy.reads_clock or not observes_seconds else self._profile,
            batch=self.options.rows,
            drafters=len(self._drafters) if policy.routes else 1,
            fallback=OneDrafter(length) if policy.routes else FixedLength(length),
            on_replaced=self._read_for,
        )
        self._has_round = False  # the policy has not observed the outcome of its last decisions
        self._read_for(policy)
        self.host.start(np.arange(self.options.rows, dtype=np.int64))

    def _read_for(self, policy: StopPolicy) -> None:
        drafters, layout = range(len(self._drafters) if policy.routes else 1), Layout(policy.features)
        self._topology = with_drafters(chain(min(policy.max_depth, self.options.depth)), len(drafters))
        signals = partial(read_signals, [partial(self._signals, index) for index in drafters])
        self._reader = FeatureReader(
            policy, self._topology, self.options.temperature, streams=self.options.rows, signals=signals
        )
        self._reads_outcomes = self.host.observes or bool(layout.history) or "idle_tokens" in layout.route

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
            raise InputError(f"a drafter failed ({self._failed}); nothing was recorded after that")
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
        """Pass the outcomes of the last drafts to policy and observer, and mark the tokens that the drafters keep."""
        verified = []
        for row in rows:
            if row.draft is not None and row.round is not None and row.new:
                row.draft.set_outcome(row.new)
                path = _path(row.round, row.draft.drafter)
                row.round.on_path[row.index, path[: row.draft.accepted + 1]] = True
                verified.append((row.draft, row.round))
                row.draft = None
        if verified and self.observer is not None:
            self.observer.on_outcomes([one for one, _ in verified], [now - one.begin_s for one, _ in verified])
        # A policy observes each round, like in the live loop, even if all of its requests were omitted from this step.
        if self._reads_outcomes and (verified or self._has_round):
            self._has_round = False
            self.host.end_round(self._verified_round(verified, now))

    def _verified_round(self, verified: Sequence[tuple[EngineDraft, RoundState]], now: float) -> RoundState:
        """Return one round with the drafts that were verified in a step. They may have been drafted in different steps."""
        count = self.options.rows
        round = self._new_round(np.zeros(count, dtype=bool), np.zeros(count, dtype=np.int64))
        round.count()
        round.accepted, round.ended = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
        for one, drafted in verified:
            row = one.row
            for name in ("context", "backlog", "drafting", "drafted", "decisions", "hit_limit", "steps"):
                getattr(round, name)[row] = getattr(drafted, name)[row]
            round.active[row], round.verified[row], round.accepted[row] = True, one.verified, one.accepted
            round.ended[row] = not self.eos.isdisjoint(one.new)
            round.seconds[row] = now - one.begin_s if self.policy.reads_clock else 0.0
        return round

    def _begin(self, rows: Sequence[RequestRow]) -> None:
        """Begin new texts in rows."""
        for row in rows:
            row.draft = row.round = None
            row.prompt_tokens = len(row.text) - 1  # the engine committed one token when it read the prompt
            for index, committed in enumerate(row.committed):
                kept = min(row.kept, committed, row.prompt_tokens)
                row.committed[index] = self._call(index, methodcaller("keep_prefix", row.index, kept)) or 0
            if self.observer is not None:
                self.observer.on_begin(row.index, row.text, row.name)
        if rows:
            keys = np.arange(self._texts, self._texts + len(rows), dtype=np.int64)  # numbers of the texts
            self._texts += len(rows)
            self.host.refill(np.array([row.index for row in rows], dtype=np.int64), keys)

    def _call(self, index: int, call: Callable[[Drafter], Any]) -> Any:
        """Return the result of a call of a drafter; None after it has failed."""
        drafter = self._drafters[index]
        try:
            return None if drafter is None else call(drafter)
        except Exception as error:  # a plugin may raise anything; the engine must continue
            self._drafters[index], self._failed = None, error_text(error)
            text = f"a drafter failed ({self._failed}); it drafts nothing from now on"
            warnings.warn(text, SpecstopWarning, stacklevel=3)
        return None

    def _signals(self, index: int, row: int, anchor: int) -> tuple[float, ...]:
        """Return the signals of a drafter about a row; 0 after it has failed."""
        none = (0.0,) * len(SIGNALS)
        values = self._call(index, lambda drafter: tuple(map(float, drafter.signals(row, anchor))))
        return none if values is None or len(values) != len(none) else values

    def scores(self, index: int, round: RoundState, depth: int, rows: Rows) -> Tensor:
        """Return the logits [R, V] of a drafter after R rows of a depth; without scores after it has failed."""
        begin, shape = time.perf_counter(), (len(rows), self.options.vocabulary)
        logits = self._call(index, lambda drafter: drafter.propose(round, depth, rows).dense(shape[1]).reshape(shape))
        self.stats.drafter_s += time.perf_counter() - begin
        return torch.full((len(rows), 1), -math.inf) if logits is None else logits

    def _commit(self, rows: Sequence[RequestRow]) -> None:
        """Pass the committed tokens of the texts to the drafters, all but the last, the anchor."""
        begin, drafters = time.perf_counter(), range(len(self._drafters))
        needed = max(len(row.text) for row in rows) + self._topology.deepest + 1
        if needed > self._capacity:
            self._capacity = 2 ** (needed - 1).bit_length()
            for index in drafters:
                self._call(index, methodcaller("reserve", self.options.rows, self._capacity))
            for row in self._requests.rows:  # the drafters have forgotten all texts
                row.committed = [0 for _ in drafters]
        for row in rows:
            for index in drafters:
                if new := row.text[row.committed[index] : -1].tolist():
                    self._call(index, methodcaller("committed", row.index, new, None))
                    row.committed[index] = len(row.text) - 1
        self.stats.drafter_s += time.perf_counter() - begin

    def _new_round(self, active: Array, context: Array, backlogs: Sequence[Array] = ()) -> RoundState:
        """Return a round of the active rows [R], given the backlog [R] of each drafter; () = all 0."""
        drafters = self._topology.drafters
        backlog = np.zeros((len(active), drafters), dtype=np.int64)
        for index, values in enumerate(backlogs):
            backlog[:, index] = values
        return RoundState(self._topology, active, context, backlog[:, 0] if drafters == 1 else backlog)

    def _draft(self, rows: Sequence[RequestRow], begin_s: float) -> dict[int, list[int]]:
        """Return the drafts of texts by their row."""
        self._commit(rows)
        count, at = self.options.rows, [row.index for row in rows]
        active, context = np.zeros(count, dtype=bool), np.zeros(count, dtype=np.int64)
        active[at], context[at] = True, [len(row.text) for row in rows]
        backlogs = [
            self._call(index, lambda drafter: np.where(active, drafter.backlog(), 0))
            for index in range(self._topology.drafters)
        ]
        round = self._new_round(active, context, [0 * context if each is None else each for each in backlogs])
        prompt_tokens = {row.index: row.prompt_tokens for row in rows}
        set_anchors(round, {row.index: row.text[-2:].tolist() for row in rows}, prompt_tokens)
        self._reader.begin(round)
        self.timer.restart()
        draft(_Source(self, self._reader), self.host, round)
        self._has_round = True
        self.stats.policy_s += sum(self.timer.laps["policy"])
        drafts = self._drafts(rows, round, begin_s)
        self.stats.drafted += sum(one.drafted for one in drafts)
        if self.observer is not None:
            self.observer.on_drafts(drafts, time.perf_counter() - begin_s)
        return {one.row: one.tokens for one in drafts}

    def _drafts(self, rows: Sequence[RequestRow], round: RoundState, begin_s: float) -> list[EngineDraft]:
        """Set the drafts of texts after a round was drafted, and return them."""
        # The first drafter, if a plugin chooses several in spite of `joins`.
        drafter = np.where(round.drafting.any(1), round.drafting.argmax(1), -1)
        path = np.array([_path(round, index) for index in range(round.topology.drafters)])[drafter]  # [R, K + 1]
        tokens, drawn, fed, sent = (
            np.take_along_axis(values, path, 1) for values in (round.tokens, round.drawn, round.fed, round.sent)
        )
        drafted, verified, backlog, chains = drawn.sum(1), sent[:, 1:].sum(1), round.read_backlog, tokens.tolist()
        ran_out, drafts = fed.sum(1) > drafted, []
        for row in rows:
            index = row.index
            signals = None if round.signals is None else round.signals[index]
            proposed = chains[index][1 : 1 + int(verified[index])]
            row.draft = EngineDraft(
                index, len(row.text), proposed, int(drafter[index]), int(drafted[index]), int(round.decisions[index]),
                int(backlog[index]), bool(round.hit_limit[index]), bool(ran_out[index]), signals, begin_s,
            )  # fmt: skip
            row.round = round
            drafts.append(row.draft)
        return drafts


def _path(round: RoundState, drafter: int) -> list[int]:
    """Return the rows of a drafter's chain, the anchor first."""
    return round.topology.paths[round.topology.levels[-1][drafter]]


class _Source:
    """`rounds.CandidateSource` of a chain of each drafter with its most likely tokens."""

    decides_ended = selects_levels = False

    def __init__(self, drafting: Drafting, reader: FeatureReader) -> None:
        self.timer, self._drafting, self._reader = drafting.timer, drafting, reader

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """Feed the chains [S, D]; return which have drawn a token, and which of these continue."""
        self._reader.read_path()
        drawn, going, levels = np.zeros_like(feeding), np.zeros_like(feeding), []
        for drafter in range(feeding.shape[1]):
            at = np.flatnonzero(feeding[:, drafter])
            path = _path(round, drafter)
            if not len(at):
                continue
            logits = self._drafting.scores(drafter, round, depth, [(row, [path[depth]]) for row in at.tolist()])
            best_tokens = best_of_rows(logits)
            best, token = logits.gather(-1, best_tokens[:, None])[:, 0], best_tokens.cpu().numpy()
            if not math.isfinite(
                float(best.sum())
            ):  # a lookup may have no candidate; logits of a broken model may be NaN
                finite = torch.isfinite(best)
                at, token, logits = at[finite.cpu().numpy()], token[finite.cpu().numpy()], logits[finite]
            if not len(at):
                continue
            round.tokens[at, path[depth + 1]] = token
            drawn[at, drafter] = True
            going[at, drafter] = [one not in self._drafting.eos for one in token.tolist()]
            # The most likely token is drawn, so the logits are also the scores of which it is the largest.
            fed = [(row, [path[depth]]) for row in at.tolist()]
            scores = DraftScores(fed, [1] * len(at), logits, scores=logits, drafter=drafter)
            levels.append(scores)
            if self._drafting.observer is not None:
                self._drafting.observer.on_draft_step(depth + 1, drafter, at, logits, round.drawn_tokens(scores)[0])
        round.drawn[:, round.topology.spans[depth + 1]] = drawn
        if levels:
            self._reader.drawn(depth + 1, levels)
        return drawn, drawn if np.array_equal(drawn, going) else going

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `rounds.CandidateSource`."""
        return self._reader.step(depth, alive, history)
