"""Drafts for all requests of a serving engine. A step observes the outcomes of the last drafts, then drafts for all requests
side by side while the policy ends each draft.

A step may omit requests, trim drafts, or commit tokens that were not drafted. Therefore the outcome of a draft is what
follows in the text. Policies cannot read what an engine does not pass on: logits and states of the target, noise.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array, DraftStep, RoundOutcome, StopPolicy
from ...policies.errors import InputError, SpecstopWarning
from ...policies.features import DrawnTokens, History, Layout
from ...policies.fixed import FixedLength
from ...policies.host import PolicyHost, error_text
from ...policies.profile import Profile
from ..feature_reader import FeatureReader
from ..hooks import Timer
from ..round_state import DraftScores, RoundState
from ..rounds import draft
from ..texts import Anchor, Text
from ..topology import chain
from ..verify.noise import best_of_rows


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


class DraftRows(Protocol):
    """A drafter that has read a text in each of its rows."""

    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """Append tokens, at least one each, to the texts of R rows; return the logits [R, V] after them.

        Args:
            rows: R rows.
            tokens: by row: at depth 0 the tokens that the text has grown by, at other depths the token drawn there.
            depth: of the tokens in the draft.
        """

    def roll_back(self, row: int, length: int) -> None:
        """Keep only the first `length` tokens of a row."""


@dataclass(slots=True)
class _Row:
    """The text of a row, name of the request, last step with it, tokens read by the drafter, draft without an outcome."""

    text: Array
    name: str | None = None
    last_step: int = 0
    read: int = 0
    draft: EngineDraft | None = None


class Placed(NamedTuple):
    """The row of a request; whether its text continues that of the row; length of the common prefix; tokens after it."""

    row: int
    continued: bool
    kept: int
    new: list[int]


class RequestRows:
    """Assigns requests to rows by their texts, since their places in the engine's batch change.

    If the engine's names of the requests are known, they distinguish requests with equal tokens.
    """

    def __init__(self, count: int) -> None:
        self.rows = [_Row(np.zeros(0, dtype=np.int32)) for _ in range(count)]
        self._previous: list[int] = []  # row of each place in the last step
        self._step = 0

    def place(self, texts: Sequence[Array], names: Sequence[str] | None = None) -> list[Placed | None]:
        """Find the rows of the requests of a step and store their texts. None for requests that exceed the rows."""
        self._step += 1
        found, free = [-1] * len(texts), set(range(len(self.rows)))
        labels: Sequence[str | None] = names or [None] * len(texts)
        # The row of the same place is tried first. Of other rows the longest is taken: a shorter one may belong to another.
        for candidates in ([{row} for row in self._previous], [free] * len(texts)):
            for at, rows in zip(range(len(texts)), candidates, strict=False):
                fits = [r for r in rows & free if found[at] < 0 and self._continues(r, texts[at], labels[at])]
                if fits:
                    found[at] = max(fits, key=lambda r: (len(self.rows[r].text), self.rows[r].last_step))
                    free.remove(found[at])
        continued = [row >= 0 for row in found]
        # New requests take the row that was unused for longest, because a request that was omitted may return. It is one of
        # the first 2 n rows for n requests, because attention reads all rows up to the last one in use.
        limit = 2 * max(2, len(texts))
        for at, name in enumerate(labels):
            if not continued[at] and free:
                found[at] = min(
                    free,
                    key=lambda r: (name is None or self.rows[r].name != name, r >= limit, self.rows[r].last_step, r),
                )
                free.remove(found[at])
        self._previous = found
        return [
            self._store(row, text, name, goes_on) if row >= 0 else None
            for row, text, name, goes_on in zip(found, texts, labels, continued, strict=True)
        ]

    def _continues(self, index: int, text: Array, name: str | None) -> bool:
        """Whether a text begins with the text of the row and may be of the same request."""
        row = self.rows[index]
        length, growth = len(row.text), 1 if row.draft is None else len(row.draft.tokens) + 1
        if not 0 < length <= len(text) or (len(text) - length > growth if name is None else row.name != name):
            return False
        # Most texts differ in the last token already.
        return bool(row.text[-1] == text[length - 1]) and np.array_equal(row.text, text[:length])

    def _store(self, index: int, text: Array, name: str | None, continued: bool) -> Placed:
        row = self.rows[index]
        kept = min(len(row.text), len(text))
        if not continued:  # the drafter need not read a common prefix again
            differs = np.flatnonzero(row.text[:kept] != text[:kept])
            kept = int(differs[0]) if len(differs) else kept
        row.text, row.name, row.last_step = text.astype(np.int32), name, self._step
        return Placed(index, continued, kept, text[kept:].tolist())


@dataclass
class Spent:
    """Numbers of steps, requests and drafted tokens; seconds in total, of the drafter, and of decisions with features."""

    steps: int = 0
    requests: int = 0
    drafted: int = 0
    all_s: float = 0.0
    model_s: float = 0.0
    asked_s: float = 0.0


@dataclass(frozen=True)
class Options:
    """Limits of drafting in an engine.

    Attributes:
        rows: maximum number of requests with drafts.
        depth: K, maximum length of a draft.
        readable: maximum length of a text for the drafter.
        temperature: of sampling, for features that read it.
        eos: tokens after which nothing is drafted.
        fallback: draft length after a policy has failed.
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
        drafter: proposes the tokens.
        policy: ends each draft; see `settings.check_engine_policy`.
        options: limits.
        profile: models the seconds of rounds for policies that observe them; None = rounds take 0 seconds.
        observer: observes the drafts.

    Attributes:
        spent: time and numbers so far.
        host: of the policy.
    """

    def __init__(
        self,
        drafter: DraftRows,
        policy: StopPolicy,
        options: Options,
        profile: Profile | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.options, self.spent, self.observer = options, Spent(), observer
        self.eos, self.timer = frozenset(options.eos), Timer(torch.device("cpu"))
        self._drafter: DraftRows | None = drafter
        self._failed = ""  # why the drafter is not called any more
        self._profile, self._texts = profile, 0
        self._rows = RequestRows(options.rows)
        self.use(policy)

    def use(self, policy: StopPolicy) -> None:
        """Use this policy from the next text on."""
        fallback = FixedLength(min(self.options.fallback, self.options.depth))
        policy = policy.limited(self.options.depth)
        self.host = PolicyHost(policy, batch=self.options.rows, fallback=fallback, on_replaced=self._read_for)
        self._read_for(policy)

    def _read_for(self, policy: StopPolicy) -> None:
        self._topology = chain(min(policy.max_depth, self.options.depth))
        self._readers: dict[int, FeatureReader] = {}  # by number of streams

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
            raise InputError(f"the drafter failed ({self._failed}); nothing was recorded from there on")
        if self.host.failure is not None:
            raise self.host.failure

    def propose(self, texts: Sequence[Array], names: Sequence[str] | None = None) -> list[list[int]]:
        """Return a draft for each text, possibly empty.

        Args:
            texts: [n] token ids of each request that has committed a token in this step.
            names: of the requests, if the engine has them.
        """
        begin_s = time.perf_counter()
        placed = self._rows.place(texts, names)
        self._observe([one for one in placed if one is not None and one.continued], begin_s)
        self._begin([one for one in placed if one is not None and not one.continued])
        drafts: list[list[int]] = [[] for _ in texts]
        longest = self.options.readable - self._topology.deepest
        # Features also read the token before the anchor, so a text of one token has no draft.
        rows = {at: one.row for at, one in enumerate(placed) if one is not None and 1 < len(texts[at]) <= longest}
        if rows and self._topology.deepest:
            for at, tokens in zip(rows, self._draft(list(rows.values()), begin_s), strict=True):
                drafts[at] = tokens
        self.spent.steps += 1
        self.spent.requests += len(texts)
        self.spent.all_s += time.perf_counter() - begin_s
        return drafts

    def _observe(self, placed: Sequence[Placed], now: float) -> None:
        """Pass the outcomes of the last drafts to policy and observer. The drafter forgets rejected tokens."""
        drafts = []
        for one in placed:
            row = self._rows.rows[one.row]
            if row.draft is not None and one.new:
                row.draft.set_outcome(one.new)
                self._roll_back(one.row, row.draft.context + row.draft.accepted)
                drafts.append(row.draft)
                row.draft = None
        if not drafts:
            return
        seconds = np.array([now - one.begin_s for one in drafts])
        if self.observer is not None:
            self.observer.on_outcomes(drafts, seconds.tolist())
        if not (self.host.observes or Layout(self.policy.features).history):
            return
        names = ("row", "context", "drafted", "verified", "backlog", "decisions", "accepted")
        columns = (np.array([getattr(one, name) for one in drafts]) for name in names)
        rows, context, drafted, verified, backlog, decisions, accepted = columns
        cut = np.array([one.hit_limit or not self.eos.isdisjoint(one.new) for one in drafts])
        if not self.policy.reads_clock:
            seconds = np.zeros(len(drafts))
            if self._profile is not None and self.policy.reads_seconds:
                price = self._profile.decision(self.policy.cost_name)
                seconds = self._profile.round_seconds(context, drafted, verified, backlog, decisions, price)
        self.host.load_rows(rows)
        self.host.observe(RoundOutcome(np.ones(len(drafts), dtype=bool), drafted, verified, accepted, cut, seconds))
        self.host.store_rows(rows)

    def _begin(self, placed: Sequence[Placed]) -> None:
        """Begin new texts in rows."""
        for one in placed:
            row = self._rows.rows[one.row]
            row.draft = None
            self._roll_back(one.row, one.kept)
            if self.observer is not None:
                self.observer.on_begin(one.row, row.text, row.name)
        if placed:
            keys = np.arange(self._texts, self._texts + len(placed), dtype=np.int64)  # numbers of the texts
            self._texts += len(placed)
            self.host.refill_rows(np.array([one.row for one in placed], dtype=np.int64), keys)

    def _roll_back(self, index: int, length: int) -> None:
        row = self._rows.rows[index]
        if row.read > length:
            row.read = length
            try:
                if self._drafter is not None:
                    self._drafter.roll_back(index, length)
            except Exception as error:  # a plugin may raise anything; the engine must continue
                self._fail(error)

    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """See `DraftRows.read`; without scores after the drafter has failed."""
        begin = time.perf_counter()
        logits = None
        try:
            if self._drafter is not None:
                logits = self._drafter.read(rows, tokens, depth)
        except Exception as error:  # a plugin may raise anything; the engine must continue
            self._fail(error)
        self.spent.model_s += time.perf_counter() - begin
        return torch.full((len(rows), 1), -math.inf) if logits is None else logits

    def _fail(self, error: Exception) -> None:
        self._drafter, self._failed = None, error_text(error)
        text = f"the drafter failed ({self._failed}); nothing is drafted from here on"
        warnings.warn(text, SpecstopWarning, stacklevel=3)

    def _draft(self, indices: Sequence[int], begin_s: float) -> list[list[int]]:
        """Return the drafts of the texts in these rows."""
        rows, here = [self._rows.rows[index] for index in indices], np.array(indices, dtype=np.int64)
        for index, row in zip(indices, rows, strict=True):
            self._roll_back(index, len(row.text) - 1)  # the anchor is read in any case
        unread = [row.text[row.read :].tolist() for row in rows]
        reader = self._readers.get(len(rows))
        if reader is None:
            reader = FeatureReader(self.policy, self._topology, self.options.temperature, streams=len(rows))
            self._readers[len(rows)] = reader
        context, backlog = (np.array(list(map(len, x)), dtype=np.int64) for x in ([row.text for row in rows], unread))
        round = RoundState(self._topology, np.ones(len(rows), dtype=bool), context, backlog)
        round.tokens[:, 0] = [row.text[-1] for row in rows]
        # Features read the last two tokens of a text only, and no logits of the target.
        round.texts = [cast(Text, SimpleNamespace(tokens=row.text[-2:].tolist())) for row in rows]
        round.anchors = [Anchor(torch.zeros(1, 1), 0, None)] * len(rows)
        reader.begin(round)
        source = _Source(self, reader, here, unread)
        self.timer.restart()
        self.host.load_rows(here)
        draft(source, self.host, round)
        self.host.store_rows(here)
        self.spent.asked_s += sum(self.timer.laps["policy"])
        drafts = []
        for at, row in enumerate(rows):
            drafted, tokens = int(round.drafted[at]), round.tokens[at, 1 : 1 + round.verified[at]].tolist()
            row.read += int(source.read_count[at])
            row.draft = EngineDraft(
                indices[at], len(row.text), tokens, drafted, int(round.decisions[at]), len(unread[at]),
                bool(round.hit_limit[at]), begin_s,
            )  # fmt: skip
            drafts.append(row.draft)
            self.spent.drafted += drafted
        if self.observer is not None:
            self.observer.on_drafts(drafts, time.perf_counter() - begin_s)
        return [one.tokens for one in drafts]


class _Source:
    """`rounds.CandidateSource` of chains with the most likely tokens."""

    decides_ended = selects_levels = False

    def __init__(self, drafting: Drafting, reader: FeatureReader, rows: Array, unread: Sequence[list[int]]) -> None:
        self.timer, self._drafting, self._reader, self._rows, self._unread = (
            drafting.timer,
            drafting,
            reader,
            rows,
            unread,
        )
        self.read_count = np.zeros(len(rows), dtype=np.int64)  # [S], tokens that the drafter has read, with drawn ones

    def grow(self, round: RoundState, depth: int, feeding: Array) -> tuple[Array, Array]:
        """Feed the streams [S, 1]; return which have drawn a token, and which of these continue."""
        self._reader.read_path()
        at = np.flatnonzero(feeding[:, 0])
        fed = [self._unread[i] for i in at.tolist()] if depth == 0 else round.tokens[at, depth : depth + 1].tolist()
        logits = self._drafting.read(self._rows[at].tolist(), fed, depth)
        self.read_count[at] += round.backlog[at] if depth == 0 else 1
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
            self._reader.drawn(depth + 1, scores)
            if self._drafting.observer is not None:
                self._drafting.observer.on_draft_step(depth + 1, self._rows[at], logits, round.drawn_tokens(scores)[0])
        going = drawn.copy()
        going[at[[one in self._drafting.eos for one in token.tolist()]]] = False
        return drawn, drawn if np.array_equal(drawn, going) else going

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `rounds.CandidateSource`."""
        return self._reader.step(depth, alive, history)
