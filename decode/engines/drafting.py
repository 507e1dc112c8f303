"""Drafts for all requests of an engine, step by step: outcomes of the last drafts are observed, then the drafter drafts for
all requests side by side and the policy ends each draft by itself.

A step may leave requests out, trim drafts, or commit tokens that were not drafted. So nothing is counted: the outcome of a
draft is what follows in the text. Policies cannot read what an engine does not pass on: rows and states of the target, noise.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import DraftStep, DraftTree, RoundOutcome, StopPolicy
from ...policies.errors import InputError, SpecstopWarning
from ...policies.features import DrawnTokens, Layout
from ...policies.fixed import FixedLength
from ...policies.history import History
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from ...policies.typing import Array
from ...policies.validation import error_text
from ..feature_reader import FeatureReader
from ..hooks import Timer
from ..round_state import DraftScores, RoundState
from ..rounds import draft as draft_chains
from ..texts import Anchor, Text
from ..topology import Topology, chain
from ..verify.noise import best_of_rows
from .rows import Placed, Rows


@dataclass(slots=True)
class Sent:
    """A draft that the engine was given.

    Attributes:
        row: of the request.
        context: tokens of the text before it.
        tokens: given to the engine; `drafted` were drawn.
        drafted, decisions, backlog: tokens drawn, times the policy was asked, committed tokens that the draft had to read.
        batch: requests that were drafted for in this step.
        capped: an end of text ended it, not the policy.
        began_s: when the step began to draft.
    """

    row: int
    context: int
    tokens: list[int]
    drafted: int = 0
    decisions: int = 0
    backlog: int = 0
    batch: int = 1
    capped: bool = False
    began_s: float = 0.0


@dataclass(slots=True)
class Heard:
    """What came of a draft.

    Attributes:
        sent: the draft.
        new: tokens that followed, at least one.
        accepted, verified: of the draft.
    """

    sent: Sent
    new: list[int]
    accepted: int
    verified: int

    @staticmethod
    def of(sent: Sent, new: list[int]) -> Heard:
        """Compare a draft with the tokens that followed.

        An engine commits the accepted tokens and one more. Where all that is new was drafted, the draft was trimmed: the last
        of the new tokens was the target's own.
        """
        agreed = 0
        while agreed < min(len(sent.tokens), len(new)) and sent.tokens[agreed] == new[agreed]:
            agreed += 1
        trimmed = agreed == len(new)
        return Heard(sent, new, len(new) - 1, len(new) - 1) if trimmed else Heard(sent, new, agreed, len(sent.tokens))


class Observer(Protocol):
    """Looks on, as a trace does."""

    def began(self, row: int, text: Array, name: str | None) -> None:
        """Take note of a new text in a row, and of the engine's name for it."""

    def level(self, depth: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """Take note of the tokens of a depth, drawn in `rows` [R] from logits [R, V]."""

    def sent(self, drafts: Sequence[Sent], draft_s: float) -> None:
        """Take note of the drafts of a step, and of the seconds that it took to make them."""

    def heard(self, rounds: Sequence[Heard], step_s: Sequence[float]) -> None:
        """Take note of what followed drafts, and of the seconds since each was begun."""


class DraftRows(Protocol):
    """A drafter that has read a text in each of its rows."""

    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """Append tokens, at least one each, to the texts of some rows; return [R, V], what comes after the last of each.

        Args:
            rows: R of them.
            tokens: of each: at depth 0 what the text has grown by, at another the one that was drawn there.
            depth: of the tokens in the draft.
        """

    def roll_back(self, row: int, length: int) -> None:
        """Forget all of a row but its first `length` tokens."""


class Chains:
    """Drafts S chains of likeliest tokens: the part of `rounds.RoundSource` that drafts.

    Args:
        read: see `DraftRows.read`.
        reader: of the policy's features.
        rows: [S], where the streams are in the drafter.
        unread: by stream, the tokens that the drafter has not read, the anchor last.
        texts: of the streams.
        eos: tokens after which nothing is drafted.
        observe: called with each depth, the streams [R] that drew there, logits [R, V] and the tokens; None = nothing.
        timer: times the calls of the policy.

    Attributes:
        read_count: [S] int64, the tokens that the drafter has read, drawn ones included.
    """

    asks_ended = selects_levels = False

    def __init__(
        self,
        read: Callable[[Sequence[int], Sequence[Sequence[int]], int], Tensor],
        reader: FeatureReader,
        rows: Sequence[int],
        unread: Sequence[Sequence[int]],
        texts: Sequence[Array],
        eos: frozenset[int],
        observe: Callable[[int, Array, Tensor, DrawnTokens], None] | None,
        timer: Timer,
    ) -> None:
        self.timer, self.reader, self._read, self._rows, self._unread = timer, reader, read, rows, unread
        self._eos, self._observe, self._texts = eos, observe, texts
        self.read_count = np.zeros(len(rows), dtype=np.int64)

    def begin(self, topology: Topology) -> RoundState:
        """Return a new round."""
        context, backlog = (np.array(list(map(len, parts)), dtype=np.int64) for parts in (self._texts, self._unread))
        round = RoundState(topology, np.ones(len(context), dtype=bool), context, backlog)
        round.tokens[:, 0] = [text[-1] for text in self._texts]
        # Of a text only the last two tokens are read, and no row of the target.
        round.texts = [cast(Text, SimpleNamespace(tokens=text[-2:].tolist())) for text in self._texts]
        round.anchors = [Anchor(torch.zeros(1, 1), 0, None)] * len(context)
        self.reader.begin(round)
        return round

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """Feed the streams [S, 1]; return which have drawn a token, and which of them go on."""
        if self.reader.has_unread_path:
            self.reader.read()
        at = np.flatnonzero(feeding[:, 0])
        fed = [self._unread[i] for i in at.tolist()] if depth == 0 else round.tokens[at, depth : depth + 1].tolist()
        logits = self._read([self._rows[i] for i in at.tolist()], fed, depth)
        self.read_count[at] += round.backlog[at] if depth == 0 else 1
        likeliest = best_of_rows(logits)
        best, token = logits.gather(-1, likeliest[:, None])[:, 0], likeliest.cpu().numpy()
        if not math.isfinite(float(best.sum())):  # a lookup may know no token, a broken model has none to compare
            known = torch.isfinite(best)
            at, token, logits = at[known.cpu().numpy()], token[known.cpu().numpy()], logits[known]
        round.tokens[at, depth + 1] = token
        drawn = np.zeros_like(feeding)
        drawn[at] = True
        round.drawn[:, depth + 1] = drawn[:, 0]
        if len(at):
            # The likeliest token is drawn, so the scores that it is the largest of are the logits.
            scores = DraftScores([(i, [depth]) for i in at.tolist()], [1] * len(at), logits, scores=logits)
            self.reader.drawn(depth + 1, scores)
            if self._observe is not None:
                self._observe(depth + 1, at, logits, round.drawn_tokens(scores)[0])
        ended = at[[one in self._eos for one in token.tolist()]] if self._eos else at[:0]
        if not len(ended):
            return drawn, drawn
        going = drawn.copy()
        going[ended] = False
        return drawn, going

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `rounds.CandidateSource`."""
        return self.reader.step(depth, alive, history)

    def tree(self, round: RoundState) -> DraftTree:
        """See `rounds.CandidateSource`."""
        return round.draft_tree()


@dataclass
class Spent:
    """Steps, their requests and the tokens drafted for them; seconds of all that is done here, of the draft model, and of
    decisions with what is read for them."""

    steps: int = 0
    requests: int = 0
    drafted: int = 0
    all_s: float = 0.0
    model_s: float = 0.0
    asked_s: float = 0.0


@dataclass(frozen=True)
class Options:
    """How an engine drafts.

    Attributes:
        rows: requests that are drafted for at once, at most.
        depth: K, the most tokens of a draft.
        readable: the longest text that the draft reads.
        temperature: of the sampling, for features that read it.
        eos: tokens after which nothing is drafted.
        fallback: length that is drafted once a policy has failed.
    """

    rows: int
    depth: int
    readable: int
    temperature: float = 0.0
    eos: tuple[int, ...] = ()
    fallback: int = 4


class Drafting:
    """Drafts for the requests of an engine.

    Args:
        draft: what drafts.
        policy: ends each draft; see `policies.check_engine_policy`.
        options: see there.
        profile: prices rounds for policies that observe seconds; None = they take no time.
        observer: looks on.

    Attributes:
        spent: so far.
        host: of the policy.
    """

    def __init__(
        self,
        draft: DraftRows,
        policy: StopPolicy,
        options: Options,
        profile: Profile | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.options, self.spent = options, Spent()
        self._draft: DraftRows | None = draft
        self._failed = ""  # why the drafter is not called any more
        self._profile, self._observer = profile, observer
        self._timer = Timer(torch.device("cpu"))
        self.use(policy)
        self._rows, self._eos = Rows(options.rows), frozenset(options.eos)
        self._waits: list[Sent | None] = [None] * options.rows  # drafts whose outcome is not known yet
        self._read = [0] * options.rows  # tokens that the draft model has read
        self._texts = 0

    def use(self, policy: StopPolicy) -> None:
        """Ask this policy from the next text on."""
        fallback = FixedLength(min(self.options.fallback, self.options.depth))
        policy = policy.limited(self.options.depth)
        self.host = PolicyHost(policy, batch=self.options.rows, fallback=fallback, on_replaced=self._draft_by)
        self._draft_by(policy)

    def _draft_by(self, policy: StopPolicy) -> None:
        self._topology = chain(min(policy.max_depth, self.options.depth))
        self._reads_history = bool(Layout(policy.features).history)
        self._readers: dict[int, FeatureReader] = {}  # by number of streams

    def _reader(self, streams: int) -> FeatureReader:
        if streams not in self._readers:
            reader = FeatureReader(self.policy, self._topology, self.options.temperature, streams=streams)
            self._readers[streams] = reader
        return self._readers[streams]

    @property
    def policy(self) -> StopPolicy:
        """The policy that is asked."""
        return self.host.policy

    def check_failed(self) -> None:
        """Raise if drafter or policy has failed: what another drafted is no trace or profile of them.

        Raises:
            InputError: the drafter has failed.
            PolicyFailure: the policy has failed.
        """
        if self._failed:
            raise InputError(f"the drafter failed ({self._failed}); nothing was recorded from there on")
        if self.host.failure is not None:
            raise self.host.failure.as_error("nothing was recorded from there on")

    def propose(self, texts: Sequence[Array], names: Sequence[str] | None = None) -> list[list[int]]:
        """Return a draft for each text, possibly empty.

        Args:
            texts: [n] token ids of each request that has committed a token in this step.
            names: of the requests, where the engine tells them.
        """
        begin = time.perf_counter()
        # By the whole draft and a token of the target's at most.
        grown = [1 if sent is None else len(sent.tokens) + 1 for sent in self._waits]
        placed = self._rows.place(texts, grown, names)
        self._hear([one for one in placed if one is not None and one.same], begin)
        known: Sequence[str | None] = [None] * len(texts) if names is None else names
        self._begin([(one, name) for one, name in zip(placed, known, strict=True) if one is not None and not one.same])
        drafts: list[list[int]] = [[] for _ in texts]
        longest = self.options.readable - self._topology.deepest
        # Features read the token before the anchor too, so a text of one token is not drafted for.
        rows = {at: one.row for at, one in enumerate(placed) if one is not None and 1 < len(texts[at]) <= longest}
        if rows and self._topology.deepest:
            for at, tokens in zip(rows, self._draft_for(list(rows.values()), begin), strict=True):
                drafts[at] = tokens
        self.spent.steps += 1
        self.spent.requests += len(texts)
        self.spent.all_s += time.perf_counter() - begin
        return drafts

    def _hear(self, placed: Sequence[Placed], now: float) -> None:
        """Tell policy and observer what followed the last drafts; the draft model forgets what was wrong."""
        heard = []
        for one in placed:
            sent = self._waits[one.row]
            if sent is not None and one.new:
                heard.append(Heard.of(sent, one.new))
                # Its cache keeps the text and the accepted part of the draft.
                self._forget(one.row, sent.context + heard[-1].accepted)
                self._waits[one.row] = None
        seconds = [now - one.sent.began_s for one in heard]
        if self._observer is not None and heard:
            self._observer.heard(heard, seconds)
        if heard and (self.host.observes or self._reads_history):
            self._tell(heard, np.array(seconds))

    def _tell(self, heard: Sequence[Heard], seconds: Array) -> None:
        """Tell the policy of rounds that took so long."""
        sent = [one.sent for one in heard]
        rows, context, drafted, decisions, backlog = _columns(
            [(one.row, one.context, one.drafted, one.decisions, one.backlog) for one in sent]
        )
        accepted, verified = _columns([(one.accepted, one.verified) for one in heard])
        cut = np.array([one.sent.capped or not self._eos.isdisjoint(one.new) for one in heard])
        # Modelled seconds, the same in every run, unless the policy asks for measured ones.
        if not self.policy.reads_clock:
            seconds = np.zeros(len(heard))
            if self._profile is not None and self.policy.reads_seconds:
                price = self._profile.decision(self.policy.cost_name)
                seconds = self._profile.round_seconds(context, drafted, verified, backlog, decisions, price, None)
        active = np.ones(len(heard), dtype=bool)
        self.host.load_rows(rows)
        self.host.observe(RoundOutcome(active, drafted, verified, accepted, cut, seconds))
        self.host.store_rows(rows)

    def _begin(self, placed: Sequence[tuple[Placed, str | None]]) -> None:
        """Begin new texts, each with its name, in rows; what they begin with alike the draft model need not read again."""
        rows = [one.row for one, _ in placed]
        for one, name in placed:
            self._waits[one.row] = None
            self._forget(one.row, one.kept)
            if self._observer is not None:
                self._observer.began(one.row, self._rows.text(one.row), name)
        keys = np.arange(self._texts, self._texts + len(rows), dtype=np.int64)  # a text's number is its key
        self._texts += len(rows)
        if rows:
            self.host.refill_rows(np.array(rows, dtype=np.int64), keys)

    def _forget(self, row: int, length: int) -> None:
        """Have the draft model know no more of a row than its first `length` tokens."""
        if self._read[row] > length:
            self._read[row] = length
            try:
                if self._draft is not None:
                    self._draft.roll_back(row, length)
            except Exception as error:  # a plugin may raise anything; the engine must go on
                self._fail(error)

    def _read_draft(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """See `DraftRows.read`; without scores after the drafter has failed."""
        begin = time.perf_counter()
        logits = None
        try:
            if self._draft is not None:
                logits = self._draft.read(rows, tokens, depth)
        except Exception as error:  # a plugin may raise anything; the engine must go on
            self._fail(error)
        self.spent.model_s += time.perf_counter() - begin
        return torch.full((len(rows), 1), -math.inf) if logits is None else logits

    def _fail(self, error: Exception) -> None:
        """Warn once, and draft nothing from here on."""
        self._draft, self._failed = None, error_text(error)
        text = f"the drafter failed ({self._failed}); nothing is drafted from here on"
        warnings.warn(text, SpecstopWarning, stacklevel=3)

    def _draft_for(self, rows: Sequence[int], began_s: float) -> list[list[int]]:
        """Return the drafts of the texts in `rows`."""
        texts, here = [self._rows.text(row) for row in rows], np.array(rows, dtype=np.int64)
        for row, text in zip(rows, texts, strict=True):  # the anchor is read in any case, however little has changed
            self._forget(row, len(text) - 1)
        unread = [text[self._read[row] :].tolist() for row, text in zip(rows, texts, strict=True)]
        host, observer = self.host, self._observer

        def observe(depth: int, at: Array, logits: Tensor, drawn: DrawnTokens) -> None:
            assert observer is not None
            observer.level(depth, here[at], logits, drawn)

        source = Chains(
            self._read_draft, self._reader(len(rows)), rows, unread, texts, self._eos,
            observe if observer is not None else None, self._timer,
        )  # fmt: skip
        round = source.begin(self._topology)
        self._timer.restart()
        host.load_rows(here)
        draft_chains(source, host, round)
        host.store_rows(here)
        self.spent.asked_s += sum(self._timer.laps["policy"])
        drafts = []
        for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
            drafted, tokens = int(round.drafted[at]), round.tokens[at, 1 : 1 + round.verified[at]].tolist()
            # The token drawn last was not read, unless nothing was known to come after it.
            self._read[row] += int(source.read_count[at])
            drafts.append(
                Sent(row, len(text), tokens, drafted, int(round.decisions[at]), len(unread[at]), len(rows),
                     bool(round.hit_limit[at]), began_s)
            )  # fmt: skip
            self._waits[row] = drafts[-1]
            self.spent.drafted += drafted
        if observer is not None:
            observer.sent(drafts, time.perf_counter() - began_s)
        return [sent.tokens for sent in drafts]


def _columns(rows: Sequence[tuple[int, ...]]) -> Array:
    """Return rows of whole numbers as columns, each in one piece."""
    return np.ascontiguousarray(np.array(rows, dtype=np.int64).T)
