"""Tuning the rules that need no training: each has its published setting and a grid of `BUDGET` more; the fastest is taken.

All grids are of one size, so that no rule wins by having been searched longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specstop.policies.contract import StopPolicy
from specstop.policies.errors import InputError, close_match
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.published.adaedl import AdaEDL
from specstop.policies.published.bandit import Bandit
from specstop.policies.published.c2t import C2T
from specstop.policies.published.ddd import DDD
from specstop.policies.published.eagle import Eagle, OptTree
from specstop.policies.published.hugging_face import Heuristic, HeuristicTransient, Roc
from specstop.policies.published.kangaroo import MaxProb
from specstop.policies.published.online import Online
from specstop.policies.published.specdecpp import Product
from specstop.policies.published.svip import EntropyBound
from specstop.policies.tree_rules import Gain
from specstop.train.fit.rules import fixed_grid
from specstop.train.replay.run import Replayed, replay_many
from specstop.train.replay.traces.arrays import TraceArrays, typical_context

BUDGET = 24
"""Settings tried for each rule besides the published one."""

SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85)
ENTROPIES = (0.1, 0.3, 0.6, 1.0, 1.4, 1.8, 2.2, 2.6, 3.0, 3.5, 4.0, 5.0)


@dataclass(frozen=True)
class Place:
    """Where a rule is tuned: the deepest draft, and what nodes cost there in tokens at the best fixed length's rate."""

    depth: int
    draft_prices: tuple[float, ...]
    target_prices: tuple[float, ...]


Grid = Callable[[Place], list[StopPolicy]]


def caps(depth: int) -> tuple[int, int]:
    """Return the longest drafts that are tried: all that the trace has, and half of it."""
    return depth, max(1, (depth + 1) // 2)


def _over(kind: Callable[..., StopPolicy], **values: Sequence[Any]) -> Grid:
    """Return the grid of all combinations of these parameters and of `caps`."""

    def grid(place: Place) -> list[StopPolicy]:
        settings = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
        return [kind(**chosen, max_depth=most) for most in caps(place.depth) for chosen in settings]

    return grid


def _gains(place: Place) -> list[StopPolicy]:
    return [
        Gain(
            power=power,
            follow=follow,
            max_depth=most,
            draft_prices=place.draft_prices,
            target_prices=place.target_prices,
        )
        for power in (0.25, 0.5, 1.0, 1.5)
        for follow in (0.5, 0.8, 1.2)
        for most in caps(place.depth)
    ]


def _bandits(place: Place) -> list[StopPolicy]:
    lengths = [FixedLength(k) for k in range(min(8, place.depth) + 1)]
    rules = [Confidence(t, place.depth) for t in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)]
    return [
        Bandit(explore, kind, arms)
        for arms in (lengths, rules)
        for kind, explores in (
            ("ucb", (2.0**0.5, 0.7, 0.3, 0.1, 0.03, 0.01)),
            ("thompson", (2.0, 1.0, 0.7, 0.5, 0.3, 0.1)),
        )
        for explore in explores
    ]


GRIDS: dict[str, Grid] = {
    "confidence": _over(Confidence, threshold=SHARES),
    "heuristic": _over(Heuristic, up=(0.5, 1, 2), down=(0.25, 0.5, 1, 2)),
    "heuristic-transient": _over(HeuristicTransient, start=(2, 3, 5), up=(1, 2), down=(0.5, 1)),
    "roc": _over(Roc, threshold=(0.2, 0.4), weight=(0.2, 0.35, 0.5, 1.0, 2.0, 3.0)),
    "entropy": _over(EntropyBound, level=ENTROPIES),
    "adaedl": _over(AdaEDL, start=(0.2, 0.4, 0.6), gamma=(0.05, 0.2), alpha=(0.5, 0.9)),
    "maxprob": _over(MaxProb, threshold=SHARES),
    "product": _over(Product, threshold=SHARES),
    "online": _over(Online, threshold=SHARES),
    "bandit": _bandits,
    "ddd": _over(DDD, threshold=(-4.0, -3.0, -2.0, -1.3, -0.7, -0.3), begin=(1,), every=(1, 2)),
    "eagle": _over(Eagle, nodes=(2, 4, 6, 8, 12, 20), top=(2, 10)),
    "opt": _over(OptTree, delta=(0.02, 0.05, 0.1, 0.2, 0.35, 0.5), nodes=(8, 60)),
    "c2t": _over(C2T, bias=(1.0, 2.0, 3.0, 4.0, 5.0, 7.0), entropy=(0.0, 0.3)),
    "gain": _gains,
}
"""The grid of each rule by its name in a spec."""


def rule_defaults(depth: int) -> dict[str, StopPolicy]:
    """Return each rule as published, none drafting deeper than `depth`."""
    from specstop.policies.registry import load_policy

    return {name: load_policy(name).limited(depth) for name in GRIDS}


def tuned_rules(names: Sequence[str], arrays: TraceArrays, profile: Profile) -> dict[str, StopPolicy]:
    """Return the rules with the settings that replay fastest, the first of several.

    Args:
        names: of rules; see `GRIDS`.
        arrays: training traces, never the evaluated ones.
        profile: what rounds and decisions cost.

    Raises:
        InputError: there is no rule of a name.
    """
    for name in names:
        if name not in GRIDS:
            raise InputError(f"expected one of {', '.join(GRIDS)}, not {name!r}{close_match(name, GRIDS)}")
    at = place(arrays, profile, max(r.rate for r in fixed_grid(arrays, profile)))
    published = rule_defaults(at.depth)
    return {name: fastest([published[name], *GRIDS[name](at)], arrays, profile)[0] for name in names}


def fastest(policies: Sequence[StopPolicy], arrays: TraceArrays, profile: Profile) -> tuple[StopPolicy, Replayed]:
    """Return the policy that replays fastest, and its replay."""
    played = replay_many(arrays, policies, profile)
    return max(zip(policies, played, strict=True), key=lambda pair: pair[1].rate)


def place(arrays: TraceArrays, profile: Profile, rho: float) -> Place:
    """Return where rules are tuned: the depth of the trace and the profile, and prices at `rho` tokens per second."""
    chain = arrays.tree.is_chain
    decision_s = profile.decision("gain")  # each step is followed by one more
    depth = min(arrays.depth, profile.max_depth) if chain else arrays.depth
    widest = max(len(level) for level in arrays.tree.levels)
    outside = (profile.round_s, profile.step_s, 0.0) if chain else profile.tree_outside_s or (0.0, profile.step_s, 0.0)
    between = partial(profile.between, typical_context(arrays))
    if chain:
        padded = profile.padded()
        verify = between(lambda table: [table.verify_s[padded[n]] for n in range(depth + 1)])
        draft = between(lambda table: [table.later_s])
    else:
        verify = between(lambda table: table.tree_verify(arrays.tree.nodes))
        draft = between(lambda table: table.tree_draft(widest)[1:])
    return Place(
        depth,
        tuple(rho * (seconds + outside[1] + outside[2] * (n + 1) + decision_s) for n, seconds in enumerate(draft)),
        tuple(rho * (seconds - verify[0]) for seconds in verify),
    )
