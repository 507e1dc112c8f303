"""Whether two drafters at once are worth it, from a trace of each: chosen on some texts, replayed on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ....decode.benchmark import Ratio
from ....decode.drafters.spec import needs_draft, parse_spec, reads_states
from ....policies.contract import StopPolicy
from ....policies.display import Progress, silent
from ....policies.errors import InputError, TraceError
from ....policies.fixed import FixedLength
from ....policies.profile import Profile
from ...drafters.choice import SURES, SureChoice, TextRounds, both, choose_sure, everywhere, paired, play_texts
from ...fit.settle import settle_for
from ...replay.traces.arrays import TraceArrays
from ...replay.traces.checking import require_disjoint, require_disjoint_policies
from ...statistics import LEVEL, REPLICATES, Resamples, Values
from ..decision_costs import with_prices
from ..pricing import Draws
from ..whatif.records import unique_names

ALIKE = ("topology", "temperature", "shaping", "verification", "pair")
"""What texts to test on have in common with those to choose on."""

Both = tuple[TraceArrays, TraceArrays]
"""Dense traces of two drafters over the same texts."""


@dataclass(frozen=True)
class BothChoice:
    """What was chosen on some texts, and what it gives on others.

    Attributes:
        spec: for `--drafter`.
        policy: that ends its drafts, as it decides under the profile of the other drafter.
        policy_name: what it was called by.
        rate: tokens a second, replayed.
        alone: by drafter the same of each alone, under the policy that is best for it.
        over: `rate` over that of the better one.
        intervals: what the interval of `over` includes, in words.
        tried: by policy, what every chance gave on the texts that were chosen on.
    """

    spec: str
    policy: StopPolicy
    policy_name: str
    rate: float
    alone: dict[str, float]
    over: Ratio
    intervals: str
    tried: dict[str, SureChoice]


def choose_both(
    fit: Both,
    profiles: tuple[Profile, Profile],
    held: Both | None = None,
    policies: Sequence[StopPolicy] = (),
    sures: Sequence[float] = SURES,
    progress: Progress = silent,
) -> BothChoice:
    """Return which of two drafters to use, or both, with the policy and the chance that give the most tokens a second.

    Args:
        fit: the texts to choose on, as the two drafters saw them.
        profiles: of the two drafters, with the same target.
        held: other texts, to say what the choice gives; default: those of `fit`.
        policies: that are tried; default: every fixed length.
        sures: chances that are tried.
        progress: see `Progress`.

    Raises:
        TraceError: see `choose_sure`, or drafters or settings of `fit` and `held` differ.
        InputError: the first drafter is none that may be asked in every round, or two policies have one name.
    """
    names = [str(arrays.header.facts.get("drafter", "model")) for arrays in fit]
    if reads_states(names[0]) or needs_draft(names[0]) or len(parse_spec(names[0])) > 1:
        raise InputError(
            f"--first: expected traces of a drafter that reads neither hidden states nor a draft model, such as suffix, "
            f"not of {names[0]}"
        )
    fit = paired(*fit)
    tested = fit if held is None else paired(*_held(fit, held))
    if held is not None:
        require_disjoint_policies("--first-test, --other-test", tested[1], policies)
    depth = min(*(arrays.depth for arrays in fit), *(profile.max_depth for profile in profiles))
    called = unique_names(policies)
    mine, theirs = (
        with_prices(profile, policies, arrays.header)[0] for profile, arrays in zip(profiles, fit, strict=True)
    )
    # One policy ends the drafts of both, and the other drafter's are those that take time.
    asked = {
        name: settle_for(policy.limited(depth), fit[1], theirs)[0]
        for name, policy in zip(called, policies, strict=True)
    } or {f"fixed:{k}": FixedLength(k) for k in range(1, depth + 1)}
    tried: list[_Tried] = []
    for name, policy in asked.items():
        progress("two drafters", len(tried), len(asked))
        tried.append(_Tried(name, policy, choose_sure(*fit, policy, (mine, theirs), sures)))
    progress("two drafters", len(asked), len(asked))
    return _tested(tested, names, tried, (mine, theirs))


class _Tried(NamedTuple):
    """A policy, what it was called by, and what every chance gave under it."""

    name: str
    policy: StopPolicy
    found: SureChoice


def _tested(
    tested: Both,
    names: Sequence[str],
    tried: Sequence[_Tried],
    profiles: tuple[Profile, Profile],
) -> BothChoice:
    """Return what the fastest of the choices gives on other texts."""
    name, policy, found = max(tried, key=lambda one: max(one.found.rate, one.found.first))
    own = (
        max(tried, key=lambda one: one.found.first).policy,
        max(tried, key=lambda one: one.found.other).policy,
    )
    played = [
        play_texts(arrays, everywhere(arrays, side == 0), own[side], profiles) for side, arrays in enumerate(tested)
    ]
    rates = [rounds.rate(profiles) for rounds in played]
    side = int(found.fastest != "first")
    spec, chosen = names[side], played[side]
    if found.fastest == "both" and found.sure is not None:
        spec = f"{names[0]}{'&' if '?' in names[0] else '?'}sure={found.sure:g}+{names[1]}"
        chosen = play_texts(*both(*tested, found.sure), policy, profiles, True)
    is_same = profiles[0].fingerprint == profiles[1].fingerprint
    draws = Draws(profiles[0]), Draws(profiles[1], 0 if is_same else 1)
    samples, prices = Resamples(tested[1].clusters), _prices(draws, is_same)
    speed, *alone = (_speeds(samples, rounds, prices) for rounds in (chosen, *played))
    over = samples.interval(speed / np.max(alone, axis=0))  # the better one is chosen again in every resample
    return BothChoice(
        spec, policy, name, float(speed[0]), dict(zip(names, rates, strict=True)), over,
        _interval_text(names, draws, is_same), {one.name: one.found for one in tried},
    )  # fmt: skip


class _Price(NamedTuple):
    """Profiles of two drafters, and how much slower than that the machine was."""

    profiles: tuple[Profile, Profile]
    paces: tuple[float, float] = (1.0, 1.0)


def _prices(draws: tuple[Draws, Draws], is_same: bool) -> list[_Price]:
    """Return the profiles as measured, then draws: of one measurement together, of two measurements independent ones.

    The mean paces of two measurements have errors of their own, see `compare`.
    """
    count = max(len(one.drawn) for one in draws)
    noises = [None if is_same else one.profile.noise for one in draws]
    errors = [noise.pace_error if noise else 0.0 for noise in noises]
    paces = np.exp(errors * np.random.default_rng(2).standard_normal((count, 2)))
    drawn = zip(*(one.drawn or (one.profile,) * count for one in draws), strict=True)
    return [
        _Price((draws[0].profile, draws[1].profile)),
        *(_Price(pair, (mine, theirs)) for pair, (mine, theirs) in zip(drawn, paces.tolist(), strict=True)),
    ]


def _speeds(samples: Resamples, rounds: TextRounds, prices: Sequence[_Price]) -> Values:
    """Return [1 + R] tokens/s in the sample and in every resample of its prompts, each at one of the drawn prices."""
    spent = samples.total(torch.stack([rounds.seconds(*price) for price in prices], 1))
    tokens, rows = samples.total(rounds.tokens), np.arange(len(spent))
    # Row 0, the sample, has the prices as measured; resample i has draw (i - 1) mod D.
    columns = np.where(rows > 0, 1 + (rows - 1) % max(len(prices) - 1, 1), 0) if len(prices) > 1 else 0 * rows
    speeds: Values = tokens / spent[rows, columns]
    return speeds


def _interval_text(names: Sequence[str], draws: tuple[Draws, Draws], is_same: bool) -> str:
    """Return what the interval of a choice includes, and what it leaves out."""
    lacking = [name for name, one in zip(names, draws, strict=True) if not one.is_timed]
    over = f"{LEVEL:.0%} bootstrap over prompts and the timings of both profiles, {REPLICATES} replicates"
    if lacking:
        which = " and ".join(lacking)
        over += f"; the profile of {which} kept no repeated timings of model calls, so that their error is not included"
    return over if is_same else f"{over}; changes of the machine between the two profiles are not included"


def _held(fit: Both, held: Both) -> Both:
    """Return the traces that a choice is tested on, or raise `TraceError` where they are not of what it was made on."""
    for side, one, other in zip(("--first-test", "--other-test"), fit, held, strict=True):
        require_disjoint(side, other, "the traces to choose on", one.clusters)
        if differ := one.header.differing(other.header, ALIKE):
            raise TraceError(
                f"{side}: expected traces recorded as those to choose on, but these differ: {', '.join(differ)}"
            )
    return held
