"""What each policy gains by batch size: texts side by side, by exact replay of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...decode.benchmark import Ratio
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import TraceError
from ...policies.fixed import FixedLength
from ...policies.profile import Profile
from ..replay.arrays import TraceArrays
from ..replay.batch import BatchRounds, arrive_at_once, check_batch, replay_batch, request_order
from ..replay.bounds import batch_bound
from .comparison import BEST
from .statistics import MIN_CLUSTERS, Clusters, Resamples, Values, oracle_share

TAIL = 0.95

Arrivals = Callable[[int], Values]
"""Returns the arrival times of so many requests."""


def by_batch(
    arrays: TraceArrays,
    policies: Sequence[tuple[str, StopPolicy]],
    profile: Profile,
    sizes: Sequence[int],
    *,
    arrivals: Arrivals = arrive_at_once,
    estimate: tuple[TraceArrays, StopPolicy] | None = None,
    clusters: Clusters | None = None,
    primary: str = "",
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return, as JSON values, what policies gain at each batch size over the best fixed length of that size.

    The intervals of the ratios hold for all policies at all sizes at once.

    Args:
        arrays: a dense trace of chains.
        policies: (name, policy).
        profile: with batches of these sizes.
        sizes: texts side by side.
        arrivals: of the requests.
        estimate: the achievable estimate (`fit.achievable`) and the trace that it reads.
        clusters: to resample; None = the prompts.
        primary: see `evaluate`.
        seed: of the order of the texts and of the bootstrap.
        progress: see `Progress`.

    Returns:
        `sizes`, `requests`, `best_fixed` (the length) and `plain` (tokens/s) by size; `lines`, of the best fixed length, the
        policies, the estimate and the bound, with figures by size; `use`, the fastest policy there with an interval above
        1, or else the best fixed length; `words`, the same in a sentence.

    Raises:
        TraceError, InputError: as of `replay_batch`.
    """
    check_batches(arrays, profile, sizes, arrivals, seed)
    clusters = clusters or Clusters(tuple(arrays.clusters))
    lengths = [(arrays, FixedLength(k)) for k in range(min(arrays.depth, profile.max_depth) + 1)]
    jobs = [*lengths, *((arrays, policy) for _, policy in policies), *([] if estimate is None else [estimate])]
    names = [name for name, _ in policies]
    titles = [BEST, *names, *([] if estimate is None else [estimate[1].name]), "oracle bound of the batch"]
    tables = []
    for at, size in enumerate(sizes):
        order, replays = request_order(arrays.sequences, size, seed), []
        for done, (read, policy) in enumerate(jobs):
            progress("batches", at * len(jobs) + done, len(sizes) * len(jobs))
            replays.append(replay_batch(read, policy, profile, size, arrivals(len(order)), order))
        bound = batch_bound(arrays, profile, size).numpy()[order]
        tables.append(_BatchTable(replays, len(lengths), bound, clusters, order, seed))
    progress("batches", len(sizes) * len(jobs), len(sizes) * len(jobs))
    if policies:
        columns = range(len(lengths), len(lengths) + len(policies))
        families = [t.boot.log_ratios(t.tokens, t.seconds, columns, range(len(lengths))) for t in tables]
        intervals = tables[0].boot.simultaneous(families, names.index(primary) if primary in names else None)
        for table, ratios in zip(tables, intervals, strict=True):
            table.to_best = ratios
    figures = [[table.figures(at) for table in tables] for at in range(len(titles))]
    use = [table.use(names) for table in tables]
    return {
        "sizes": list(sizes),
        "requests": [len(table.tokens) for table in tables],
        "best_fixed": [table.best for table in tables],
        "plain": [table.plain for table in tables],
        "lines": [
            {"name": name, **{key: [one[key] for one in by_size] for key in by_size[0]}}
            for name, by_size in zip(titles, figures, strict=True)
        ],
        "use": use,
        "words": _sentence(sizes, use),
    }


