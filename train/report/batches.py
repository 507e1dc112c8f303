"""What each policy gains by batch size: texts side by side, by exact replay of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ...decode.benchmark import Ratio
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.fixed import FixedLength
from ...policies.profile import Profile
from ..replay.arrivals import at_once, deal
from ..replay.batch import BatchReplayed, check_batch, replay_batch
from ..replay.bounds.batch import batch_bound
from ..replay.traces.arrays import TraceArrays
from ..statistics import FEWEST, LogRatios, Resamples, Values
from .clusters import Clusters
from .records import ROUNDING

TAIL = 0.95

Arrivals = Callable[[int], Values]
"""The times at which so many requests arrive."""


def by_batch(
    arrays: TraceArrays,
    policies: Sequence[tuple[str, StopPolicy]],
    profile: Profile,
    sizes: Sequence[int],
    *,
    arrivals: Arrivals = at_once,
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
        estimate: what a policy could reach that knows all scalars (`fit.achievable_batch`).
        clusters: to resample; None = the prompts.
        primary: see `evaluate`.
        seed: of the order of the texts and of the bootstrap.
        progress: see `Progress`.

    Returns:
        `sizes`, `requests`, `best_fixed` (the length) and `plain` (tokens/s) by size; `lines`, of the best fixed length, the
        policies, the estimate and the bound, with figures by size; `use`, the fastest policy there with an interval above
        1, or else the best fixed length; `words`, the same as text.

    Raises:
        TraceError, InputError: as of `replay_batch`.
    """
    check_batches(arrays, profile, sizes, arrivals, seed)
    depth = min(arrays.depth, profile.max_depth)
    jobs = [(arrays, policy) for _, policy in policies] + ([] if estimate is None else [estimate])
    clusters = clusters or Clusters(tuple(arrays.clusters))
    done, total = 0, len(sizes) * (depth + 1 + len(jobs))
    tables = []
    for size in sizes:
        order = deal(arrays.sequences, size, seed)
        made = []
        for read, policy in (*((arrays, FixedLength(k)) for k in range(depth + 1)), *jobs):
            progress("batches", done, total)
            made.append(replay_batch(read, policy, profile, size, arrivals(len(order)), order))
            done += 1
        bound = batch_bound(arrays, profile, size).numpy()[order]
        tables.append(_Table(made[: depth + 1], made[depth + 1 :], len(policies), bound, clusters, order, seed))
    progress("batches", total, total)
    names = [name for name, _ in policies]
    if policies:
        _set_intervals(tables, names.index(primary) if primary in names else None)
    extra = [] if estimate is None else [estimate[1].name]
    called = ["best fixed", *names, *extra, "oracle bound of the batch"]
    lines = [
        {"name": name, **{key: [table.figures(at)[key] for table in tables] for key in tables[0].figures(at)}}
        for at, name in enumerate(called)
    ]
    use = [table.use(names) for table in tables]
    return {
        "sizes": list(sizes),
        "requests": [table.requests for table in tables],
        "best_fixed": [table.best for table in tables],
        "plain": [table.plain for table in tables],
        "lines": lines,
        "use": use,
        "words": words(sizes, use),
    }


def check_batches(
    arrays: TraceArrays, profile: Profile, sizes: Sequence[int], arrivals: Arrivals, seed: int = 0
) -> None:
    """Refuse what `by_batch` cannot answer: batches beyond the trace or the profile, and too few times of arrival."""
    for size in sorted(sizes, reverse=True):  # what the largest wants is enough for all
        check_batch(arrays, profile, size)
        arrivals(len(deal(arrays.sequences, size, seed)))


def words(sizes: Sequence[int], use: Sequence[str]) -> str:
    """Return what to use from which batch size on, in one sentence."""
    parts = []
    for name, some in groupby(zip(sizes, use, strict=True), key=lambda pair: pair[1]):
        known = [str(size) for size, _ in some]
        parts.append(f"{name} at {known[0]}" if len(known) == 1 else f"{name} from {known[0]} to {known[-1]}")
    return "By batch size: " + ", ".join(parts) + "."


