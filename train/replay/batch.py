"""Replay of a batch: texts side by side that share their verifications and the clock, refilled as the live loop does it.

The same rounds as of single streams (`run`), with S streams of which each has one text: a round of the batch lasts its draft
steps and one verification of all tokens, by what the profile says that batches cost. A request that arrives while all
streams are taken waits; one that ends gives its stream to the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...decode.round_state import RoundState
from ...decode.rounds import play_round
from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.errors import InputError, TraceError
from ...policies.features import History
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from .source import TraceSource
from .traces.arrays import TraceArrays
from .traces.checking import check_replayable

COLUMNS = (
    "round",
    "request",
    "stream",
    "anchor",
    "context",
    "drafted",
    "verified",
    "accepted",
    "committed",
    "backlog",
    "decisions",
)
"""Of the log."""


@dataclass(frozen=True)
class BatchReplayed:
    """A policy replayed on a batch; arrays are by request [R], in the order in which they began.

    Attributes:
        name: of the policy.
        batch: S.
        sequence: which text of the trace a request is.
        tokens: of its text.
        seconds: its share of what was done for several at once, its prompt included: they sum to the time that was not idle.
        arrived, ended: when, on the clock of the batch.
        log: [L, len(COLUMNS)] int64, a line by round and stream, in the order in which they were played.
    """

    name: str
    batch: int
    sequence: Array
    tokens: Array
    seconds: Array
    arrived: Array
    ended: Array
    log: Array

    @property
    def rate(self) -> float:
        """Tokens per second of the time in which something was done."""
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def latency(self) -> Array:
        """[R] seconds from a request's arrival to its last token."""
        out: Array = self.ended - self.arrived
        return out

    @property
    def calls(self) -> int:
        """Verifications, each of all streams that had a round."""
        return len(np.unique(self.log[:, 0]))

    @property
    def tokens_per_call(self) -> float:
        """Committed tokens a stream per verification (block efficiency)."""
        return float(self.log[:, COLUMNS.index("committed")].sum() / max(len(self.log), 1))


def replay_batch(
    arrays: TraceArrays,
    policy: StopPolicy,
    profile: Profile,
    batch: int,
    arrived: Array,
    order: Array | None = None,
    *,
    beyond: bool = False,
) -> BatchReplayed:
    """Replay requests that are decoded side by side, a text of the trace each.

    Args:
        arrays: a dense trace of chains.
        policy: any policy but one that reads the clock; a joint one weighs the streams of the batch.
        profile: measured with batches, unless the batch is one of a single stream.
        batch: S, the texts side by side.
        arrived: [R] seconds, not falling (`arrivals`).
        order: [R] which text each request is; None = each once.
        beyond: also batches larger than the largest measured one, whose costs go on as they rise (`BatchCosts`).

    Raises:
        TraceError: as of `replay`.
        InputError: the profile has no batches as large.
    """
    check_replayable(arrays, policy, profile)
    check_batch(arrays, profile, batch, beyond=beyond)
    sequences = np.arange(arrays.sequences) if order is None else np.asarray(order, dtype=np.int64)
    if len(sequences) != len(arrived):
        raise InputError(f"arrivals: expected {len(sequences)} times, one a request, not {len(arrived)}")
    return _Batch(arrays, policy, profile, batch, sequences, arrived).played()


def check_batch(arrays: TraceArrays, profile: Profile, batch: int, *, beyond: bool = False) -> None:
    """Refuse a batch that the trace or the profile cannot answer; `beyond` as of `replay_batch`."""
    if not arrays.tree.is_chain:
        raise TraceError(f"--batch: expected traces of chains, not of the tree {arrays.tree.name}")
    if batch < 1:
        raise InputError(f"--batch: expected 1 or more, not {batch}")
    if batch == 1:  # what the tables of single streams are of
        return
    if profile.batch is None:
        raise InputError("--profile: it has no batches; measure them with `specstop profile --batch 1,2,4,8`")
    least, most = profile.batch.sizes[0], profile.batch.sizes[-1]
    if batch < least or (batch > most and not beyond):
        which = f"smallest batch measured is {least}" if batch < least else f"largest batch measured is {most}"
        raise InputError(f"--profile: the {which}, not {batch}; measure it with --batch")


