"""`train --rule continuation`: traces in, a policy whose head says what drafting on is worth."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....policies.display import Progress, silent
from ....policies.errors import InputError
from ....policies.heads.base import Head
from ....policies.learned import Calibrator, ContinuationPolicy, head_names, remembered
from ....policies.profile import Profile
from ....policies.rules import Continuation
from ...heads.continuation import VALUE_FITTERS
from ...heads.crossfit import prompt_folds
from ...replay.bounds.cost_to_go import CostToGo
from ...replay.run import replay
from ...replay.traces.arrays import TraceArrays, seen_features
from ..policy_iteration import MOST_ROUNDS, Iteration
from .values import FOLDS, LATEST, UNVISITED, asked_rows, backward, value_rows

MARGINS = (-0.05, 0.0, 0.05)
"""Tokens that drafting on must be expected to save, tried around none."""


@dataclass(frozen=True)
class Chosen:
    """First decision, deepest draft and margin that replay fastest with given values."""

    first: int
    deepest: int
    margin: float


def fit_continuation(
    arrays: TraceArrays,
    profile: Profile,
    names: Sequence[str],
    kind: str,
    *,
    name: str,
    seed: int = 0,
    rounds: int = MOST_ROUNDS,
    margins: Sequence[float] = MARGINS,
    progress: Progress = silent,
) -> Iteration:
    """Fit a continuation policy, replay it, and fit it again on what it visits.

    Args:
        arrays: training traces; heads are stopped early, and the best round chosen, on a fold of their prompts.
        profile: what rounds and this policy's decisions cost.
        names: features of the head; with `depth` one head serves all depths.
        kind: of head, see `VALUE_FITTERS`.
        name: of the policy.
        seed: of folds and fits.
        rounds: most fits.
        margins: tokens that must be expected to be saved; the fastest is taken.
        progress: see `Progress`.

    Raises:
        InputError: no head of that kind has a value.
        TraceError: the traces are not dense ones of chains.
    """
    if kind not in VALUE_FITTERS:
        raise InputError(f"--head: rule continuation has heads {', '.join(VALUE_FITTERS)}, not {kind}")
    costs, folds = CostToGo(arrays, profile), prompt_folds(arrays, FOLDS, seed)
    price = profile.decision(name.partition(":")[0])
    every = torch.arange(len(costs.bound))
    inner, held = folds.of[costs.arrays.owner], arrays.subset(folds.sequences(0))
    select = CostToGo(held, profile)  # prompts that the head is not fitted on
    # The head reads the features of the depth before too.
    columns, places = head_names(names, Continuation(remembers=True)), remembered(names)

    length, played = costs.fixed()
    value, iteration = costs.value(torch.full_like(costs.bound, length)), Iteration()
    for number in range(max(rounds, 1)):
        progress("fit, replay, fit again", number, rounds)
        seen = seen_features(arrays, names, every, played.history)
        weight = played.visits.float().clamp_min(UNVISITED)
        stages = backward(costs, with_memory(seen, places, 0), folds, weight, value, price, seed)
        seen = with_memory(seen, places, stages.first)
        rows = value_rows(stages, costs, seen, played.visits)
        fold = inner[asked_rows(costs, stages.first)[0]]
        head = VALUE_FITTERS[kind](rows.part(fold != 0), rows.part(fold == 0), columns, seed)
        firsts = (stages.first,) if places else range(LATEST + 1)  # what is remembered depends on it
        gains = values(head, seen)
        chosen = choose(select, gains[inner == 0], price, margins, firsts)
        lengths, asked = rounds_of(costs, gains, chosen.first, chosen.deepest, chosen.margin)
        rule = Continuation(chosen.margin, chosen.first, remembers=True)
        policy = ContinuationPolicy(name, names, head, Calibrator(), Calibrator(), rule, chosen.deepest)
        decided_s = price * asked.numpy()
        before, played = played, costs.play(lengths, decided_s)
        iteration.add(policy, replay(held, policy, profile).rate, before.visits, played.visits)
        if iteration.is_over:
            break
        value = costs.value(lengths, decided_s)
    progress("fit, replay, fit again", rounds, rounds)
    return iteration


def with_memory(seen: Tensor, places: Sequence[int], first: int) -> Tensor:
    """Return [N, K + 1, F + M], `seen` and after it the columns at `places` of the depth before; 0 up to depth `first`."""
    if not places:
        return seen
    before = torch.nn.functional.pad(seen[:, :-1, list(places)], (0, 0, 1, 0))  # row j shows depth j - 1
    # At its first decision a policy has been shown no depth before; see `ContinuationPolicy`.
    before[:, : first + 1] = 0.0
    return torch.cat([seen, before], -1)


def values(head: Head, seen: Tensor) -> Tensor:
    """Return [N, K] float64, what a head expects drafting on to save, in tokens, from [N, K + 1, F]."""
    found = [head.scores(np.ascontiguousarray(seen[:, j].numpy()), j)[:, 1] for j in range(seen.shape[1] - 1)]
    return torch.from_numpy(np.stack(found, 1))


def choose(costs: CostToGo, value: Tensor, price: float, margins: Sequence[float], firsts: Sequence[int]) -> Chosen:
    """Return the settings of the rule that decode the traces fastest.

    Where the first decision comes and how deep the deepest draft is decide how many decisions are paid for.
    """
    depths = sorted({*range(4, costs.depth, 2), costs.depth})
    # The text is given, so that the least seconds are the highest rate.
    best: tuple[float, Chosen] | None = None
    for first, deepest, margin in itertools.product(firsts, depths, margins):
        if first >= deepest:
            continue
        lengths, asked = rounds_of(costs, value, first, deepest, margin)
        seconds = float(costs.play(lengths, price * asked.numpy()).seconds.sum())
        if best is None or seconds < best[0]:
            best = seconds, Chosen(first, deepest, margin)
    assert best is not None
    return best[1]


def rounds_of(costs: CostToGo, value: Tensor, first: int, deepest: int, margin: float) -> tuple[Tensor, Tensor]:
    """Return [N] lengths and [N] decisions of rounds that draft on while `value` is above `margin`."""
    bound = costs.bound.clamp(max=deepest)
    going = torch.ones_like(bound, dtype=torch.bool)
    length, asked = torch.zeros_like(bound), torch.zeros_like(bound)
    # As `ContinuationPolicy` under `play_round`, for all anchors at once: asked from `first` on, not at `deepest` any more.
    for j in range(deepest):
        going = going & (bound > j)
        if j >= first:
            asked += going
            going = going & (value[:, j] > margin)
        length += going
    return length, asked
