"""Cluster bootstrap: intervals of ratios of sums, paired between policies and simultaneous over them.

A cluster is what is drawn independently: a prompt with all its samples, or a group of prompts. `Resamples` draws clusters
with replacement. All figures of a report share these draws.

Two kinds of intervals:

- `Resamples.interval`, of a single statistic: the expanded percentile interval (Hesterberg, The American Statistician 69,
  2015), in which percentiles correspond to Student's t with P - 1 degrees of freedom.
- `Resamples.simultaneous`, of ratios of speeds that are compared with each other: a bootstrap-t of the maximum over all of
  them. The probability that any lower end lies above the truth is at most 2.5%, whatever the number of policies. Numerators
  and denominators of the studentised statistic are linear (the influence function of a ratio of sums at the sample): the
  ratio itself has an erratic bootstrap distribution if a few clusters are much longer than the others. Each end uses the
  larger of the symmetric and the one-sided critical value, because the former fails for skewed and the latter for
  heavy-tailed distributions. `benchmarks/intervals.py` measures coverage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...decode.benchmark import Ratio, expanded_tail
from ...policies.arguments import check_limits
from ...policies.errors import InputError, close_match

REPLICATES = 2000
LEVEL = 0.95
MIN_CLUSTERS = 20
"""Number of clusters below which an interval does not support a verdict."""

MAX_TOKEN_SHARE = 1 / 3
"""Share of all tokens in one cluster above which there is no verdict (measured by `benchmarks/intervals.py`)."""

MIN_RELATIVE_ERROR = 0.25
"""Minimum standard error of a replicate relative to that of the sample. Without it, resamples that miss the few clusters in
which a policy differs from its rival would have no error."""

MIN_DIFFERENT = 4
"""Number of clusters in which a policy must differ from its rival to count for the maximum. With fewer, its interval contains
1 in any case, and it would only widen the intervals of the others."""

SPEED_TOLERANCE = 1e-9
"""Relative difference of two speeds up to which they are equal."""

MAX_LOG_RATIO = 50.0
"""Limit of the logarithm of an end of an interval: a ratio of 5e21."""

Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Clusters:
    """The cluster of each sequence.

    Attributes:
        of: [S].
        unit: "prompts" or "groups".
        largest: share of all tokens in the largest cluster, and `name` of that cluster; 0 if there is one only.
    """

    of: tuple[str, ...]
    unit: str = "prompts"
    largest: float = 0.0
    name: str = ""

    @property
    def count(self) -> int:
        """Number of clusters."""
        return len(set(self.of))

    @property
    def is_judged(self) -> bool:
        """Whether there are enough clusters of similar size for a verdict."""
        return self.count >= MIN_CLUSTERS and self.largest <= MAX_TOKEN_SHARE

    @property
    def text(self) -> str:
        """`76 prompts`."""
        return f"{self.count} {self.unit}" if self.count > 1 else f"a single {self.unit[:-1]}"


def form_clusters(
    prompts: Sequence[str], groups: Sequence[str], tokens: Sequence[float], by: str = "prompt"
) -> Clusters:
    """Return the clusters to resample.

    Args:
        prompts, groups, tokens: [S] prompt (`TraceArrays.clusters`), group and length of each sequence.
        by: "prompt", or "group": a prompt of two groups counts for the first one, a prompt without a group is a cluster.

    Raises:
        InputError: `by` is unknown, or "group" and the prompts are not of two groups or more.
    """
    if by not in ("prompt", "group"):
        raise InputError(f"--cluster: expected prompt or group, not {by!r}{close_match(by, ('prompt', 'group'))}")
    of = {prompt: prompt for prompt in prompts}
    if by == "group":
        if len(set(groups)) < 2:
            raise InputError(
                f"--cluster group: expected prompts of 2 or more groups, not of {len(set(groups) - {''})}; collect with a "
                "column `group`, or use --cluster prompt"
            )
        for prompt, group in reversed(list(zip(prompts, groups, strict=True))):
            of[prompt] = group or f"prompt {prompt}"
    totals: dict[str, float] = {}
    for prompt, count in zip(prompts, tokens, strict=True):
        totals[of[prompt]] = totals.get(of[prompt], 0.0) + count
    name = max(totals, key=lambda cluster: totals[cluster])
    share = totals[name] / max(sum(totals.values()), 1.0) if len(totals) > 1 else 0.0
    return Clusters(tuple(of[prompt] for prompt in prompts), f"{by}s", share, name)


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


class Resamples:
    """The sample, and R resamples of its P clusters with replacement.

    Args:
        clusters: [S] cluster of each sequence (or round); the sequences of a cluster are drawn together.
        seed: of the draws.
        replicates: R.
        among: all clusters that are drawn together with these, such as the prompts of several traces. Resamples with the
            same `seed` and the same `among` draw a cluster equally often, so that statistics of traces that share prompts
            are resampled together, and those of different prompts independently. The number of clusters of this sample in
            a resample then varies around P.

    Attributes:
        clusters: P.
        labels: [S] cluster of each sequence.
        weights: [1 + R, P], how often each cluster is in the sample (once) and in every resample.
    """

    def __init__(
        self, clusters: Sequence[Any], seed: int = 0, replicates: int = REPLICATES, among: Iterable[Any] = ()
    ) -> None:
        check_limits(seed=seed)
        self.labels = [str(cluster) for cluster in clusters]
        names, self._cluster = np.unique(np.asarray(clusters), return_inverse=True)
        self.clusters, self.replicates = len(names), replicates
        others = list(among)
        pool = np.unique(np.asarray([*clusters, *others])) if others else names
        chance = np.full(len(pool), 1.0 / len(pool))
        # How often each cluster is in a resample of the pool with replacement; row 0 is the sample, each once.
        drawn = np.random.default_rng(seed).multinomial(len(pool), chance, size=replicates).astype(np.float64)
        drawn = drawn[:, np.searchsorted(pool, names)]
        drawn[drawn.sum(1) == 0] = 1.0  # no cluster of this sample was drawn; happens for two or three clusters only
        self.weights = np.concatenate([np.ones((1, self.clusters)), drawn])

    def by_cluster(self, values: Any) -> Values:
        """Return [P, ...], the sums over values [S, ...] of each cluster."""
        values = np.asarray(values, dtype=np.float64)
        sums: Values = np.zeros((self.clusters, *values.shape[1:]))
        np.add.at(sums, self._cluster, values)
        return sums

    def total(self, values: Any) -> Values:
        """Return [1 + R, ...], the sums over values [S, ...] in the sample and in every resample."""
        out: Values = np.tensordot(self.weights, self.by_cluster(values), 1)
        return out

    def counts(self) -> Values:
        """Return [1 + R, S], how often each sequence is in the sample (once) and in every resample."""
        out: Values = self.weights[:, self._cluster]
        return out

    def interval(self, values: Values) -> Ratio:
        """Return the value of the sample and its expanded percentile interval.

        Args:
            values: [1 + R] of a statistic of `total`s; values that are not finite are skipped.
        """
        value, drawn = float(values[0]), values[1:][np.isfinite(values[1:])]
        if not len(drawn) or self.clusters < 2:
            return Ratio(value)
        tail = expanded_tail(self.clusters)
        low, high = np.quantile(drawn, [tail, 1.0 - tail])
        return Ratio(value, float(low), float(high))

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
        ours, theirs = list(policies), list(rivals)
        tokens, seconds = (self.by_cluster(np.reshape(part, (len(seconds), -1))) for part in (tokens, seconds))
        influence = tokens / tokens.mean(0) - seconds / seconds.mean(0)  # [P, M] of each cluster on the log speed
        rate = tokens.sum(0) / seconds.sum(0)  # [M] tokens/s
        shift = np.zeros((1, len(rate))) if price is None else price
        size = self.weights.sum(1, keepdims=True)  # [1 + R, 1]; P, unless more clusters are drawn `among`
        drawn = self.weights @ influence / size + shift  # [1 + R, M] deviation of the log speed
        rival = np.log(rate[theirs]) + drawn[:, theirs]
        winner = rival.argmax(1)
        values = np.log(rate[ours]) + drawn[:, ours] - rival.max(1, keepdims=True)
        errors = np.zeros_like(values)
        for at in np.unique(winner):
            rows, difference = winner == at, influence[:, ours] - influence[:, [theirs[at]]]
            mean, square = (self.weights[rows] @ power / size[rows] for power in (difference, difference**2))
            errors[rows] = (square - mean**2).clip(0.0) / (size[rows] - 1.0).clip(1.0)
        best = theirs[winner[0]]
        errors = np.sqrt(errors + (shift[:, ours] - shift[:, [best]]).var(0))
        speeds = tokens / seconds  # [P, M]
        different = (np.abs(speeds[:, ours] / speeds[:, [best]] - 1.0) > SPEED_TOLERANCE).sum(0)
        return LogRatios(values, errors, different, rate[ours] / rate[theirs].max())

    def simultaneous(self, families: Sequence[LogRatios], apart: int | None = None) -> list[list[Ratio]]:
        """Return the ratios of all families with intervals that hold for all of them at once.

        Args:
            families: log ratios over the same draws, such as those of several latencies or traces.
            apart: column of every family with separate intervals: they hold for this column of all families.
        """
        columns = range(families[0].values.shape[1])
        out: list[list[Ratio]] = [[Ratio(float(value)) for value in family.ratios] for family in families]
        if self.clusters < 2:
            return out
        for together in ([at for at in columns if at != apart], [at for at in columns if at == apart]):
            if together:
                values, errors = (
                    np.concatenate([getattr(f, name)[:, together] for f in families], 1)
                    for name in ("values", "errors")
                )
                different = np.concatenate([f.different[together] for f in families])
                ends = np.reshape(_interval_ends(values, errors, different), (2, len(families), len(together)))
                for ratios, (low, high) in zip(out, ends.swapaxes(0, 1).tolist(), strict=True):
                    for at, *interval in zip(together, low, high, strict=True):
                        ratios[at] = Ratio(ratios[at].value, *interval)
        return out


def _interval_ends(values: Values, errors: Values, different: Values) -> tuple[Values, Values]:
    """Return the ends [M] of simultaneous intervals (bootstrap-t of the maximum); arguments as of `LogRatios`."""
    value, error = values[0], errors[0]
    least = np.maximum(errors[1:], MIN_RELATIVE_ERROR * error)
    with np.errstate(invalid="ignore", divide="ignore"):
        studentised = np.where(error > 0, (values[1:] - value) / least, 0.0)  # a policy that is its rival has no error
    counts = different >= MIN_DIFFERENT
    studentised = studentised[:, counts] if counts.any() else studentised
    both = np.quantile(np.abs(studentised).max(1), LEVEL)
    tail = (1.0 - LEVEL) / 2
    # The lower end depends on the upper tail of the studentised deviations, and vice versa.
    below = max(both, np.quantile(studentised.max(1), 1.0 - tail))
    above = max(both, -np.quantile(studentised.min(1), tail))
    # With two or three clusters a quantile may be too large for a float; JSON has no infinity.
    ends = np.clip([value - below * error, value + above * error], -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.exp(ends[0]), np.exp(ends[1])


def oracle_share(rate: Values, best: Values, bound: Values) -> Values:
    """Return the share of the oracle gain, of tokens/s [1 + R]; 0 if there is no gain or no bound."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share: Values = np.where(bound > best * (1.0 + SPEED_TOLERANCE), (rate - best) / (bound - best), 0.0)
    return share


def clusters_needed(ratio: Ratio, clusters: int) -> int | None:
    """Return the number of clusters at which an interval of the same spread would exclude 1; None if the ratio is 1.

    Widths shrink with the square root of the number of clusters.
    """
    if ratio.low is None or ratio.high is None or ratio.value == 1.0 or ratio.low <= 0:
        return None
    end = ratio.low if ratio.value > 1.0 else ratio.high
    needed = clusters * (np.log(end / ratio.value) / np.log(ratio.value)) ** 2
    return int(min(np.ceil(max(needed, MIN_CLUSTERS)), 1e9))
