"""The threshold that is fitted to the accept bits of the text so far (`policies.baselines.roc`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import copy_row, exact, kernel
from ..features import known_depths


@kernel("void(float32[:,:,::1], boolean[:,::1], int64, float32[::1], float32[:,::1], boolean[:,::1], float32[:,::1])")
def keep_likely(features: Any, alive: Any, depth: int, threshold: Any, seen: Any, kept: Any, seen_after: Any) -> None:
    """Keep the branches whose feature reaches the threshold, and note the largest of the depth.

    Args:
        features: [S, B, 1].
        alive: [S, B].
        depth: j, from 1 on.
        threshold: [S].
        seen: [S, K] what was noted of this round; infinite = not asked.
        kept, seen_after: are written.
    """
    for s in range(alive.shape[0]):
        copy_row(seen[s], seen_after[s])
        most = -np.inf
        for b in range(alive.shape[1]):
            kept[s, b] = alive[s, b] and features[s, b, 0] >= threshold[s]
            if alive[s, b] and features[s, b, 0] > most:
                most = features[s, b, 0]
        if most > -np.inf:
            seen_after[s, depth - 1] = most


@exact
def _fitted(probs: Any, labels: Any, count: Any, weight: Any, otherwise: Any) -> Any:
    """Return the sample of the least false positive rate + weight * false negative rate; the largest of several."""
    positives = 0
    for i in range(count):
        positives += labels[i]
    negatives = count - positives  # without one of either kind there is no curve
    if positives == 0 or negatives == 0:
        return otherwise
    # Samples fall, so the threshold probs[i] accepts those up to i: `true` of them right, i + 1 - true wrong. The infinite
    # threshold of scikit-learn's curve costs `weight`: at 3 it never wins, as the lowest sample costs 1.
    best, least, true = otherwise, np.inf, 0
    for i in range(count):
        true += labels[i]
        if i + 1 < count and probs[i + 1] == probs[i]:  # equal samples are one point of the curve
            continue
        cost = (i + 1 - true) / negatives + weight * (1.0 - true / positives)
        if cost < least:
            best, least = probs[i], cost
    return best


@kernel(
    "void(boolean[::1], boolean[::1], int64[::1], int64[::1], float64, int64, float32[::1], float32[:,::1], "
    "float32[:,::1], boolean[:,::1], int64[::1], float32[::1], float32[:,::1], boolean[:,::1], int64[::1])"
)
def fit_threshold(
    active: Any, cut: Any, accepted: Any, verified: Any, weight: float, enough: int, threshold: Any, seen: Any, probs: Any,
    labels: Any, count: Any, threshold_after: Any, probs_after: Any, labels_after: Any, count_after: Any,
) -> None:  # fmt: skip
    """Take a round's samples into the sorted ones of the text, and fit the threshold to all.

    Args:
        active, cut, accepted, verified: [S] of the round.
        weight: of the false negative rate.
        enough: samples from which on a threshold is fitted.
        threshold: [S].
        seen: [S, K] of the round.
        probs, labels: [S, M] the samples in falling order and whether each was accepted, `count` [S] of them.
        threshold_after, probs_after, labels_after, count_after: are written; there is room for what is added.
    """
    for s in range(threshold.shape[0]):
        samples, bits, n = probs_after[s], labels_after[s], count[s]
        copy_row(probs[s, :n], samples)
        copy_row(labels[s, :n], bits)
        for j in range(min(known_depths(active[s], cut[s], accepted[s], verified[s]), seen.shape[1])):
            if not np.isfinite(seen[s, j]):
                continue
            at = n  # a round adds a handful to samples that are sorted already: inserting beats sorting anew
            while at > 0 and samples[at - 1] < seen[s, j]:
                samples[at], bits[at] = samples[at - 1], bits[at - 1]
                at -= 1
            samples[at], bits[at] = seen[s, j], j < accepted[s]
            n += 1
        count_after[s] = n
        threshold_after[s] = threshold[s]
        if n >= enough:
            threshold_after[s] = _fitted(samples, bits, n, weight, threshold[s])
