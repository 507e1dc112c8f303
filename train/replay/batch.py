"""Replay of a batch: S streams share their verifications and a clock, and are refilled as in the live loop.

A round of the batch takes the time of its draft steps and of one verification of all tokens, as the profile measured for
batches. A request that arrives while all streams are busy waits until a stream is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...decode.rounds import play_round
from ...policies.contract import Array, StopPolicy
from ...policies.errors import InputError, TraceError
from ...policies.features import HISTORY_FEATURES
from ...policies.host import PolicyHost
from ...policies.profile import Profile
from .arrays import TraceArrays
from .checks import check_replayable
from .rounds import COUNTS, Rounds
from .source import TraceSource

MIN_BATCHES = 4
"""Minimum number of full batches. The last requests run in a batch that is not full, which should weigh little."""


def request_order(texts: int, size: int, seed: int) -> Array:
    """Return the text of each request: all texts in random order, repeated for `MIN_BATCHES` batches; once for one stream."""
    generator = np.random.default_rng(seed)
    repeats = 1 if size == 1 else max(1, -(-MIN_BATCHES * size // texts))
    # Whole permutations, so that every text is requested equally often.
    return np.concatenate([generator.permutation(texts) for _ in range(repeats)])


def arrive_at_once(count: int) -> Array:
    """Return [count] float64 zeros: the batch is full until the last requests."""
    return np.zeros(count)


def poisson_arrivals(count: int, rate: float, seed: int = 0) -> Array:
    """Return [count] float64 arrival times in seconds of a Poisson process with `rate` requests per second.

    Raises:
        InputError: the rate is not a number above 0.
    """
    if not (np.isfinite(rate) and rate > 0):
        raise InputError(f"arrivals: expected a rate above 0 requests a second, not {rate:g}")
    # The gaps between arrivals are exponential with mean 1 / rate.
    out: Array = np.random.default_rng(seed).exponential(1.0 / rate, count).cumsum()
    return out


def recorded_arrivals(times: Sequence[float], count: int) -> Array:
    """Return [count] float64, the first `count` of these times as seconds since the first one.

    Raises:
        InputError: they decrease, are not finite, or are too few.
    """
    out = np.asarray(times, dtype=np.float64)
    if out.ndim != 1 or not len(out) or not np.isfinite(out).all() or (np.diff(out) < 0).any():
        raise InputError("arrivals: expected a list of times in seconds in ascending order")
    if len(out) < count:
        raise InputError(f"arrivals: expected {count} times, one per request, got {len(out)}")
    since: Array = out[:count] - out[0]
    return since


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class BatchRounds(Rounds):
    """The rounds of a batch in the order of decoding. The texts of `Rounds` are the requests, in the order of their start.

    Attributes:
        call, stream: [R] number of the shared verification, and the stream, of each round.
        text: [S] text of the trace of each request.
        spent: [S] float64 seconds, each request's share of the time in which streams were busy, including its prompt.
        arrived, ended: [S] float64 seconds on the clock of the batch.
    """

    call: Tensor
    stream: Tensor
    text: Tensor
    spent: Tensor
    arrived: Tensor
    ended: Tensor

    @property
    def seconds(self) -> Tensor:
        """See `spent`."""
        return self.spent

    @property
    def latency(self) -> Tensor:
        """[S] float64 seconds from a request's arrival to its last token."""
        return self.ended - self.arrived


def replay_batch(
    arrays: TraceArrays, policy: StopPolicy, profile: Profile, batch: int, arrived: Array, order: Array | None = None
) -> BatchRounds:
    """Replay requests that are decoded side by side.

    Args:
        arrays: a dense trace of chains.
        policy: any policy that does not read the clock; a joint policy receives the streams of the batch together.
        profile: measured with batches, unless `batch` is 1.
        batch: number of streams.
        arrived: [S] arrival times in seconds, ascending (`arrive_at_once`, `poisson_arrivals`, `recorded_arrivals`).
        order: [S] text of each request (`request_order`); None = each text once.

    Raises:
        TraceError: as of `replay`.
        InputError: the profile did not measure batches of this size.
    """
    check_replayable(arrays, policy, profile)
    check_batch(arrays, profile, batch)
    texts = np.arange(arrays.sequences) if order is None else np.asarray(order, dtype=np.int64)
    if len(texts) != len(arrived):
        raise InputError(f"arrivals: expected {len(texts)} times, one per request, got {len(arrived)}")
    return _Batch(arrays, policy, profile, batch, texts, arrived).play()


