"""Off-policy estimators of what a policy would bring, from rounds that another one logged.

In the words of Open Bandit Pipeline (`obp.ope`; it needs Python below 3.10, so this is own code): n rounds, in each a reward
r, a weight w = pi_e(a | x) / pscore, and what a regression q says of the evaluated policy, q(x, pi_e), and of the action
that was taken, q(x, a); all [n].

| name | value |
|---|---|
| `ipw`, inverse probability weighting | sum w r / n: unbiased where pscore is right and never 0 where pi_e acts |
| `snipw`, self-normalised | sum w r / sum w: a little biased, consistent, steadier |
| `dm`, direct method | sum q(x, pi_e) / n: as good as the regression q, which its interval takes as given |
| `dr`, doubly robust | sum q(x, pi_e) + w (r - q(x, a)) / n: unbiased as the first, with less noise where q is good |

(Strehl et al. 2010; Swaminathan and Joachims 2015; Dudik, Langford and Li, arXiv 1103.4601.) Each is a ratio of two sums over
rounds; so ratios of values, such as tokens per second, are ratios of sums as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...policies.contract import Array

Terms = tuple[Array, Array]
"""[n] and [n], the numerator and the denominator of each round; the value is sum over sum."""


def ipw(reward: Array, weight: Array, expected: Array, here: Array) -> Terms:
    """Return w r, averaged over rounds."""
    return weight * reward, np.ones(len(reward))


def snipw(reward: Array, weight: Array, expected: Array, here: Array) -> Terms:
    """Return w r over w."""
    # Errors of numerator and denominator go together, so that much of them cancels; E[w] = 1 makes it consistent.
    return weight * reward, weight


def dm(reward: Array, weight: Array, expected: Array, here: Array) -> Terms:
    """Return q(x, pi_e), averaged over rounds."""
    return expected, np.ones(len(reward))


def dr(reward: Array, weight: Array, expected: Array, here: Array) -> Terms:
    """Return q(x, pi_e) + w (r - q(x, a)), averaged over rounds."""
    return expected + weight * (reward - here), np.ones(len(reward))


ESTIMATORS: dict[str, Callable[[Array, Array, Array, Array], Terms]] = {"ipw": ipw, "snipw": snipw, "dm": dm, "dr": dr}
"""By name; of (r, w, q(x, pi_e), q(x, a))."""
