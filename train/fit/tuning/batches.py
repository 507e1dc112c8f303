"""What rules do in batches, settled by replaying some: the rates of the rule `batch`, and where nothing need be decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ....decode.profile import add_decisions
from ....policies.batch_rules import BatchStop, for_batches
from ....policies.contract import StopPolicy
from ....policies.fixed import FixedLength
from ....policies.learned import LearnedPolicy
from ....policies.profile import Profile
from ....policies.rules import BatchRule, Derived
from ...replay.arrivals import FULL, at_once, deal
from ...replay.batch import COLUMNS, replay_batch
from ..rates import Part
from .rates import SETTLED

FEW = 48
"""Requests that a rate is solved on at least, where there are so many texts."""

FIRST = (0, 1, 2, 3)
"""Depths of the first decision that are tried."""

SCALES = (1.0, 1.25, 1.5, 1.8, 2.2)
"""Multiples of thresholds that are tried in batches."""

CLEARLY = 0.005
"""Shares of a rate within which two of them count as equal."""

_ROUNDS = 3


def settle_batch(policy: LearnedPolicy, parts: Sequence[Part], profile: Profile, clearly: float = CLEARLY) -> BatchStop:
    """Return a policy under the rule `batch` for a profile: its decisions measured where that lacks them, its rates solved.

    The depth of its first decision is the one that gains most over the best fixed lengths, in the mean over batch sizes: a
    decision saved is time saved where the first tokens are nearly always worth drafting. Where it gains nothing to speak of
    at a size, nothing is decided there, and the best fixed length is drafted.

    Args:
        policy: whose head and calibration are used, and whose rule says what is sent, if it is `batch` already.
        parts: training traces, never the evaluated ones.
        profile: what rounds cost. Without batches no rate is solved.
        clearly: share of a fixed length's rate that decisions must gain.
    """
    header, send = parts[0].arrays.header, policy.rule.send if isinstance(policy.rule, BatchRule) else ""
    made = for_batches(policy, send, profile)
    profile = add_decisions(profile, [made], header.vocabulary, header.hidden)
    # Made again, since the policy keeps the price of its own decisions, which has only now been measured.
    made = for_batches(policy, rule=BatchRule(made.rule.send), profile=profile)
    if profile.batch is None or not (header.has_every_anchor and header.tree.is_chain):
        return made
    fixed = {size: _best_length(parts, profile, size, made.max_depth) for size in profile.batch.sizes}
    firsts = [
        for_batches(made, rule=BatchRule(made.rule.send, first=first)) for first in FIRST if first < made.max_depth
    ]
    best = max(firsts, key=lambda policy: _gain(policy, parts, profile, fixed))  # of equally good ones the earliest
    solved = _solved(best, parts, profile)
    rates = [(size, times) for size, (_, times) in solved.items()]
    lengths = [(size, length) for size, (length, rate) in fixed.items() if solved[size][0] < (1.0 + clearly) * rate]
    return for_batches(best, rule=BatchRule(made.rule.send, rates, best.first, lengths))


def settle_lengths(
    policy: LearnedPolicy, parts: Sequence[Part], profile: Profile, clearly: float = CLEARLY
) -> LearnedPolicy:
    """Return a policy of the derived rule that has thresholds for batches, and drafts a fixed length where decisions lose.

    Its thresholds are those of one stream, whose draft steps and verifications are its own. At each batch size of the profile
    some multiples of them are replayed. Where the best gains nothing to speak of, the best fixed length of the size is
    drafted, and nothing is decided.

    Args:
        policy: of any rule; one of another kind comes back as it is.
        parts: training traces, never the evaluated ones.
        profile: what rounds cost. Without batches there is nothing to settle.
        clearly: share of a fixed length's rate that decisions must gain.
    """
    rule, header = policy.rule, parts[0].arrays.header
    replayable = header.has_every_anchor and header.tree.is_chain
    if not isinstance(rule, Derived) or profile.batch is None or not replayable:
        return policy
    lengths: list[tuple[int, int | None]] = [(1, None)]
    scales = [(1, 1.0)]
    for size in (size for size in profile.batch.sizes if size > 1):
        length, fixed = _best_length(parts, profile, size, policy.max_depth)
        tried = [Derived([factor * tau for tau in rule.thresholds], rule.first) for factor in SCALES]
        rates = [batch_rate(policy.with_rule(one), parts, profile, size) for one in tried]
        scales.append((size, SCALES[int(np.argmax(rates))]))
        lengths.append((size, None if max(rates) >= (1.0 + clearly) * fixed else length))
    return policy.with_rule(Derived(rule.thresholds, rule.first, lengths, scales))


def _best_length(parts: Sequence[Part], profile: Profile, size: int, depth: int) -> tuple[int, float]:
    """Return the fixed length that replays fastest in batches of a size, and its rate."""
    deepest = min(depth, profile.max_depth, *(part.arrays.depth for part in parts))
    rates = [batch_rate(FixedLength(k), parts, profile, size) for k in range(deepest + 1)]
    best = int(np.argmax(rates))
    return best, rates[best]


def _gain(policy: BatchStop, parts: Sequence[Part], profile: Profile, fixed: Mapping[int, tuple[int, float]]) -> float:
    """Return what a policy gains over fixed lengths in the mean over sizes; where it loses it need not be asked."""
    gains = [max(batch_rate(policy, parts, profile, size) / rate, 1.0) for size, (_, rate) in fixed.items()]
    # Rounded, so that noise does not choose between first decisions that are equally good.
    return CLEARLY * round(float(np.mean(gains)) / CLEARLY)


def solved_rates(policy: BatchStop, parts: Sequence[Part], profile: Profile) -> list[tuple[int, float]]:
    """Return, by batch size of the profile, how many times the best fixed length's rate a second is best taken to be worth.

    Of a profile without batches nothing.

    Dinkelbach's iteration: assume the rate of the best fixed length, replay batches, assume the rate that came out. The
    fastest replay counts.
    """
    return [(size, times) for size, (_, times) in _solved(policy, parts, profile).items()]


def _solved(policy: BatchStop, parts: Sequence[Part], profile: Profile) -> dict[int, tuple[float, float]]:
    """Return by batch size the fastest rate that was replayed, and the `times` of `solved_rates` that it was reached with."""
    if profile.batch is None:
        return {}
    sizes = profile.batch.sizes
    fixed = dict(zip(sizes, policy.fixed_rate(np.array(sizes)).tolist(), strict=True))
    assumed, best = dict.fromkeys(sizes, 1.0), dict.fromkeys(sizes, (0.0, 1.0))  # (rate, times)
    for _ in range(_ROUNDS):
        made, going = for_batches(policy, rule=BatchRule(policy.rule.send, [*assumed.items()], policy.first)), False
        for size in sizes:
            if best[size][0] and assumed[size] == best[size][1]:
                continue  # it was replayed, and is settled
            rate = batch_rate(made, parts, profile, size)
            best[size] = max(best[size], (rate, assumed[size]))
            found = rate / fixed[size]
            settled = abs(found - assumed[size]) < SETTLED * assumed[size]
            # Once settled, what replayed fastest is kept, which need not be what was assumed last.
            assumed[size] = best[size][1] if settled else found
            going |= not settled
        if not going:
            break
    return best


def batch_rate(policy: StopPolicy, parts: Sequence[Part], profile: Profile, size: int) -> float:
    """Return tokens a second of batches that are full but for the last requests, reading prompts left out."""
    tokens = seconds = 0.0
    for part in parts:
        texts = part.arrays
        # All texts of a batch are of one part: a batch is decided on by one head.
        order = deal(texts.sequences, size, 0)[: max(-(-FEW // len(parts)), FULL * size)]
        played = replay_batch(texts, part.player(policy), profile, size, at_once(len(order)), order)
        tokens += float(played.log[:, COLUMNS.index("committed")].sum())
        seconds += float(played.seconds.sum() - profile.prefill_seconds(texts.prompt_tokens.numpy()[order]).sum())
    return tokens / seconds
