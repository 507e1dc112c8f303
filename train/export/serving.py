"""What a batch of a serving engine costs, and what fixed lengths are worth there: the basis of every exported table.

An engine runs b requests side by side, all of one draft length. Its step is modelled as a profile: the share of one request
in a step of b. So whatever is priced by a profile is priced for a batch. Where the profile has batches, these are replayed
instead (`by_batch`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ...policies.costs import CostTable, Points, along
from ...policies.errors import InputError, TraceError
from ...policies.profile import Profile
from ..heads.rows import split_prompts
from ..replay.traces.arrays import TraceArrays
from ..replay.traces.checking import require_disjoint

HELD_OUT = 0.25
FEWEST_PROMPTS = 8
"""Below that many prompts a split would leave a handful: choice and figures then share all of them."""

_ALWAYS = (
    "What runs outside the models is paid once a step for the whole batch; reading prompts, once by each request.",
    "Steps cost what they cost in the loop of specstop that the profile was measured through. The engine's kernels, "
    "graphs and scheduler are others: ratios carry over better than rates.",
    "A length or rule that the held-out prompts put clearly below plain decoding, or below a fixed length, was not taken: "
    "that much of the choice is theirs.",
)
"""Of every figure by batch size."""

ASSUMPTIONS = (
    "Weights are read once a step for the whole batch, each request's cache once for itself: what a profile shows to grow "
    "with the context is multiplied by the batch, the rest is a function of the rows of the forward pass alone.",
    "The seconds of a forward pass of R rows lie on the line through the profile's measured ones; beyond the most rows "
    "measured they go on as they rise over all of them. Beyond a device's limit large batches cost more than this.",
    "A draft pass grows with its rows in proportion to the target's.",
    *_ALWAYS,
    "Batches were not replayed: the rounds are those of single requests in a batch that is always full. With batches in the "
    "profile (`specstop profile --batch 1,2,4,8`) they are, with their refills and their last requests.",
)
"""The same, where batches were not measured."""


@dataclass(frozen=True)
class Sides:
    """Traces to choose on, and to say figures on.

    Attributes:
        fit, held: the same prompts are never on both, unless `note` says that there were too few to split.
        note: how they were split.
        is_part: both are of the same traces.
    """

    fit: TraceArrays
    held: TraceArrays
    note: str
    is_part: bool = True


def split_sides(arrays: TraceArrays, profile: Profile, held_out: TraceArrays | None = None, seed: int = 0) -> Sides:
    """Return the traces to choose on and those to say figures on; without `held_out`, a quarter of the prompts.

    Raises:
        TraceError: the traces are not dense ones of chains, or both share prompts.
        InputError: the profile ends before depth 1.
    """
    for option, side in (("--traces", arrays), ("--held-out", held_out)):
        if side is None:
            continue
        if not side.tree.is_chain:
            raise TraceError(
                f"{option}: expected traces of chains, not of the tree {side.tree.name}; engines draft chains"
            )
        if not side.header.has_every_anchor:
            raise TraceError(f"{option}: expected dense traces, in which every length can be replayed; collect them so")
    if profile.max_depth < 1:
        raise InputError("--profile: it ends at depth 0; measure it deeper")
    prompts = len(set(arrays.clusters))
    if held_out is not None:
        require_disjoint("--held-out", held_out, "--traces", arrays.clusters)
        if held_out.depth < arrays.depth:
            raise TraceError(
                f"--held-out: recorded to depth {held_out.depth}, but --traces to {arrays.depth}; collect both alike"
            )
        count = len(set(held_out.clusters))
        return Sides(arrays, held_out, f"{count} other prompts; the choice was made on {prompts}", is_part=False)
    if prompts < FEWEST_PROMPTS:
        note = f"all {prompts} prompts, which the choice was made on as well: too few to hold some out"
        return Sides(arrays, arrays, note)
    fit, held = (arrays.subset(side) for side in split_prompts(arrays, HELD_OUT, seed))
    counts = [len(set(side.clusters)) for side in (fit, held)]
    return Sides(fit, held, f"{counts[1]} held-out prompts; the choice was made on the other {counts[0]}")


def measured_rows(profile: Profile) -> int:
    """Return the most rows of a target's forward pass that the profile has timed."""
    if profile.batch is not None:
        return max(points[-1][0] for points in profile.batch.low.verify_s.values())
    trees = [n for n, _ in (*profile.low.tree_verify_s, *profile.high.tree_verify_s)]
    return max(profile.max_depth, *trees) + 1 if trees else profile.max_depth + 1


