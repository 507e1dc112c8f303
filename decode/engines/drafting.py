"""Drafts for all requests of an engine, step by step: first what followed the last drafts is heard, then a draft model drafts
side by side and the policy ends each draft by itself.

An engine's step may leave requests out, trim drafts, or commit tokens that no draft spoke of. So nothing is counted: what
came of a draft is what follows in the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...policies.baselines.fixed import FixedLength
from ...policies.contract import Array, RoundOutcome, StopPolicy
from ...policies.features import Drawn, Layout
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from ..rounds import draft as draft_chains
from ..settings import Stopwatch
from ..topology import chain
from ..weak import weak_method
from .guarded import Guarded, Spent
from .rounds import Heard, Observer, Sent
from .rows import Placed, Rows
from .source import Chains, DraftRows


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
        self._draft, self._profile, self._observer = Guarded(draft, self.spent), profile, observer
        self._watch = Stopwatch(torch.device("cpu"))
        self.use(policy)
        self._rows, self._eos = Rows(options.rows), frozenset(options.eos)
        self._waits: list[Sent | None] = [None] * options.rows  # drafts whose outcome is not known yet
        self._read = [0] * options.rows  # tokens that the draft model has read
        self._texts = 0

    def use(self, policy: StopPolicy) -> None:
        """Ask this policy from the next text on."""
        fallback = FixedLength(min(self.options.fallback, self.options.depth))
        policy = policy.limited(self.options.depth)
        self.host = PolicyHost(
            policy, batch=self.options.rows, fallback=fallback, on_replaced=weak_method(self._draft_by)
        )
        self._watch.wrap(self.host, {"keep": "policy", "select": "policy"})
        self._draft_by(policy)

    def _draft_by(self, policy: StopPolicy) -> None:
        self._topology, self._layout = chain(min(policy.max_depth, self.options.depth)), Layout(policy.features)

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
        self._draft.check()
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
        if heard and (self.host.observes or self._layout.history):
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
            self._draft.roll_back(row, length)

    def _draft_for(self, rows: Sequence[int], began_s: float) -> list[list[int]]:
        """Return the drafts of the texts in `rows`."""
        texts, here = [self._rows.text(row) for row in rows], np.array(rows, dtype=np.int64)
        for row, text in zip(rows, texts, strict=True):  # the anchor is read in any case, however little has changed
            self._forget(row, len(text) - 1)
        unread = [text[self._read[row] :].tolist() for row, text in zip(rows, texts, strict=True)]
        anchors = np.array([(text[-1], text[-2]) for text in texts], dtype=np.int64)
        host, observer = self.host, self._observer

        def look(depth: int, at: Array, logits: Tensor, drawn: Drawn) -> None:
            assert observer is not None
            observer.level(depth, here[at], logits, drawn)

        source = Chains(
            self._draft, self._layout, rows, unread, anchors, self._topology,
            self.options.temperature, self._eos, look if observer is not None else None,
        )  # fmt: skip
        self._watch.restart()
        self._watch.wrap(source, {"step": "policy"})
        host.load_rows(here)
        found = draft_chains(source, host, np.ones((len(rows), 1), dtype=bool), None)
        host.store_rows(here)
        self.spent.asked_s += sum(self._watch.laps["policy"])
        drafts = []
        for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
            drafted, tokens = int(found.drafted[at]), source.tokens[at, : found.verified[at]].tolist()
            # A token drawn last was not read, unless nothing was known to come after it.
            self._read[row] += int(source.read[at])
            drafts.append(
                Sent(row, len(text), tokens, drafted, int(found.decisions[at]), len(unread[at]), len(rows),
                     bool(found.capped[at]), began_s)
            )  # fmt: skip
            self._waits[row] = drafts[-1]
            self.spent.drafted += drafted
        if observer is not None:
            observer.sent(drafts, time.perf_counter() - began_s)
        return [sent.tokens for sent in drafts]


def _columns(rows: Sequence[tuple[int, ...]]) -> Array:
    """Return rows of whole numbers as columns, each in one piece."""
    return np.ascontiguousarray(np.array(rows, dtype=np.int64).T)
