"""Heads fitted fold by fold, so that every prompt has outputs of a head that never saw it; calibration is fitted on these."""

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
from ...policies.contract import Array, StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import TraceError
from ...policies.heads.base import Head
from ...policies.learned import Calibrator, SurvivalMaps
from ...policies.profile import Profile
from ..replay.arrays import TraceArrays, seen_features
from ..replay.columns import seen_states
from ..replay.run import replay
from .base import HeadEstimator
from .calibration import fit_calibrator, fit_survival
from .rows import FitRows, Visits, fit_rows, join_rows, known_chances, mixed_rows, ranked_prompts, visits

FOLDS = 4

_SCORE_ROUNDS = 1 << 14  # rounds whose hidden states are in memory at a time, in float32


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
        return self.of[torch.searchsorted(arrays.offset, visited.row, right=True) - 1]


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
    """A head for each fold, fitted on the other folds and stopped early on its own; `files` and `rows` are of the first one.

    If only the first fold has a head, only its prompts have held-out outputs.
    """

    heads: tuple[Head, ...]
    folds: Folds
    files: dict[str, bytes]
    rows: int


def fit_folds(
    arrays: TraceArrays,
    folds: Folds,
    names: Sequence[str],
    visited: Visits,
    head: HeadEstimator,
    *,
    seed: int = 0,
    every: bool = True,
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
        every: fit a head for each fold; else for the first only.
        progress: see `Progress`.
        mixed: a trace of `collect --mix` whose rows the heads are fitted on; early stopping uses the held-out fold.

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
    total = folds.count if every else 1
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
    return FoldHeads(heads, folds, fitted[0].files_, sum(map(len, parts)) - len(parts[0]))


def fit_head(
    head: HeadEstimator,
    rows: FitRows,
    stop_rows: FitRows,
    names: Sequence[str],
    seed: int = 0,
    progress: Progress = silent,
) -> HeadEstimator:
    """Return a fitted clone of an estimator; raise `TraceError` if no row has a label."""
    if len(rows) == 0 or not bool(rows.drawn.any()) or len(stop_rows) == 0:
        raise TraceError("--traces: no row has a label; collect more prompts or longer texts")
    fresh: HeadEstimator = clone(head).set_params(features=tuple(names), random_state=seed)
    return fresh.fit(rows, stop_rows=stop_rows, progress=progress)


@dataclass(frozen=True)
class Outputs:
    """Outputs of heads on R visited rounds that they were not fitted on.

    Attributes:
        logits: [R, K + 1, 2] float64, accept and next at depths 0..K, also after a rejection.
        length: [R] accepted length.
        group: [R], the number of the prompt, for choosing calibrators on prompts left out.
        temperature: [R].
        drawn: [R, K] whether x_1..x_K were drawn: a drafter may know no token.
        lag: `Head.lag`; the first `lag` depths of `accept` are not scored.
        chances: [R, K + 1, 2] of acceptance; None if they are unknown (`rows.known_chances`).
    """

    logits: Array
    length: Array
    group: Array
    temperature: Array
    drawn: Array
    lag: int = 0
    chances: Array | None = None


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
        seen = seen_features(arrays, names, row, visited.history[inside]).numpy()
        for depth, part in itertools.product(range(seen.shape[1]), torch.arange(len(row)).split(_SCORE_ROUNDS)):
            nodes = torch.tensor([depth - 1]) if depth else None
            states = {name: seen_states(arrays.hidden_state(name), row[part], nodes)[:, 0] for name in head.sizes}
            logits[place[part], depth] = head.scores(np.ascontiguousarray(seen[part, depth]), depth, states)
    prompt = np.unique(arrays.clusters, return_inverse=True)[1]
    chances = known_chances(arrays, visited)
    return Outputs(
        logits,
        arrays.accepted[visited.row].numpy(),
        prompt[arrays.owner[visited.row]],
        arrays.column("temperature")[visited.row].numpy(),
        (arrays.tokens[visited.row] != NO_TOKEN).numpy(),
        fitted.heads[0].lag,
        None if chances is None else chances.numpy(),
    )


def own_visits(arrays: TraceArrays, folds: Folds, drafts: Sequence[StopPolicy], profile: Profile) -> Visits:
    """Return the rounds that policies play on prompts left out of their fit.

    A head knows the prompts that it was fitted on: it stops there where drafts fail, as it does not on new ones.

    Args:
        arrays: traces.
        folds: of its prompts.
        drafts: a policy for each fold, its head fitted on the others; if there are fewer, the first one plays the rest.
        profile: what rounds cost.
    """
    parts = []
    for fold in range(folds.count):
        sequences = folds.sequences(fold)
        played = replay(arrays.subset(sequences), drafts[fold if fold < len(drafts) else 0], profile)
        # From numbers within the fold to those of the trace.
        parts.append(dataclasses.replace(played, sequence=torch.tensor(sequences)[played.sequence]))
    return visits(arrays, parts)


@dataclass(frozen=True)
class Calibrated:
    """Calibrators of both outputs, survival tables (None if they change nothing), and the kinds of map chosen."""

    accept: Calibrator
    next: Calibrator
    survival: SurvivalMaps | None
    kinds: dict[str, str]


@dataclass(frozen=True)
class Labelled:
    """The rows [M] of one output that have a label.

    Attributes:
        name: "accept" or "next".
        use: [R, K + 1] bool, the rows among all rounds and depths.
        logits, labels: [M].
        targets: [M] labels to fit: chances if they are known, else `labels`. Chances lower the variance of a fit.
    """

    name: str
    use: Array
    logits: Array
    labels: Array
    targets: Array


def labelled_rows(outputs: Outputs) -> tuple[Labelled, Labelled]:
    """Return the rows of both outputs that have a label.

    `accept` at depth j refers to x_{j - lag}, given that all tokens before it were accepted; `next` to x_{j + 1}, given that
    x_1..x_j were.
    """
    length, lag = outputs.length[:, None], outputs.lag
    depths = np.arange(outputs.logits.shape[1])[None]
    accept_use = (length >= depths - lag - 1) & (depths > lag)
    accept_use[:, 1:] &= outputs.drawn
    next_use = (length >= depths) & (depths < outputs.logits.shape[1] - 1)

    def labelled(name: str, column: int, truth: Array, use: Array) -> Labelled:
        is_known = outputs.chances is not None and not lag
        targets = outputs.chances[..., column] if is_known else truth  # type: ignore[index]
        return Labelled(name, use, outputs.logits[use, column], truth[use], targets[use])

    return (
        labelled("accept", 0, length >= depths - lag, accept_use),
        labelled("next", 1, length > depths, next_use),
    )


def calibrated_accept(calibrator: Calibrator, outputs: Outputs) -> Array:
    """Return [R, K], the probabilities of `accept` at depths 1..K; 1 where a head with lag scores nothing, as live."""
    accept = calibrator(outputs.logits[:, 1:, 0])
    accept[:, : outputs.lag] = 1.0
    return accept


def calibrate(outputs: Outputs, unchanged: bool = False) -> Calibrated:
    """Fit both calibrators and the survival tables.

    Args:
        outputs: of heads on rounds of prompts that they were not fitted on.
        unchanged: keep probabilities and products as the head returns them.
    """
    if unchanged:
        kinds = {"accept_calibration": "identity", "next_calibration": "identity"}
        return Calibrated(Calibrator(), Calibrator(), None, kinds)
    rows = labelled_rows(outputs)
    group = np.broadcast_to(outputs.group[:, None], outputs.logits.shape[:2])
    accept, next_ = (fit_calibrator(one.logits, one.targets, group[one.use]) for one in rows)
    maps, survival_kinds = fit_survival(
        calibrated_accept(accept, outputs), outputs.length, outputs.group, outputs.drawn
    )
    return Calibrated(
        accept,
        next_,
        None if np.array_equal(maps.tables[:, :, 0], maps.tables[:, :, 1]) else maps,
        {
            "accept_calibration": accept.kind,
            "next_calibration": next_.kind,
            "survival_maps": ", ".join(survival_kinds),
        },
    )
