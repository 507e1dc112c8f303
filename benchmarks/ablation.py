"""Which refinements of the cost model matter: predicted speeds with one of them dropped, or one more added.

All variants are estimated from the same measurements and price the same replayed rounds. Used by `replay.py --ablation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from specstop.policies.costs import CostTable
from specstop.policies.measurements import DECISIONS, LATER, PLAIN, VERIFY, Measurements, Series, fit_line, groups
from specstop.policies.profile import Profile
from specstop.train.replay.log import Rounds
from torch import Tensor

Variant = Callable[[Rounds], tuple[Profile, float]]
"""Returns the costs of a policy's rounds, and seconds in addition to them."""


def tables(profile: Profile, change: Callable[[CostTable], CostTable]) -> Profile:
    """Return the profile with both tables changed."""
    return replace(profile, low=change(profile.low), high=change(profile.high))


def estimated(profile: Profile, change: Callable[[Series], Series]) -> Profile:
    """Return the profile that is estimated from changed series."""
    measurements = Measurements({key: change(series) for key, series in profile.measurements.series.items()})
    return Profile.measured(measurements, (profile.low.context, profile.high.context), profile.max_depth)


def clipped(series: Series, most: float = 3.0) -> Series:
    """Return timings of at most `most` times their median."""
    limit = int(most * np.median([n for ns in series for n in ns]))
    return tuple(tuple(min(n, limit) for n in ns) for ns in series)


def without_plain_texts(profile: Profile) -> Profile:
    """Return the profile that is estimated without the timings of plain decoding in texts of its own."""
    kept = profile.measurements.where(lambda key: key.what != PLAIN)
    return Profile.measured(kept, (profile.low.context, profile.high.context), profile.max_depth)


def second_step(profile: Profile) -> Variant:
    """Return costs in which the second draft step of a round has a price of its own."""
    timed = groups(profile.measurements.pooled, LATER)
    second, later = fit_line([((1, drafted - 2), seconds) for (drafted,), seconds in timed.items()])
    changed = tables(profile, lambda table: replace(table, later_draft_s=later))
    return lambda rounds: (changed, (second - later) * int((rounds.steps > 1).sum()))


def first_decision(profile: Profile) -> Variant:
    """Return costs in which a round with decisions costs something once, in addition to each decision."""

    def priced(rounds: Rounds) -> tuple[Profile, float]:
        timed = groups(profile.measurements.pooled, DECISIONS, rounds.cost_name)
        if len(timed) < 2:
            return profile, 0.0
        each, once = fit_line([((calls, 1), seconds) for (calls,), seconds in timed.items()])
        return profile.with_decisions({rounds.cost_name: each}), once * int((rounds.decisions > 0).sum())

    return priced


def variants(profile: Profile) -> dict[str, Variant]:
    """Return the costs as they are, without each refinement, and with others."""
    mean_outside = profile.round_s + profile.step_s * profile.max_depth / 2
    changed = {
        "as they are": profile,
        "- second context": replace(profile, high=replace(profile.low, context=profile.high.context)),
        "- plain decoding timed in its own texts": without_plain_texts(profile),
        "- price outside the models by token": replace(profile, step_s=0.0, round_s=mean_outside),
        "- first draft step": tables(profile, lambda t: replace(t, draft_s=(t.later_s, t.later_s))),
        "- backlog": tables(profile, lambda t: replace(t, draft_s=(t.draft_s[0],) * 2, draft_token_s=0.0)),
        "- decisions": replace(profile, decision_s={}),
        "+ stalls clipped to three medians": estimated(profile, clipped),
    }
    if profile.low.tree_verify_s:
        changed["- verification of trees"] = tables(profile, lambda table: replace(table, tree_verify_s=()))
        changed["- price outside the models of trees"] = replace(profile, tree_outside_s=None)
    constant: dict[str, Variant] = {name: lambda rounds, one=one: (one, 0.0) for name, one in changed.items()}  # type: ignore[misc]
    return {**constant, "+ second draft step": second_step(profile), "+ first decision": first_decision(profile)}


def ablation(
    profile: Profile, played: Sequence[Rounds], prompt_tokens: Tensor, rates: Sequence[float]
) -> dict[str, float]:
    """Return by variant the mean over policies of |measured / predicted - 1|, speeds relative to the first policy's.

    Args:
        profile: measured, decisions included.
        played: replayed rounds by policy; the first one is plain decoding.
        prompt_tokens: [S] of the texts.
        rates: measured tokens per second by policy.
    """
    assert any(key.what == VERIFY for key in profile.measurements.series)
    table = {}
    for name, variant in variants(profile).items():
        costs = [variant(rounds) for rounds in played]
        seconds = np.array(
            [
                float(rounds.of_texts(one, prompt_tokens).sum()) + more
                for rounds, (one, more) in zip(played, costs, strict=True)
            ]
        )
        missed = np.array(rates) / rates[0] * seconds / seconds[0] - 1.0
        table[name] = float(np.abs(missed[1:]).mean())
    for name, missed in table.items():
        print(f"      {name:<45} {missed:.1%} ({100 * (missed - table['as they are']):+.1f} points)")
    return table