def check_batches(
    arrays: TraceArrays, profile: Profile, sizes: Sequence[int], arrivals: Arrivals, seed: int = 0
) -> None:
    """Raise if `by_batch` cannot answer: batches beyond the trace or the profile, or too few arrival times."""
    if sizes and not arrays.header.has_every_anchor:
        raise TraceError(
            "--batch: expected dense traces, in which every round of a batch can be looked up; collect them so"
        )
    for size in sorted(sizes, reverse=True):  # what is enough for the largest is enough for all
        check_batch(arrays, profile, size)
        arrivals(len(request_order(arrays.sequences, size, seed)))


def _sentence(sizes: Sequence[int], use: Sequence[str]) -> str:
    """Return what to use from which batch size on."""
    parts = []
    for name, group in itertools.groupby(zip(sizes, use, strict=True), key=lambda pair: pair[1]):
        run = [size for size, _ in group]
        parts.append(f"{name} at {run[0]}" if len(run) == 1 else f"{name} from {run[0]} to {run[-1]}")
    return "By batch size: " + ", ".join(parts) + "."


class _BatchTable:
    """The replays at one batch size: the fixed lengths, the policies and perhaps the estimate.

    Attributes:
        boot, tokens, seconds: resamples of the requests; [S] and [S, replays].
        best, plain: best fixed length, and tokens/s of plain decoding.
        to_best: ratio of each policy to the best fixed length, with simultaneous intervals.
    """

    def __init__(
        self,
        replays: Sequence[BatchRounds],
        lengths: int,
        bound: Values,
        clusters: Clusters,
        order: Values,
        seed: int,
    ) -> None:
        # Requests of one cluster are drawn together, however often a text is served.
        self.boot, self._clusters = Resamples([clusters.of[at] for at in order], seed), clusters
        self.tokens, self.seconds = replays[0].tokens.numpy(), np.stack([one.seconds.numpy() for one in replays], 1)
        tokens = self.boot.total(self.tokens)
        rates = tokens[:, None] / self.boot.total(self.seconds)  # [1 + R, replays]
        self.best, self.plain = int(rates[0, :lengths].argmax()), float(rates[0, 0])
        self._replays = [replays[self.best], *replays[lengths:], None]
        # The best length is chosen again in every resample.
        self._speeds = [rates[:, :lengths].max(1), *rates[:, lengths:].T, tokens / self.boot.total(bound)]
        self.to_best: list[Ratio] = []

    def figures(self, at: int) -> dict[str, Any]:
        """Return the figures of one line; a bound has no latencies."""
        speed, best, replay = self._speeds[at], self._speeds[0], self._replays[at]
        is_policy, interval = 0 < at <= len(self.to_best), self.boot.interval
        figures: dict[str, Any] = {
            "tokens_per_s": float(speed[0]),
            "to_best_fixed": asdict(self.to_best[at - 1] if is_policy else interval(speed / best)),
            "oracle_share": asdict(interval(oracle_share(speed, best, self._speeds[-1]))),
        }
        if replay is None:
            return figures | {"latency_s": None, "latency_p95_s": None}
        latency = replay.latency.numpy()
        mean = self.boot.total(latency) / self.boot.total(np.ones(len(latency)))
        return figures | {
            "latency_s": asdict(interval(mean)),
            "latency_p95_s": asdict(interval(self._tail(latency))),
        }

    def _tail(self, latency: Values) -> Values:
        """Return [1 + R], the 95th percentile over requests."""
        order = np.argsort(latency)
        # [1 + R, requests]: how often each request is in each resample, added up in order of latency: a weighted quantile.
        weights = self.boot.counts()[:, order].cumsum(1)
        tail: Values = latency[order][(weights >= TAIL * weights[:, -1:]).argmax(1)]
        return tail

    def use(self, names: Sequence[str]) -> str:
        """Return the fastest policy with an interval above 1; without one, the best fixed length."""
        if not self._clusters.is_judged:
            return f"no verdict ({self._clusters.text} of similar length are too few, {MIN_CLUSTERS} are needed)"
        clear = [(self._speeds[at][0], name) for at, name in enumerate(names, 1) if self.to_best[at - 1].is_above]
        return max(clear)[1] if clear else f"fixed:{self.best}" if self.best else "plain decoding"