def assumptions(profile: Profile) -> tuple[str, ...]:
    """Return what every figure by batch size rests on."""
    if profile.batch is None:
        return ASSUMPTIONS
    sizes = ", ".join(map(str, profile.batch.sizes))
    return (
        f"Draft steps and verifications of {sizes} requests side by side were measured; {_BEYOND}",
        *_ALWAYS,
    )


_BEYOND = "between these sizes costs are linear, beyond the last one they go on as they rise with the tokens."


def batch_profile(profile: Profile, batch: int) -> Profile:
    """Return what one request has to pay of each step in a batch of `batch`; see `ASSUMPTIONS`. Of 1: the profile itself."""
    if batch < 1:
        raise InputError(f"batch: expected 1 or more requests, not {batch}")
    if batch == 1:
        return profile
    if profile.batch is not None:
        return _measured_share(profile, batch)
    tables = (profile.low, profile.high)
    span = profile.high.context - profile.low.context
    filled = profile.padded()

    def parts(low: float, high: float) -> tuple[float, float]:
        """Return (seconds without any context, seconds per token of it)."""
        # Noise may make the longer context the cheaper one.
        slope = max((high - low) / span, 0.0) if span else 0.0
        return low - slope * profile.low.context, slope

    # A verification of n tokens is filled up to a clearly cheaper size, as in the loop.
    verify = [parts(*(table.verify_s[n] for table in tables)) for n in filled]
    points = [(n + 1, fixed) for n, (fixed, _) in enumerate(verify)]
    wide = dict(profile.low.tree_verify_s), dict(profile.high.tree_verify_s)
    beyond = sorted(n for n in wide[0] if n in wide[1] and n > profile.max_depth)
    weights = (*points, *((n + 1, parts(wide[0][n], wide[1][n])[0]) for n in beyond))
    growth = _draft_growth(weights, batch)

    def scaled(table: CostTable) -> CostTable:
        shares = [
            # All requests' rows share the pass over the weights; each reads its own cache.
            _risen(weights, batch * (n + 1), n + 1, fixed) / batch + slope * table.context
            for n, (fixed, slope) in enumerate(verify)
        ]

        def draft(low: float, high: float) -> float:
            fixed, slope = parts(low, high)
            return fixed * growth / batch + slope * table.context

        one = draft(*(t.draft_s[0] for t in tables))
        further = table.draft_s[1] - table.draft_s[0]
        later = draft(*(t.later_s for t in tables))
        return CostTable(table.context, (one, one + further), table.draft_token_s, tuple(shares), later)

    return dataclasses.replace(
        profile,
        low=scaled(profile.low),
        high=scaled(profile.high),
        step_s=profile.step_s / batch,
        round_s=profile.round_s / batch,
        tree_outside_s=None,  # engines draft chains
    )


def _measured_share(profile: Profile, batch: int) -> Profile:
    """Return a share of rounds in which every request of the batch drafts as deep, by what batches cost."""

    def share(context: float) -> CostTable:
        tokens = batch * (np.arange(profile.max_depth + 1) + 1)  # [K + 1] of all requests, anchors included
        first, later = (float(of(batch, context)) / batch for of in (profile.first_draft_s, profile.draft_s))
        verify = profile.verify_s(batch, tokens, context) / batch
        return CostTable(context, (first, first), 0.0, tuple(verify.tolist()), later)

    low, high = (share(table.context) for table in (profile.low, profile.high))
    # Seconds outside the models are in those of batches already.
    return dataclasses.replace(profile, low=low, high=high, step_s=0.0, round_s=0.0, tree_outside_s=None)


def _risen(points: Points, rows: int, known: int, seconds: float) -> float:
    """Return the seconds of `rows` where those of `known` rows are `seconds`, by the rise of a curve; at least `seconds`."""
    before, after = along(points, (known, rows))
    return max(seconds + float(after - before), seconds)


def _draft_growth(weights: Points, batch: int) -> float:
    """Return how much longer a draft pass of `batch` rows takes than one of a single row: as the target's."""
    one, many = along(weights, (1, batch))
    return max(float(many / one), 1.0) if one > 0 else 1.0


def is_extrapolated(profile: Profile, batch: int, rows: int) -> bool:
    """Whether a batch, or the rows of its forward passes, are beyond what the profile has timed."""
    return rows > measured_rows(profile) or (profile.batch is not None and batch > profile.batch.sizes[-1])


def measured_text(profile: Profile) -> str:
    """Return beyond what figures are extrapolated, as the heading of a column."""
    return f"beyond {measured_rows(profile)} rows" if profile.batch is None else f"beyond {profile.batch.sizes[-1]}"