def check_batch(arrays: TraceArrays, profile: Profile, batch: int) -> None:
    """Raise if the trace is not of chains, or if the profile did not measure batches of this size."""
    if arrays.tree.drafters > 1:
        raise TraceError("--batch: expected a trace of one drafter; batches of several drafters have no profile")
    if not arrays.tree.is_chain:
        raise TraceError(f"--batch: expected traces of chains, not of the tree {arrays.tree.name}")
    if batch < 1:
        raise InputError(f"--batch: expected 1 or more, not {batch}")
    if batch == 1:  # priced by the costs of single streams
        return
    if profile.batch is None:
        raise InputError("--profile: it has no batches; measure them with `specstop profile --batch 1,2,4,8`")
    least, most = profile.batch.sizes[0], profile.batch.sizes[-1]
    if not least <= batch <= most:
        raise InputError(
            f"--profile: expected a batch from {least} to {most}, as measured, got {batch}; measure it with --batch"
        )


class _Batch:
    """A batch while it is decoded: the request of each stream (-1 = none), the requests that wait, and the clock."""

    def __init__(
        self, arrays: TraceArrays, policy: StopPolicy, profile: Profile, batch: int, texts: Array, arrived: Array
    ) -> None:
        self.arrays, self.policy, self.profile, self.texts, self.arrived = arrays, policy, profile, texts, arrived
        self.host = PolicyHost(policy, profile=profile, batch=batch)
        self.source = TraceSource(arrays, policy, np.zeros((batch, 1), dtype=np.int64), together=True)
        self.source.active[:] = False  # texts are opened as requests arrive, not taken from queues
        self.waiting, self.request = deque(range(len(texts))), np.full(batch, -1, dtype=np.int64)
        self.spent, self.ended, self.clock = np.zeros(len(texts)), np.zeros(len(texts)), 0.0
        self.columns: list[Array] = []

    def play(self) -> BatchRounds:
        """Decode all requests."""
        arrays, texts = self.arrays, torch.from_numpy(self.texts)
        while self.waiting or (self.request >= 0).any():
            self.fill()
            if self.source.active.any():
                self.play_round()
            over = np.flatnonzero((self.request >= 0) & ~self.source.active)
            self.ended[self.request[over]] = self.clock
            self.request[over] = -1
        columns = np.concatenate([np.zeros((0, 11), dtype=np.int64), *self.columns])
        counts: dict[str, Any] = dict(
            zip(("call", "stream", *COUNTS), torch.from_numpy(columns).unbind(1), strict=True)
        )
        counts |= {"steps": counts["drafted"], "history": torch.zeros(len(columns), len(HISTORY_FEATURES))}
        arrived = np.asarray(self.arrived, dtype=np.float64)
        spent, arrived_s, ended = map(torch.from_numpy, (self.spent, arrived, self.ended))
        return BatchRounds(
            self.policy, self.profile, arrays.prompt_tokens[texts], arrays.first_anchor[texts],
            text=texts, spent=spent, arrived=arrived_s, ended=ended, **counts,
        )  # fmt: skip

    def fill(self) -> None:
        """Begin the texts of arrived requests in free streams; their prompts are read one after the other."""
        if self.waiting and not (self.request >= 0).any():
            # No stream is busy: the clock skips the idle time, which is no request's share.
            self.clock = max(self.clock, float(self.arrived[self.waiting[0]]))
        begun = []
        for stream in np.flatnonzero(self.request < 0).tolist():
            # Reading a prompt advances the clock, so that a request may arrive during this loop.
            if not self.waiting or self.arrived[self.waiting[0]] > self.clock:
                break
            request = self.waiting.popleft()
            text = int(self.texts[request])
            self.source.start_text(stream, text)
            self.request[stream] = request
            begun.append(stream)
            read = float(self.profile.prefill_seconds(self.arrays.prompt_tokens.numpy()[text : text + 1])[0])
            self.spent[request] += read
            self.clock += read
            if not self.source.active[stream]:  # the text ended with its first token
                self.ended[request], self.request[stream] = self.clock, -1
        if begun:
            streams = np.array(begun, dtype=np.int64)
            self.host.refill(streams, self.arrays.keys.numpy()[self.source.sequence[streams]])

    def play_round(self) -> None:
        """Play and record a round of all active streams."""
        source, calls, streams = self.source, len(self.columns), len(self.request)
        active, anchor = source.active.copy(), source.anchor.copy()
        round = play_round(source, self.host)
        # All active streams have the seconds of the shared round; the others have 0.
        seconds, rows = float(round.seconds.max()), np.flatnonzero(active)
        self.clock += seconds
        self.spent[self.request[rows]] += seconds / len(rows)
        columns = (
            np.full(streams, calls), np.arange(streams), self.request, anchor, round.context, round.drafted,
            round.verified, round.accepted, round.committed, round.backlog, round.decisions,
        )  # fmt: skip
        self.columns.append(np.stack(columns, 1)[rows])
        source.active = active & ~source.ended_texts()