class _Table:
    """All that was replayed at one batch size.

    Attributes:
        best, plain, requests: best fixed length, tokens/s of plain decoding, number of requests.
        to_best, to_plain: of each policy with simultaneous intervals, see `_set_intervals`.
    """

    def __init__(
        self,
        fixed: Sequence[BatchReplayed],
        policies: Sequence[BatchReplayed],
        count: int,
        bound: Values,
        clusters: Clusters,
        order: Values,
        seed: int,
    ) -> None:
        # Requests of one cluster are drawn together, however often a text is served.
        self.boot = Resamples([clusters.of[at] for at in order], seed)
        self._clusters, self._tokens = clusters, fixed[0].tokens
        self._seconds = np.stack([one.seconds for one in (*fixed, *policies)], 1)
        tokens = self.boot.total(self._tokens)
        rates = tokens[:, None] / self.boot.total(self._seconds)
        speeds = rates[:, : len(fixed)]
        self.best, self.plain, self.requests = int(speeds[0].argmax()), float(speeds[0, 0]), len(order)
        self._best, self._plain = speeds.max(1), speeds[:, 0]  # chosen again in every resample
        self._made = [fixed[self.best], *policies, None]
        self._speeds = [self._best, *rates[:, len(fixed) :].T, tokens / self.boot.total(bound)]
        self._fixed, self._count = len(fixed), count
        self.to_best: list[Ratio] = []
        self.to_plain: list[Ratio] = []

    def log_ratios(self, *, plain: bool) -> LogRatios:
        """Return the log ratios of the policies to plain decoding, or to the best fixed length."""
        policies = range(self._fixed, self._fixed + self._count)
        return self.boot.log_ratios(self._tokens, self._seconds, policies, [0] if plain else range(self._fixed))

    def figures(self, at: int) -> dict[str, Any]:
        """Return the figures of one line; a bound has no latencies."""
        speed, made = self._speeds[at], self._made[at]
        with np.errstate(divide="ignore", invalid="ignore"):
            # 0 if the best fixed length is the bound, up to rounding: the gain of the oracle is 0.
            has_gain = self._speeds[-1] > self._best * (1.0 + ROUNDING)
            share = np.where(has_gain, (speed - self._best) / (self._speeds[-1] - self._best), 0.0)
        is_policy = 0 < at <= self._count
        to_best = self.to_best[at - 1] if is_policy else self.boot.interval(speed / self._best)
        to_plain = self.to_plain[at - 1] if is_policy else self.boot.interval(speed / self._plain)
        known = {
            "tokens_per_s": float(speed[0]),
            "to_best_fixed": _plain(to_best),
            "to_plain": _plain(to_plain),
            "oracle_share": _plain(self.boot.interval(share)),
        }
        return known | {
            "tokens_per_call": None if made is None else made.tokens_per_call,
            "latency_s": None if made is None else _plain(self._mean(made.latency)),
            "latency_p95_s": None if made is None else _plain(self._tail(made.latency)),
        }

    def _mean(self, latency: Values) -> Ratio:
        return self.boot.interval(self.boot.total(latency) / self.boot.total(np.ones(len(latency))))

    def _tail(self, latency: Values) -> Ratio:
        """Return the 95th percentile over requests and its interval."""
        order = np.argsort(latency)
        # [1 + R, requests]: how often each request is in each resample, added up in order of latency: a weighted quantile.
        weights = self.boot.counts()[:, order].cumsum(1)
        at = (weights >= TAIL * weights[:, -1:]).argmax(1)
        return self.boot.interval(latency[order][at])

    def use(self, names: Sequence[str]) -> str:
        """Return the fastest policy with an interval above 1; without one, the best fixed length."""
        if not self._clusters.is_judged:
            return f"no verdict ({self._clusters.text} of similar length are too few, {FEWEST} are needed)"
        clear = [(self._speeds[at + 1][0], name) for at, name in enumerate(names) if self.to_best[at].is_above]
        return max(clear)[1] if clear else f"fixed:{self.best}" if self.best else "plain decoding"


def _set_intervals(tables: Sequence[_Table], apart: int | None) -> None:
    """Set intervals that hold for all policies at all batch sizes at once, those of the policy `apart` for it alone."""
    boot = tables[0].boot
    to_best, to_plain = (
        boot.simultaneous([table.log_ratios(plain=plain) for table in tables], apart) for plain in (False, True)
    )
    for table, best, plain in zip(tables, to_best, to_plain, strict=True):
        table.to_best, table.to_plain = best, plain


def _plain(ratio: Ratio) -> dict[str, float | None]:
    """Return a ratio as JSON has it; one that is none, as of a gap of nothing, as 0."""
    return dataclasses.asdict(ratio if np.isfinite(ratio.value) else Ratio(0.0))
