"""Heads fitted fold by fold, so that every prompt has outputs of a head that was fitted without it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from ...collect.schema import NO_TOKEN
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import TraceError
from ...policies.heads.base import Head
from ...policies.profile import Profile
from ..replay.arrays import TraceArrays, policy_features
from ..replay.columns import policy_states
from ..replay.run import replay
from .base import HeadEstimator
from .calibration import Outputs
from .rows import FitRows, Visits, fit_rows, join_rows, mixed_rows, ranked_prompts, round_labels, visits

FOLDS = 4

_SCORE_ROUNDS = 1 << 14  # rounds with hidden states in memory at a time, in float32


@dataclass(frozen=True)
class Folds:
    """Prompts in parts.

    Attributes:
        of: [S] the fold of each sequence; all texts of a prompt are in the same one.
        count: number of folds.
    """

    of: Tensor
    count: int

    def sequences(self, fold: int, inside: bool = True) -> list[int]:
        """Return the sequences of a fold, or those of all others."""
        return [int(s) for s in ((self.of == fold) == inside).nonzero()[:, 0]]

    def of_rows(self, arrays: TraceArrays, visited: Visits) -> Tensor:
        """Return [R], the fold of each visited round."""
        return self.of[arrays.owner[visited.row]]


def prompt_folds(arrays: TraceArrays, count: int, seed: int) -> Folds:
    """Assign the prompts to folds by a hash of their text, so that all texts of a prompt are in one fold.

    Raises:
        TraceError: fewer than 3 prompts.
    """
    names = ranked_prompts(arrays, seed)
    count = min(count, len(names))
    # Cut by rank, so that the sizes of folds differ by at most one prompt.
    fold_of = {name: rank * count // len(names) for rank, name in enumerate(names)}
    return Folds(torch.tensor([fold_of[name] for name in arrays.clusters]), count)


@dataclass(frozen=True)
class FoldHeads:
    """A head for each fold, fitted on the other folds and stopped early on its own; `rows` are of the first one.

    If only the first fold has a head, only its prompts have held-out outputs.
    """

    heads: tuple[Head, ...]
    folds: Folds
    rows: int


def fit_folds(
    arrays: TraceArrays,
    folds: Folds,
    names: Sequence[str],
    visited: Visits,
    head: HeadEstimator,
    *,
    seed: int = 0,
    all_folds: bool = True,
    progress: Progress = silent,
    mixed: TraceArrays | None = None,
) -> FoldHeads:
    """Fit the heads.

    Args:
        arrays: traces, read with the hidden states that the heads are to read.
        folds: of its prompts.
        names: scalar features.
        visited: rounds to fit on.
        head: estimator, which is cloned.
        seed: of the fits.
        all_folds: fit a head for each fold; else for the first only.
        progress: see `Progress`.
        mixed: a trace of `collect --mix`: the heads are fitted on its rows; early stopping uses the held-out fold.

    Raises:
        TraceError: no row has a label.
    """
    owner = folds.of_rows(arrays, visited)
    # The rows of a fold are read once and serve the heads of all other folds.
    parts = [
        fit_rows(arrays, names, visited.part(owner == fold), tuple(arrays.hidden), head.lag, head.soft)
        for fold in range(folds.count)
    ]
    fitted: list[HeadEstimator] = []
    total = folds.count if all_folds else 1
    task = f"train {head.form}"
    for fold in range(total):
        progress(task, fold, total)
        rows, held = join_rows([part for at, part in enumerate(parts) if at != fold]), parts[fold]
        if mixed is not None:
            # A prompt may be in both traces. What is held out here must not be fitted on there.
            rows = mixed_rows(mixed, {arrays.clusters[s] for s in folds.sequences(fold)}, names, head.lag, head.soft)
        fitted.append(fit_head(head, rows, held, names, seed, progress if total == 1 else silent))
    progress(task, total, total)
    heads = tuple(one.export() for one in fitted)
    return FoldHeads(heads, folds, sum(map(len, parts)) - len(parts[0]))


def fit_head(
    head: HeadEstimator,
    rows: FitRows,
    stop_rows: FitRows,
    names: Sequence[str],
    seed: int = 0,
    progress: Progress = silent,
) -> HeadEstimator:
    """Return a fitted clone of an estimator; raise `TraceError` if no row has a label."""
    if not bool(rows.drawn.any()):
        raise TraceError("--traces: no row has a label; collect more prompts or longer texts")
    if not bool(stop_rows.drawn.any()):
        # The prompts of a small fold may have no drawn token, or only cut rounds. Their loss is undefined.
        stop_rows = rows
    fresh: HeadEstimator = clone(head).set_params(features=tuple(names), random_state=seed)
    return fresh.fit(rows, stop_rows=stop_rows, progress=progress)


def held_out_outputs(fitted: FoldHeads, arrays: TraceArrays, names: Sequence[str], visited: Visits) -> Outputs:
    """Return the outputs of each fold's head on the rounds of that fold."""
    owner = fitted.folds.of_rows(arrays, visited)
    use = owner < len(fitted.heads)
    visited, owner = visited.part(use), owner[use]
    # All depths, also after a rejection: a live policy does not know of it, and survival is fitted on all depths.
    logits = np.zeros((len(owner), arrays.depth + 1, 2))
    for fold, head in enumerate(fitted.heads):
        inside = owner == fold
        row, place = visited.row[inside], inside.nonzero()[:, 0].numpy()
        seen = policy_features(arrays, names, row, visited.history[inside]).numpy()
        for depth, part in itertools.product(range(seen.shape[1]), torch.arange(len(row)).split(_SCORE_ROUNDS)):
            nodes = torch.tensor([depth - 1]) if depth else None
            states = {name: policy_states(arrays.hidden_state(name), row[part], nodes)[:, 0] for name in head.sizes}
            logits[place[part], depth] = head.scores(np.ascontiguousarray(seen[part, depth]), depth, states)
    lag = fitted.heads[0].lag
    labels, has_label = round_labels(arrays, visited.row, lag=lag)
    prompt = np.unique(arrays.clusters, return_inverse=True)[1]
    return Outputs(
        logits,
        labels.numpy(),
        has_label.numpy(),
        arrays.accepted[visited.row].numpy(),
        prompt[arrays.owner[visited.row]],
        (arrays.tokens[visited.row] != NO_TOKEN).numpy(),
        lag,
    )


def on_policy_rounds(arrays: TraceArrays, folds: Folds, policies: Sequence[StopPolicy], profile: Profile) -> Visits:
    """Return the rounds that policies play on prompts left out of their fit.

    On the prompts that it was fitted on, a head stops before drafts fail more often than on new prompts.

    Args:
        arrays: traces.
        folds: of its prompts.
        policies: one for each fold, its head fitted on the others; if there are fewer, the first one plays the rest.
        profile: what rounds cost.
    """
    parts = []
    for fold in range(folds.count):
        sequences = folds.sequences(fold)
        rounds = replay(arrays.subset(sequences), policies[fold if fold < len(policies) else 0], profile)
        # From numbers within the fold to those of the trace.
        parts.append(dataclasses.replace(rounds, sequence=torch.tensor(sequences)[rounds.sequence]))
    return visits(arrays, parts)
