"""Intervals over prompts: expanded percentile bootstrap of ratios of sums, paired because all figures share their resamples.

Prompts are what is drawn anew: rounds of one prompt resemble each other. Sums over resampled prompts are matrix products.

Resamples of P prompts vary by (P - 1) / P of the sample's variance, and normal quantiles are too narrow for a variance that
is itself estimated. The plain percentile interval of 20 prompts therefore misses too often (up to 8% in the place of 5, in
worlds of `benchmarks/intervals.py`). Percentiles that correspond to Student's t, Phi(+-sqrt(P / (P - 1)) t_{P-1}), mend that:
the expanded percentile interval (T. Hesterberg, The American Statistician 69, 2015). What holds in every replicate, such as
that no fixed length is above the best one, holds for percentiles and not for studentised intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...policies.limits import check_limits

REPLICATES = 2000
LEVEL = 0.95
FEWEST = 8
"""Prompts, or turns of a batch, below which an interval says too little for a verdict."""

Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums and its bootstrap interval; without one where a single prompt says nothing about others."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1.0

    @property
    def is_below(self) -> bool:
        """Whether the whole interval lies below 1."""
        return self.high is not None and self.high < 1.0

    def times(self, factor: float) -> Ratio:
        """Return value and interval, multiplied."""
        low, high = (None if end is None else factor * end for end in (self.low, self.high))
        return Ratio(factor * self.value, low, high)

    def text(self, digits: int = 3) -> str:
        """Return `1.042 [1.021, 1.063]`; the value alone where there is no interval."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


class Resamples:
    """The sample, and R resamples of its P prompts with replacement.

    Args:
        prompt_ids: [S] by sequence (or round); the sequences of a prompt are drawn together.
        seed: of the draws.
        replicates: R.
    """

    def __init__(self, prompt_ids: Sequence[Any], seed: int = 0, replicates: int = REPLICATES) -> None:
        check_limits(seed=seed)
        _, self._prompt = np.unique(np.asarray(prompt_ids), return_inverse=True)
        self.prompts = int(self._prompt.max()) + 1
        self.replicates = replicates
        chance = np.full(self.prompts, 1.0 / self.prompts)
        # How often each prompt is in a resample of P with replacement; row 0 is the sample itself, each once.
        drawn = np.random.default_rng(seed).multinomial(self.prompts, chance, size=replicates)
        self._weights = np.concatenate([np.ones((1, self.prompts)), drawn.astype(np.float64)])

    def total(self, values: Any) -> Values:
        """Return [1 + R] or [1 + R, M], the sums over values [S] or [S, M] in the sample and in every resample."""
        values = np.asarray(values, dtype=np.float64)
        by_prompt = np.zeros((self.prompts, *values.shape[1:]))  # [P] or [P, M]
        np.add.at(by_prompt, self._prompt, values)
        out: Values = self._weights @ by_prompt
        return out

    def counts(self) -> Values:
        """Return [1 + R, S], how often each sequence is in the sample (once) and in every resample."""
        out: Values = self._weights[:, self._prompt]
        return out

    def interval(self, values: Values) -> Ratio:
        """Return the value of the sample and its interval, from values [1 + R] of a statistic of `total`s.

        Resamples without a value are left out. One prompt says nothing of how others differ: it has no interval.
        """
        value, known = float(values[0]), values[1:][np.isfinite(values[1:])]
        if not len(known) or self.prompts < 2:
            return Ratio(value)
        tail = expanded_tail(self.prompts)
        low, high = np.quantile(known, [tail, 1.0 - tail])
        return Ratio(value, float(low), float(high))


def expanded_tail(prompts: int) -> float:
    """Return the share of resamples below (and above) the expanded percentile interval of so many prompts."""
    from scipy.special import ndtr, stdtrit  # half of scipy, for a number that not every comparison wants

    t = stdtrit(prompts - 1, (1.0 + LEVEL) / 2)
    return float(ndtr(-np.sqrt(prompts / (prompts - 1)) * t))
