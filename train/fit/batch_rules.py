"""Rules for batches, chosen by replay: rates of the rule `batch`, and batch sizes at which decisions do not pay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...decode.profile import add_decisions
from ...policies.batch_rules import BatchStop, for_batches
from ...policies.contract import StopPolicy
from ...policies.fixed import FixedLength
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.rules import BatchRule, Derived
from ..replay.batch import MIN_BATCHES, arrive_at_once, replay_batch, request_order
from .rules import RATE_TOLERANCE, Part

MIN_REQUESTS = 48
"""Requests that a rate is solved on at least, if there are so many texts."""

FIRST_DEPTHS_IN_BATCHES = (0, 1, 2, 3)
"""Depths of the first decision that are tried."""

SCALES = (1.0, 1.25, 1.5, 1.8, 2.2)
"""Multiples of thresholds that are tried in batches."""

TIE = 0.005
"""Relative difference of two rates below which they count as equal."""

_ROUNDS = 3


def tune_batch_rule(policy: LearnedPolicy, parts: Sequence[Part], profile: Profile, min_gain: float = TIE) -> BatchStop:
    """Return a policy under the rule `batch` for a profile, with decisions measured if the profile lacks them, rates solved.

    The first decision comes at the depth with the highest mean gain over the best fixed lengths of all batch sizes: if the
    first tokens are nearly always worth drafting, a saved decision is saved time. At a size without a gain no decisions are
    taken, and the best fixed length is drafted.

    Args:
        policy: provides the head and the calibration; an existing rule `batch` says what is sent.
        parts: training traces, never the evaluated ones.
        profile: what rounds cost. Without batches no rate is solved.
        min_gain: relative gain over a fixed length that decisions must have.
    """
    header, send = parts[0].arrays.header, policy.rule.send if isinstance(policy.rule, BatchRule) else ""
    stop = for_batches(policy, send, profile)
    profile = add_decisions(profile, [stop], header.vocabulary, header.hidden)
    # The policy keeps the price of its decisions, which is known only now.
    stop = for_batches(policy, rule=BatchRule(stop.rule.send), profile=profile)
    if profile.batch is None or not (header.has_every_anchor and header.tree.is_chain):
        return stop
    fixed = {size: _best_length(parts, profile, size, stop.max_depth) for size in profile.batch.sizes}

    def mean_gain(candidate: BatchStop) -> float:
        gains = [max(batch_rate(candidate, parts, profile, size) / rate, 1.0) for size, (_, rate) in fixed.items()]
        # Rounded, so that noise does not choose between equally good first decisions; of those the earliest is taken.
        return TIE * round(float(np.mean(gains)) / TIE)

    firsts = [first for first in FIRST_DEPTHS_IN_BATCHES if first < stop.max_depth]
    best = max((for_batches(stop, rule=BatchRule(stop.rule.send, first=first)) for first in firsts), key=mean_gain)
    solved = solve_batch_rates(best, parts, profile)
    rates = [(size, times) for size, (_, times) in solved.items()]
    lengths = [(size, length) for size, (length, rate) in fixed.items() if solved[size][0] < (1.0 + min_gain) * rate]
    return for_batches(best, rule=BatchRule(stop.rule.send, rates, best.first, lengths))


def tune_batch_lengths(
    policy: LearnedPolicy, parts: Sequence[Part], profile: Profile, min_gain: float = TIE
) -> LearnedPolicy:
    """Return a policy of the derived rule with thresholds for batches, and a fixed length where decisions lose.

    The thresholds of one stream are multiplied by the factor of `SCALES` that replays fastest at each batch size.

    Args:
        policy: of any rule; one with another rule is returned unchanged.
        parts: training traces, never the evaluated ones.
        profile: what rounds cost. Without batches nothing changes.
        min_gain: relative gain over a fixed length that decisions must have.
    """
    rule, header = policy.rule, parts[0].arrays.header
    is_replayable = header.has_every_anchor and header.tree.is_chain
    if not isinstance(rule, Derived) or profile.batch is None or not is_replayable:
        return policy
    lengths: list[tuple[int, int | None]] = [(1, None)]
    scales = [(1, 1.0)]
    for size in (size for size in profile.batch.sizes if size > 1):
        length, fixed = _best_length(parts, profile, size, policy.max_depth)
        scaled = [Derived([factor * tau for tau in rule.thresholds], rule.first) for factor in SCALES]
        rates = [batch_rate(policy.with_rule(one), parts, profile, size) for one in scaled]
        scales.append((size, SCALES[int(np.argmax(rates))]))
        lengths.append((size, None if max(rates) >= (1.0 + min_gain) * fixed else length))
    return policy.with_rule(Derived(rule.thresholds, rule.first, lengths, scales))


def _best_length(parts: Sequence[Part], profile: Profile, size: int, depth: int) -> tuple[int, float]:
    """Return the fixed length that replays fastest in batches of a size, and its rate."""
    deepest = min(depth, profile.max_depth, *(part.arrays.depth for part in parts))
    rates = [batch_rate(FixedLength(k), parts, profile, size) for k in range(deepest + 1)]
    best = int(np.argmax(rates))
    return best, rates[best]


def solve_batch_rates(policy: BatchStop, parts: Sequence[Part], profile: Profile) -> dict[int, tuple[float, float]]:
    """Return by batch size of the profile the fastest replayed rate, and what a second was taken to be worth for it.

    That value is a multiple of the best fixed length's rate, by Dinkelbach's iteration: assume the rate of the best
    fixed length, replay batches, assume the result. A profile without batches has none.
    """
    if profile.batch is None:
        return {}
    sizes = profile.batch.sizes
    fixed = dict(zip(sizes, policy.fixed_rate(np.array(sizes)).tolist(), strict=True))
    assumed, best = dict.fromkeys(sizes, 1.0), dict.fromkeys(sizes, (0.0, 1.0))  # (rate, times)
    for _ in range(_ROUNDS):
        stop, continues = for_batches(policy, rule=BatchRule(policy.rule.send, [*assumed.items()], policy.first)), False
        for size in sizes:
            if best[size][0] and assumed[size] == best[size][1]:
                continue  # already replayed
            rate = batch_rate(stop, parts, profile, size)
            best[size] = max(best[size], (rate, assumed[size]))
            times = rate / fixed[size]
            has_converged = abs(times - assumed[size]) < RATE_TOLERANCE * assumed[size]
            # After convergence the fastest multiple is kept, which is not always the last one.
            assumed[size] = best[size][1] if has_converged else times
            continues |= not has_converged
        if not continues:
            break
    return best


def batch_rate(policy: StopPolicy, parts: Sequence[Part], profile: Profile, size: int) -> float:
    """Return tokens per second of batches that are full except for the last requests, without the reading of prompts."""
    tokens = seconds = 0.0
    for part in parts:
        texts = part.arrays
        # All texts of a batch are of one part, because one head decides for a batch.
        order = request_order(texts.sequences, size, 0)[: max(-(-MIN_REQUESTS // len(parts)), MIN_BATCHES * size)]
        played = replay_batch(texts, part.play_with_head(policy), profile, size, arrive_at_once(len(order)), order)
        tokens += float(played.committed.sum())
        seconds += float(
            float(played.seconds.sum()) - profile.prefill_seconds(texts.prompt_tokens.numpy()[order]).sum()
        )
    return tokens / seconds
