"""Cluster bootstrap: intervals of ratios of sums, paired between policies and simultaneous over them.

A cluster is what is drawn independently: a prompt with all its samples, or a group of prompts. `Resamples` draws clusters
with replacement, and all figures of a report share these draws.

Two kinds of intervals:

- `Resamples.interval`, of any single statistic: the expanded percentile interval (Hesterberg, The American Statistician 69,
  2015), in which percentiles correspond to Student's t with P - 1 degrees of freedom.
- `simultaneous`, of ratios of speeds that are compared with each other: a bootstrap-t of the maximum over all of them. The
  probability that any lower end lies above the truth is at most 2.5%, whatever the number of policies. Numerators and
  denominators of the studentised statistic are linear (the influence function of a ratio of sums at the sample): the ratio
  itself has an erratic bootstrap distribution if a few clusters are much longer than the others. Each end uses the larger of
  the symmetric and the one-sided critical value, because the former fails for skewed and the latter for heavy-tailed
  distributions. `benchmarks/intervals.py` measures coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decode.benchmark import Ratio, expanded_tail
from ..policies.arguments import check_limits

REPLICATES = 2000
LEVEL = 0.95
FEWEST = 20
"""Clusters below which an interval does not support a verdict."""

SMALLEST_ERROR = 0.25
"""Least standard error of a replicate relative to that of the sample. It matters for a policy that differs from its rival in
few clusters: resamples without these have no error."""

FEWEST_DIFFERENT = 4
"""Clusters in which a policy has to differ from its rival to count for the maximum. With fewer its own interval contains 1
anyway, and it would only widen those of the others."""

SAME = 1e-9
"""Relative difference of two speeds up to which they are equal."""

Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class LogRatios:
    """Logarithms of M ratios in the sample (row 0) and in R resamples, with standard errors.

    Attributes:
        values: [1 + R, M], linearised at the sample.
        errors: [1 + R, M].
        different: [M] number of clusters in which the two speeds differ.
        ratios: [M] of the sample.
    """

    values: Values
    errors: Values
    different: Values
    ratios: Values

    def columns(self, at: Sequence[int]) -> LogRatios:
        """Return some of the ratios."""
        own = list(at)
        return LogRatios(self.values[:, own], self.errors[:, own], self.different[own], self.ratios[own])


class Resamples:
    """The sample, and R resamples of its P clusters with replacement.

    Args:
        clusters: [S] cluster of each sequence (or round); the sequences of a cluster are drawn together.
        seed: of the draws.
        replicates: R.

    Attributes:
        clusters: P.
        labels: [S] cluster of each sequence.
    """

    def __init__(self, clusters: Sequence[Any], seed: int = 0, replicates: int = REPLICATES) -> None:
        check_limits(seed=seed)
        self.labels = [str(cluster) for cluster in clusters]
        _, self._cluster = np.unique(np.asarray(clusters), return_inverse=True)
        self.clusters = int(self._cluster.max()) + 1
        self.replicates = replicates
        chance = np.full(self.clusters, 1.0 / self.clusters)
        # How often each cluster is in a resample of P with replacement; row 0 is the sample, each once.
        drawn = np.random.default_rng(seed).multinomial(self.clusters, chance, size=replicates)
        self._weights = np.concatenate([np.ones((1, self.clusters)), drawn.astype(np.float64)])

    def by_cluster(self, values: Any) -> Values:
        """Return [P] or [P, M], the sums over values [S] or [S, M] of each cluster."""
        values = np.asarray(values, dtype=np.float64)
        sums: Values = np.zeros((self.clusters, *values.shape[1:]))
        np.add.at(sums, self._cluster, values)
        return sums

    def total(self, values: Any) -> Values:
        """Return [1 + R] or [1 + R, M], the sums over values [S] or [S, M] in the sample and in every resample."""
        out: Values = self._weights @ self.by_cluster(values)
        return out

    def counts(self) -> Values:
        """Return [1 + R, S], how often each sequence is in the sample (once) and in every resample."""
        out: Values = self._weights[:, self._cluster]
        return out

    def interval(self, values: Values) -> Ratio:
        """Return the value of the sample and its expanded percentile interval.

        Args:
            values: [1 + R] of a statistic of `total`s; values that are not finite are skipped.
        """
        value, known = float(values[0]), values[1:][np.isfinite(values[1:])]
        if not len(known) or self.clusters < 2:
            return Ratio(value)
        tail = expanded_tail(self.clusters)
        low, high = np.quantile(known, [tail, 1.0 - tail])
        return Ratio(value, float(low), float(high))

    def speed_influence(self, tokens: Any, seconds: Any) -> Values:
        """Return [P, M], the influence of each cluster on the log of M speeds sum(tokens) / sum(seconds).

        Args:
            tokens: [S] or [S, M].
            seconds: [S, M].
        """
        parts = [self.by_cluster(np.reshape(values, (len(seconds), -1))) for values in (tokens, seconds)]
        committed, spent = (part / part.mean(0) for part in parts)
        out: Values = committed - spent
        return out

    def log_ratios(
        self, tokens: Any, seconds: Any, policies: Sequence[int], rivals: Sequence[int], price: Values | None = None
    ) -> LogRatios:
        """Return the log of the speeds of policies over the fastest rival, which is chosen again in each resample.

        Args:
            tokens: [S], or [S, M] if policies commit different numbers of tokens in the same rounds.
            seconds: [S, M].
            policies: columns of `seconds`.
            rivals: columns of `seconds`.
            price: [1 + R, M] log of the speed in each resample over that without the profile's uncertainty, or None.
        """
        influence = self.speed_influence(tokens, seconds)  # [P, M]
        committed, spent = (np.reshape(part, (len(seconds), -1)).sum(0) for part in (tokens, seconds))
        rate = committed / spent  # [M] tokens/s
        speed = np.log(rate)
        own, their = list(policies), list(rivals)
        shift = np.zeros((1, influence.shape[1])) if price is None else price
        drawn = self._weights @ influence / self.clusters + shift  # [1 + R, M] deviation of the log speed
        rival = speed[their] + drawn[:, their]
        winner = rival.argmax(1)
        values = speed[own] + drawn[:, own] - rival.max(1, keepdims=True)
        errors = np.zeros_like(values)
        for at in np.unique(winner):
            rows, difference = winner == at, influence[:, own] - influence[:, [their[at]]]
            weights = self._weights[rows]
            mean, square = weights @ difference / self.clusters, weights @ difference**2 / self.clusters
            errors[rows] = (square - mean**2).clip(0.0) / max(self.clusters - 1, 1)
        rival_of_sample = their[winner[0]]
        priced = (shift[:, own] - shift[:, [rival_of_sample]]).var(0)
        parts = [self.by_cluster(np.reshape(part, (len(seconds), -1))) for part in (tokens, seconds)]
        speeds = parts[0] / parts[1]  # [P, M]
        different = (np.abs(speeds[:, own] / speeds[:, [rival_of_sample]] - 1.0) > SAME).sum(0)
        return LogRatios(values, np.sqrt(errors + priced), different, rate[own] / rate[their].max())

    def simultaneous(self, families: Sequence[LogRatios], apart: int | None = None) -> list[list[Ratio]]:
        """Return the ratios of all families with intervals that hold for all of them at once.

        Args:
            families: log ratios over these resamples, such as those of several latencies.
            apart: column of every family with intervals of its own: they hold for this column of all families.
        """
        if apart is None:
            return self._together(families)
        others = [[at for at in range(f.values.shape[1]) if at != apart] for f in families]
        alone = self._together([f.columns([apart]) for f in families])
        if not any(others):
            return alone
        rest = self._together([f.columns(at) for f, at in zip(families, others, strict=True)])
        return [[*part[:apart], *one, *part[apart:]] for part, one in zip(rest, alone, strict=True)]

    def _together(self, families: Sequence[LogRatios]) -> list[list[Ratio]]:
        values, errors = (np.concatenate([getattr(f, name) for f in families], 1) for name in ("values", "errors"))
        different, sample = (np.concatenate([getattr(f, name) for f in families]) for name in ("different", "ratios"))
        at = np.cumsum([f.values.shape[1] for f in families])[:-1]
        if self.clusters > 1:
            low, high = _intervals(values, errors, different)
            ratios = [Ratio(*map(float, each)) for each in zip(sample, low, high, strict=True)]
        else:
            ratios = [Ratio(float(value)) for value in sample]
        return [[ratios[i] for i in part] for part in np.split(np.arange(len(ratios)), at)]


def _intervals(values: Values, errors: Values, different: Values) -> tuple[Values, Values]:
    """Return the ends [M] of simultaneous intervals: bootstrap-t of the maximum; [1 + R, M] each."""
    value, error = values[0], errors[0]
    least = np.maximum(errors[1:], SMALLEST_ERROR * error)
    with np.errstate(invalid="ignore", divide="ignore"):
        studentised = np.where(error > 0, (values[1:] - value) / least, 0.0)  # a policy that is its rival has no error
    counts = different >= FEWEST_DIFFERENT
    studentised = studentised[:, counts] if counts.any() else studentised
    both = np.quantile(np.abs(studentised).max(1), LEVEL)
    tail = (1.0 - LEVEL) / 2
    # The lower end depends on the upper tail of the studentised deviations, and vice versa.
    below = max(both, np.quantile(studentised.max(1), 1.0 - tail))
    above = max(both, -np.quantile(studentised.min(1), tail))
    low: Values = np.exp(value - below * error)
    high: Values = np.exp(value + above * error)
    return low, high


def clusters_needed(ratio: Ratio, clusters: int) -> int | None:
    """Return the number of clusters at which an interval of the same spread would exclude 1; None if the ratio is 1.

    Widths shrink with the square root of the number of clusters.
    """
    if ratio.low is None or ratio.high is None or ratio.value == 1.0 or ratio.low <= 0:
        return None
    end = ratio.low if ratio.value > 1.0 else ratio.high
    needed = clusters * (np.log(end / ratio.value) / np.log(ratio.value)) ** 2
    return int(min(np.ceil(max(needed, FEWEST)), 1e9))