class BatchSource(TraceSource):
    """A trace as the source of rounds of S streams, each with one text at a time, that are verified together."""

    def __init__(self, arrays: TraceArrays, policy: StopPolicy, streams: int) -> None:
        # The queues go unused: texts are opened one by one as requests arrive, so no stream may begin with one.
        super().__init__(arrays, policy, np.zeros((streams, 1), dtype=np.int64))
        self.active = np.zeros(streams, dtype=bool)

    def step(self, round: RoundState, depth: int, alive: Array, history: History) -> DraftStep:
        """See `decode.rounds.RoundSource`."""
        shown = super().step(round, depth, alive, history)
        # All that have a round share one verification, which is what joint policies go by.
        together = np.where(self.active, 0, -1)
        return DraftStep(shown.depth, shown.alive, shown.parent, shown.features, shown.hidden, together)


class _Batch:
    """A batch as it is played: who is in which stream, and the clock."""

    def __init__(
        self, arrays: TraceArrays, policy: StopPolicy, profile: Profile, batch: int, sequences: Array, arrived: Array
    ) -> None:
        self._arrays, self._profile, self._name, self._size = arrays, profile, policy.name, batch
        self._source = BatchSource(arrays, policy, batch)
        self._host = PolicyHost(policy, profile=profile, batch=batch)
        self._sequences, self._arrived = sequences, arrived
        self._waiting = deque(range(len(sequences)))
        self._request = np.full(batch, -1, dtype=np.int64)
        self._keys = arrays.keys.numpy()
        self._spent, self._ended = np.zeros(len(sequences)), np.zeros(len(sequences))
        self._clock, self._rounds = 0.0, 0
        self._log: list[Array] = []

    def played(self) -> BatchReplayed:
        """Play all requests and return what came of them."""
        while self._waiting or (self._request >= 0).any():
            self._fill()
            if self._source.active.any():
                self._play()
            # Also texts that ended with their first token, which have no round at all.
            over = np.flatnonzero((self._request >= 0) & ~self._source.active)
            self._ended[self._request[over]] = self._clock
            self._request[over] = -1
        log = np.concatenate([np.zeros((0, len(COLUMNS)), dtype=np.int64), *self._log])
        tokens = self._arrays.text_tokens.numpy()[self._sequences]
        return BatchReplayed(
            self._name, self._size, self._sequences, tokens, self._spent, self._arrived, self._ended, log
        )  # fmt: skip

    def _fill(self) -> None:
        """Begin the texts that have arrived in the streams that are free, reading their prompts one after the other."""
        if self._waiting and not (self._request >= 0).any():
            # Nothing is decoded: the clock skips the idle time, which counts as nobody's.
            self._clock = max(self._clock, float(self._arrived[self._waiting[0]]))
        rows = []
        for stream in np.flatnonzero(self._request < 0).tolist():
            # The clock moves on with each prompt read, so that a request may arrive while this loop runs.
            if not self._waiting or self._arrived[self._waiting[0]] > self._clock:
                break
            number = self._waiting.popleft()
            sequence = int(self._sequences[number])
            self._source.open(stream, sequence)
            self._request[stream] = number
            rows.append(stream)
            read = float(self._profile.prefill_seconds(self._arrays.prompt_tokens.numpy()[sequence : sequence + 1])[0])
            self._spent[number] += read
            self._clock += read
            if not self._source.active[stream]:  # its first token ends it: it has no round, and waits for none
                self._ended[number], self._request[stream] = self._clock, -1
        if not rows:
            return
        begun = np.array(rows, dtype=np.int64)
        self._host.refill(begun, self._keys[self._source.sequence[begun]])

    def _play(self) -> None:
        """Play a round of all that is running, and note it."""
        source = self._source
        on, anchor = source.active.copy(), source.anchor.copy()
        made = play_round(source, self._host)
        # The same number for every stream with a round, that of the shared one; 0 for the others.
        seconds, rows = float(made.seconds.max()), np.flatnonzero(on)
        self._clock += seconds
        self._spent[self._request[rows]] += seconds / len(rows)
        columns = (
            np.full(self._size, self._rounds), self._request, np.arange(self._size), anchor, made.context, made.drafted,
            made.verified, made.accepted, made.committed, made.backlog, made.decisions,
        )  # fmt: skip
        self._log.append(np.stack(columns, 1)[rows])
        self._rounds += 1
        source.active = on & ~source.over()
