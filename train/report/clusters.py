"""What intervals resample: prompts with all their samples, or groups of prompts that resemble each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...policies.errors import InputError, close_match
from ..replay.traces.arrays import TraceArrays
from ..statistics import FEWEST, Resamples, Values
from .records import MOST_OF_TOKENS

CLUSTERS = ("auto", "prompt", "group")
MOST_SINGLETONS = 0.1
"""Share of groups with a single prompt from which on groups say nothing of how prompts resemble each other."""

SIGNIFICANT = 0.2
"""Level of the test for group effects. A missed effect makes intervals too narrow, a false one only too wide."""

DOMINANT = 0.2
"""Share of the tokens from which on a cluster is named."""


@dataclass(frozen=True)
class Clusters:
    """The cluster of each sequence.

    Attributes:
        of: [S].
        unit: "prompts" or "groups".
        why: the reason for the choice, "" if prompts have no groups.
        largest: share of all tokens in the largest cluster, and `name` of that cluster.
    """

    of: tuple[str, ...]
    unit: str = "prompts"
    why: str = ""
    largest: float = 0.0
    name: str = ""

    @property
    def count(self) -> int:
        """Number of clusters."""
        return len(set(self.of))

    @property
    def is_judged(self) -> bool:
        """Whether there are enough clusters of similar size for a verdict."""
        return self.count >= FEWEST and self.largest <= MOST_OF_TOKENS

    @property
    def facts(self) -> dict[str, Any]:
        """What a report records of the choice."""
        return {"clusters": self.count, "cluster unit": self.unit, "cluster choice": self.why}

    @property
    def text(self) -> str:
        """`76 prompts`."""
        return f"{self.count} {self.unit}" if self.count > 1 else f"a single {self.unit[:-1]}"


def check_cluster(option: str) -> None:
    """Refuse an unknown choice.

    Raises:
        InputError: it is none of `CLUSTERS`.
    """
    if option not in CLUSTERS:
        raise InputError(
            f"--cluster: expected one of {', '.join(CLUSTERS)}, not {option!r}{close_match(option, CLUSTERS)}"
        )


def choose_clusters(
    prompts: Sequence[str], groups: Sequence[str], tokens: Any, seconds: Any, policies: Sequence[int],
    rivals: Sequence[int], option: str = "auto",
) -> Clusters:  # fmt: skip
    """Return the clusters to resample.

    With "auto" groups are the clusters if fewer than 10% of them have a single prompt and the speeds of the policies differ
    between groups by more than between prompts of a group.

    Args:
        prompts, groups: [S] prompt (`TraceArrays.clusters`) and group of each sequence.
        tokens, seconds: [S] or [S, M] and [S, M] of M replays.
        policies, rivals: columns of policies, and of those that they are compared with.
        option: one of `CLUSTERS`.

    Raises:
        InputError: groups are requested and there are none.
    """
    check_cluster(option)
    of, unit, why = _choice(prompts, groups, tokens, seconds, policies, rivals, option)
    shares: Counter[str] = Counter()
    for name, count in zip(of, np.reshape(tokens, (len(of), -1)).mean(1).tolist(), strict=True):
        shares[name] += count
    name, count = shares.most_common(1)[0]
    return Clusters(of, unit, why, count / max(shares.total(), 1) if len(shares) > 1 else 0.0, name)


def _choice(
    prompts: Sequence[str], groups: Sequence[str], tokens: Any, seconds: Any, policies: Sequence[int],
    rivals: Sequence[int], option: str,
) -> tuple[tuple[str, ...], str, str]:  # fmt: skip
    """Return the cluster of each sequence, the unit, and the reason."""
    names = set(groups)
    if option == "group" and (names == {""} or len(names) < 2):
        raise InputError(
            f"--cluster group: expected prompts of 2 or more groups, not of {len(names - {''})}; collect with a column "
            "`group`, or use --cluster prompt"
        )
    if option == "prompt" or len(names) < 2:
        return tuple(prompts), "prompts", ""
    # A prompt without a group is a group of its own.
    joined = _joined(prompts, [group or f"prompt {prompt}" for prompt, group in zip(prompts, groups, strict=True)])
    if option == "group":
        return joined, "groups", "clusters are groups (--cluster group)"
    sizes = Counter(group for _, group in set(zip(prompts, joined, strict=True)))
    single = sum(count == 1 for count in sizes.values()) / len(sizes)
    if len(sizes) < 2 or single >= MOST_SINGLETONS or not policies:
        return tuple(prompts), "prompts", ""
    chance = group_effect(prompts, joined, tokens, seconds, policies, rivals)
    effect = f"test for differences between the {len(sizes)} groups: p = {chance:.2g}"
    if chance >= SIGNIFICANT:
        return tuple(prompts), "prompts", f"prompts are treated as independent ({effect})"
    why = f"prompts of a group resemble each other ({effect}), so that clusters are groups"
    return joined, "groups", f"{why}; --cluster prompt if new prompts will come from these groups"


def _joined(prompts: Sequence[str], groups: Sequence[str]) -> tuple[str, ...]:
    """Return [S] groups, joined if they share a prompt: clusters have to be disjoint."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    (names, group), (_, prompt) = (np.unique(np.asarray(of), return_inverse=True) for of in (groups, prompts))
    size = len(names) + int(prompt.max()) + 1
    edges = coo_array((np.ones(len(group)), (group, len(names) + prompt)), shape=(size, size))
    _, part = connected_components(edges, directed=False)
    first = {int(part[at]): str(name) for at, name in reversed(list(enumerate(names)))}
    return tuple(first[int(part[at])] for at in group)


def group_effect(
    prompts: Sequence[str], groups: Sequence[str], tokens: Any, seconds: Any, policies: Sequence[int],
    rivals: Sequence[int],
) -> float:  # fmt: skip
    """Return the p-value of equal speed ratios in all groups.

    Kruskal-Wallis tests of each policy, by the influence of each prompt on its ratio, are combined by the Cauchy combination
    test (Liu and Xie, JASA 115, 2020), which holds for dependent tests.
    """
    from scipy.stats import cauchy, kruskal

    boot = Resamples(prompts, replicates=1)
    influence = boot.speed_influence(tokens, seconds)
    of = dict(zip(prompts, groups, strict=True))
    group = np.array([of[name] for name in np.unique(np.asarray(prompts)).tolist()])
    totals = np.reshape(tokens, (len(prompts), -1)).sum(0) / np.asarray(seconds).sum(0)
    best = max(rivals, key=lambda at: float(totals[at]))
    differences: Values = influence[:, list(policies)] - influence[:, [best]]
    chances = []
    for column in differences.T:
        if np.ptp(column) > 0:
            chances.append(float(kruskal(*(column[group == name] for name in np.unique(group))).pvalue))
    if not chances:
        return 1.0
    return float(cauchy.sf(np.mean(cauchy.isf(np.clip(chances, 1e-15, 1.0 - 1e-15)))))


def dominant_cluster(arrays: TraceArrays, clusters: Clusters) -> tuple[str, ...]:
    """Return a warning that names a cluster with more than 20% of all tokens, if there is one."""
    if clusters.largest <= DOMINANT:
        return ()
    first = clusters.of.index(clusters.name)
    called = f"group {clusters.name!r}" if clusters.unit == "groups" else f"prompt {arrays.prompt_ids[first]!r}"
    return (f"{called} has {clusters.largest:.0%} of all tokens: intervals depend on it, and other prompts may differ",)
