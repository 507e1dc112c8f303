"""Policies by batch size: what each gains over the best fixed length of that size, on this machine and on one like a GPU."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bars import Bars
from specstop.policies.batch_rules import BatchStop, for_batches
from specstop.policies.contract import StopPolicy
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.fixed import FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.published.adaptive_verification import AdaptiveVerification
from specstop.policies.published.load import LoadLength
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.published.tetris import Tetris
from specstop.policies.registry import load_policy
from specstop.train.evaluate.batches import by_batch
from specstop.train.evaluate.statistics import Resamples
from specstop.train.fit.achievable import NAME as ESTIMATE, achievable_in_batches
from specstop.train.fit.batch_rules import settle_batch
from specstop.train.fit.rules import Part
from specstop.train.replay.arrivals import at_once, deal
from specstop.train.replay.batch import replay_batch
from specstop.train.replay.traces.arrays import TraceArrays

CUDA_GRAPH = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 4097, 32))
"""Tokens of the verifications that a GPU has captured; others are filled up to the next of them."""

FLAT, STEP_S, DRAFT, OUTSIDE_S = 64, 0.010, 0.12, (3e-4, 5e-6, 2e-6)
"""Tokens up to which a verification costs the same, its seconds, a draft step as share of it, and what is outside models."""

CLEAR = (4, 8)
"""Batch sizes at which ours is to be above every other joint policy."""


def gpu_like(sizes: Sequence[int], depth: int) -> Profile:
    """Return the costs of a machine whose calls are flat up to 64 tokens, then linear, in steps of captured sizes."""

    def call(tokens: int) -> float:
        return STEP_S * max(1.0, next(size for size in CUDA_GRAPH if size >= tokens) / FLAT)

    def corners(least: int, most: int) -> tuple[tuple[int, float], ...]:
        """Return both sides of every step."""
        known = {least, most, *(n for size in CUDA_GRAPH for n in (size, size + 1) if least <= n <= most)}
        return tuple((n, call(n)) for n in sorted(known))

    drafts = tuple((n, DRAFT * seconds) for n, seconds in corners(1, max(sizes)))
    verify = {size: corners(size, size * (depth + 1)) for size in sizes}
    low = BatchTable(1.0, drafts, verify)
    batch = BatchCosts(low, dataclasses.replace(low, context=1000.0))
    alone = CostTable(1.0, (DRAFT * STEP_S,) * 2, 0.0, tuple(call(n + 1) for n in range(depth + 1)))
    outside = OUTSIDE_S[0] + OUTSIDE_S[1]
    sides, facts = (alone, dataclasses.replace(alone, context=1000.0)), {"device": "like a GPU"}
    return Profile(*sides, OUTSIDE_S[2], outside, (5e-3, 1e-5), facts=facts, batch=batch)


Pricing = Callable[[Profile, Sequence[StopPolicy]], Profile]
"""Returns a profile with what decisions of policies cost."""


def joint_policies(
    learned: LearnedPolicy, profile: Profile, fit: TraceArrays, sizes: Sequence[int], depth: int, priced: Pricing
) -> list[tuple[str, StopPolicy]]:
    """Return every joint policy by name; the lengths by load are the best fixed ones of the texts to fit on."""
    best = by_batch(fit, [], profile, sizes)["best_fixed"]
    table = ",".join(f"{size}:{length}" for size, length in zip(sizes, best, strict=True))
    each = max(1, best[len(best) // 2])
    return [
        ("tetris", Tetris(each, min(2, depth - each))),
        ("adaptive verification", AdaptiveVerification(depth, profile=profile)),
        ("smartspec", SmartSpec(profile=profile, max_depth=depth)),
        ("length by load", LoadLength(table if table.startswith("1:") else f"1:{best[0]},{table}")),
        ("one stream's rule", learned),
        ("confidence:0.4", load_policy("confidence:0.4").limited(depth)),
        ("ours", settled(learned, fit, profile, priced)),
    ]


def settled(learned: LearnedPolicy, fit: TraceArrays, profile: Profile, priced: Pricing) -> BatchStop:
    """Return our policy of batches for the costs of a profile, its own decisions among them."""
    return settle_batch(learned, [Part(fit)], priced(profile, [for_batches(learned, profile=profile)]))


def compare(
    where: str,
    held: TraceArrays,
    fit: TraceArrays,
    learned: LearnedPolicy,
    profile: Profile,
    sizes: Sequence[int],
    priced: Pricing,
    options: argparse.Namespace,
    bars: Bars,
) -> tuple[dict[str, Any], list[tuple[str, StopPolicy]], Profile]:
    """Replay every policy at every batch size, print what it gains, and hold ours to its bars."""
    depth = min(held.depth, profile.max_depth)
    named = joint_policies(learned, profile, fit, sizes, depth, priced)
    ours = named[-1][1]
    known = ours.profile if isinstance(ours, BatchStop) else profile  # with the price that it decides by
    profile = priced(known, [policy for _, policy in named[:-1]])
    known, estimate = achievable_in_batches(held, profile)
    found = by_batch(held, named, profile, sizes, estimate=(known, estimate))
    lines = {line["name"]: line for line in found["lines"]}
    for at, size in enumerate(sizes):
        print(
            f"      {where}, batch {size}: plain {found['plain'][at]:.0f} tokens/s, best fixed:{found['best_fixed'][at]}"
        )
        for name, line in lines.items():
            ratio, share = line["to_best_fixed"][at], line["oracle_share"][at]["value"]
            print(f"        {name:<26} {_text(ratio)} of best fixed, share of the oracle gain {share:.2f}")
    ours = lines["ours"]
    least = min(ratio["value"] for ratio in ours["to_best_fixed"])
    bars.add(
        f"ours over best fixed of the batch size, least, {where}", round(least, 3), least >= 0.99 or options.quick,
        f"{least:.3f}; at least .99",
    )  # fmt: skip
    plain = min(mine / base for mine, base in zip(ours["tokens_per_s"], found["plain"], strict=True))
    bars.add(
        f"ours over plain decoding, least, {where}", round(plain, 3), plain >= 0.99 or options.quick, f"{plain:.3f}"
    )
    for size in (size for size in sizes if size in CLEAR):
        beside_others(where, held, dict(named), profile, (known, estimate), found, size, options, bars)
    return found, named, profile


def beside_others(
    where: str,
    held: TraceArrays,
    policies: Mapping[str, StopPolicy],
    profile: Profile,
    achievable: tuple[TraceArrays, StopPolicy],
    found: dict[str, Any],
    size: int,
    options: argparse.Namespace,
    bars: Bars,
) -> None:
    """Hold ours to be above the other joint policies at a batch size, unless the achievable estimate is not either."""
    lines, at = {line["name"]: line for line in found["lines"]}, found["sizes"].index(size)
    known, estimate = achievable
    others = {name: line["to_best_fixed"][at] for name, line in lines.items() if name not in (*NOT_JOINT, "ours")}
    first, ours = max(others, key=lambda name: float(others[name]["value"])), policies["ours"]
    price = profile.decision(ours.cost_name)
    _, paying = achievable_in_batches(held, profile, price=price)
    paid = profile.with_decisions({paying.cost_name: price})
    order = deal(held.sequences, size, 0)
    theirs, mine, free, paid_for = (
        replay_batch(known, policy, costs, size, at_once(len(order)), order).seconds
        for policy, costs in ((policies[first], profile), (ours, profile), (estimate, profile), (paying, paid))
    )
    boot = Resamples([held.clusters[text] for text in order])
    gap, room, most = (boot.interval(boot.total(theirs) / boot.total(some)) for some in (mine, paid_for, free))
    ceiling = lines["oracle bound of the batch"]["to_best_fixed"][at]["value"]
    bars.add(
        f"ours over the best other joint policy, {where}, batch {size}", gap.value,
        gap.is_above or not room.is_above or options.quick,
        f"{gap.text()} times {first}, clear of 1 unless what is known of these texts is not either: the achievable estimate "
        f"has {room.text()} at the price of our decisions, {most.text()} if they cost nothing; nothing is above "
        f"{ceiling:.3f} of best fixed",
    )  # fmt: skip


AGAIN = "best fixed, again"
"""The same policy once more: what its speed differs by, others' may differ by for nothing."""


def fixed_and(
    found: dict[str, Any], size: int, named: Sequence[tuple[str, StopPolicy]]
) -> list[tuple[str, StopPolicy]]:
    """Return the best fixed length of a size, plain decoding, the fastest other joint policy, ours and the first again."""
    at = found["sizes"].index(size)
    rates = {line["name"]: line["tokens_per_s"][at] for line in found["lines"]}
    policies = dict(named)
    other = max((name for name in policies if name not in (*NOT_JOINT, "ours")), key=lambda name: float(rates[name]))
    fixed, ours = FixedLength(found["best_fixed"][at]), policies["ours"]
    if size in ours.unasked:
        print(f"      in batches of {size} ours decides nothing and drafts {ours.unasked[size]} tokens")
    named = [("best fixed", fixed), ("plain", FixedLength(0)), (other, policies[other]), ("ours", ours)]
    return [*named, (AGAIN, fixed)]


NOT_JOINT = ("best fixed", "one stream's rule", "confidence:0.4", ESTIMATE, "oracle bound of the batch")


def _text(ratio: dict[str, float | None]) -> str:
    if ratio["low"] is None:
        return f"{ratio['value']:.3f}"
    return f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
