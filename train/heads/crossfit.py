"""Heads fitted fold by fold, so that every prompt has outputs of a head that never saw it: what calibration is fitted on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...collect.schema import NO_TOKEN
from ...policies.contract import Array, StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import TraceError
from ...policies.files import digest
from ...policies.heads.base import Head
from ...policies.learned import Calibrator, SurvivalMaps
from ...policies.profile import Profile
from ..replay.run import replay
from ..replay.traces.arrays import TraceArrays, seen_features
from ..replay.traces.hidden_states import seen_states
from .calibration.logits import fit_calibrator, fit_kind
from .calibration.survival import Products, fit_survival, unchanged_survival
from .fitting import FitOptions, FitTask, fitter
from .head_specs import head_spec
from .mixing import mixed_rows
from .rows import FitRows, Visits, fit_rows, known_chances, ranked_prompts, visits

FOLDS = 4
PARTS = 8
"""Parts of the prompts that calibration is cross-fitted over; they need no head of their own."""

SCORED = 1 << 14
"""Rounds at once whose hidden states are read, in single precision."""


@dataclass(frozen=True)
class Folds:
    """Prompts in parts.

    Attributes:
        of: [S] the fold of each sequence; all texts of a prompt are in one.
        count: how many there are.
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
    # Cut by rank, so that folds differ by one prompt at most, however few there are.
    place = {name: at * count // len(names) for at, name in enumerate(names)}
    return Folds(torch.tensor([place[name] for name in arrays.clusters]), count)


@dataclass(frozen=True)
class FoldHeads:
    """A head for each fold, fitted on the other folds and stopped early on its own; `files` are those of the first.

    Where only the first fold was asked for, only its prompts have held-out outputs.
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
    kind: str,
    *,
    seed: int = 0,
    options: FitOptions | None = None,
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
        kind: of head, see `fitting.FITTERS`.
        seed: of the fits.
        options: see `FitOptions`.
        every: a head for each fold; else for the first only.
        progress: see `Progress`.
        mixed: a trace of `collect --mix` whose rows heads are fitted on instead; early stopping looks at the held-out fold.

    Raises:
        TraceError: no row has a label.
    """
    owner = folds.of_rows(arrays, visited)
    # Looked up once: each fold's rows serve all the other folds' heads.
    parts = [
        fit_rows(arrays, names, visited.part(owner == fold), tuple(arrays.hidden), head_spec(kind).lag)
        for fold in range(folds.count)
    ]
    options = options or FitOptions()
    heads: list[Head] = []
    files: dict[str, bytes] = {}
    total = folds.count if every else 1
    for fold in range(total):
        progress(f"train {kind}", fold, total)
        rows, held = join_rows([part for at, part in enumerate(parts) if at != fold]), parts[fold]
        if mixed is not None:
            # A prompt may be in both traces: what is held out here must not be fitted on there.
            mine = {arrays.clusters[sequence] for sequence in folds.sequences(fold)}
            rows = mixed_rows(mixed, mine, names, head_spec(kind).lag)
        if len(rows) == 0 or not bool(rows.drawn.any()) or len(held) == 0:
            raise TraceError("--traces: no row has a label; collect more prompts or longer texts")
        own, told = options.below(f"fold-{fold}"), progress if total == 1 else silent
        head, extra = fitter(kind)(FitTask(rows, held, names, seed, told, own, fit_of(arrays, folds, fold, mixed)))
        heads.append(head)
        files = files or extra
    progress(f"train {kind}", total, total)
    return FoldHeads(tuple(heads), folds, files, sum(map(len, parts)) - len(parts[0]))


def fit_of(arrays: TraceArrays, folds: Folds, fold: int, mixed: TraceArrays | None = None) -> dict[str, str]:
    """Return what the fit of a fold is of: a head that goes on from another one's weights may know the prompts held out."""
    held = sorted({arrays.clusters[sequence] for sequence in folds.sequences(fold)})
    traces = [
        [one.header.to_json(), one.clusters, int(one.text_tokens.sum())] for one in (arrays, mixed) if one is not None
    ]
    return {"traces": digest({"of": traces})[:16], "prompts held out": digest({"of": held})[:16]}


def join_rows(parts: Sequence[FitRows]) -> FitRows:
    """Return the rows of all parts below each other."""
    values = {f.name: [getattr(part, f.name) for part in parts] for f in dataclasses.fields(FitRows)}
    return FitRows(**{name: _stacked(column) for name, column in values.items()})


def _stacked(column: Sequence[Any]) -> Any:
    if isinstance(column[0], Tensor):
        return torch.cat(list(column))
    if isinstance(column[0], dict):
        return {name: torch.cat([part[name] for part in column]) for name in column[0]}
    return column[0]


@dataclass(frozen=True)
class Outputs:
    """What heads say of R visited rounds that they were not fitted on.

    Attributes:
        logits: [R, K + 1, 2] float64, accept and next at depths 0..K, nodes after a rejection included.
        length: [R] accepted length.
        fold: [R], the part of the prompts, for cross-fitting what is fitted on these outputs.
        temperature: [R].
        lag: depths whose `accept` is not scored (`Head.lag`).
        chances: [R, K + 1, 2] of acceptance, where they are known (`rows.known_chances`).
        there: [R, K] whether x_1..x_K were drawn: a drafter may know no token. None = all of them.
    """

    logits: Array
    length: Array
    fold: Array
    temperature: Array
    lag: int = 0
    chances: Array | None = None
    there: Array | None = None

    @property
    def drawn(self) -> Array:
        """[R, K] bool, whether x_1..x_K were drawn."""
        shape = len(self.length), self.logits.shape[1] - 1
        return np.ones(shape, dtype=bool) if self.there is None else self.there

    @property
    def soft(self) -> Array | None:
        """The chances as labels; None where they are not known, or of tokens that the head is behind of."""
        return None if self.lag else self.chances


def held_out_outputs(fitted: FoldHeads, arrays: TraceArrays, names: Sequence[str], visited: Visits) -> Outputs:
    """Return the outputs of each fold's head on the rounds of that fold."""
    owner = fitted.folds.of_rows(arrays, visited)
    use = owner < len(fitted.heads)
    visited, owner = Visits(visited.row[use], visited.history[use]), owner[use]
    # At every depth, also after a rejection: a live policy does not know of it, and survival is fitted on all.
    logits = np.zeros((len(owner), arrays.depth + 1, 2))
    for fold, head in enumerate(fitted.heads):
        mine = owner == fold
        row, place = visited.row[mine], mine.nonzero()[:, 0].numpy()
        seen = seen_features(arrays, names, row, visited.history[mine]).numpy()
        for depth, part in itertools.product(range(seen.shape[1]), torch.arange(len(row)).split(SCORED)):
            nodes = torch.tensor([depth - 1]) if depth else None
            states = {name: seen_states(arrays.hidden_state(name), row[part], nodes)[:, 0] for name in head.sizes}
            logits[place[part], depth] = head.scores(np.ascontiguousarray(seen[part, depth]), depth, states)
    # Parts of their own: where one head was fitted, all outputs are of one fold.
    numbers = {name: at for at, name in enumerate(sorted(set(arrays.clusters)))}
    parts = Folds(torch.tensor([numbers[name] % PARTS for name in arrays.clusters]), PARTS)
    length, temperature = arrays.accepted[visited.row], arrays.column("temperature")[visited.row]
    part = parts.of_rows(arrays, visited)
    chances = known_chances(arrays, visited)
    return Outputs(
        logits, length.numpy(), part.numpy(), temperature.numpy(), fitted.heads[0].lag,
        None if chances is None else chances.numpy(), (arrays.tokens[visited.row] != NO_TOKEN).numpy(),
    )  # fmt: skip


def own_visits(arrays: TraceArrays, folds: Folds, drafts: Sequence[StopPolicy], profile: Profile) -> Visits:
    """Return the rounds that policies play on prompts left out of their fit.

    A head knows the prompts that it was fitted on: it stops there where drafts fail, as it will not on new ones.

    Args:
        arrays: traces.
        folds: of its prompts.
        drafts: a policy for each fold, its head fitted on the others; where there are fewer, the first plays the rest.
        profile: what rounds cost.
    """
    parts = []
    for fold in range(folds.count):
        sequences = folds.sequences(fold)
        played = replay(arrays.subset(sequences), drafts[fold if fold < len(drafts) else 0], profile)
        log = played.log.clone()
        log[:, 0] = torch.tensor(sequences)[log[:, 0]]  # from numbers within the fold to those of the trace
        parts.append(dataclasses.replace(played, log=log))
    return visits(arrays, parts)


@dataclass(frozen=True)
class Calibrated:
    """Calibrators of both outputs, survival tables, and the kinds of map that were chosen."""

    accept: Calibrator
    next: Calibrator
    survival: SurvivalMaps
    kinds: dict[str, str]

    @property
    def tables(self) -> SurvivalMaps | None:
        """The survival tables; None if they change nothing."""
        tables = self.survival.tables
        return None if np.array_equal(tables[:, :, 0], tables[:, :, 1]) else self.survival


@dataclass(frozen=True)
class Labelled:
    """The rows [M] of one output that have a label.

    Attributes:
        name: "accept" or "next".
        use: [R, K + 1] bool, the rows among all rounds and depths.
        logits, labels: [M].
        targets: [M] labels to fit: chances if they are known, else `labels`.
    """

    name: str
    use: Array
    logits: Array
    labels: Array
    targets: Array


def labelled_rows(outputs: Outputs) -> list[Labelled]:
    """Return the rows of both outputs that have a label.

    `accept` at depth j is about x_{j - lag}, given that all tokens before it were accepted; `next` about x_{j + 1}, given
    that x_1..x_j were.
    """
    logits, length = outputs.logits, outputs.length[:, None]
    depths = np.arange(logits.shape[1])[None]
    drawn = (length >= depths - outputs.lag - 1) & (depths > outputs.lag)
    drawn[:, 1:] &= outputs.drawn
    known = (length >= depths) & (depths < logits.shape[1] - 1)
    rows = []
    parts = (("accept", 0, length >= depths - outputs.lag, drawn), ("next", 1, length > depths, known))
    for name, column, truth, use in parts:
        labels = truth[use]
        # Chances lower the variance of a fit; figures are computed from outcomes.
        targets = labels if outputs.soft is None else outputs.soft[..., column][use]
        rows.append(Labelled(name, use, logits[..., column][use], labels, targets))
    return rows


def calibrate(outputs: Outputs, as_they_are: bool = False) -> Calibrated:
    """Fit both calibrators and the survival tables.

    Args:
        outputs: of heads on rounds of prompts that they were not fitted on.
        as_they_are: keep probabilities and products as the head gives them.
    """
    rows = labelled_rows(outputs)
    fold = np.broadcast_to(outputs.fold[:, None], outputs.logits.shape[:2])
    maps = [Calibrator() if as_they_are else fit_calibrator(one.logits, one.targets, fold[one.use]) for one in rows]
    kinds = {f"{one.name}_calibration": made.kind for one, made in zip(rows, maps, strict=True)}
    if as_they_are:
        fitted = unchanged_survival(outputs.logits.shape[1] - 1)
    else:
        accept = _cross_fitted(maps[0], outputs, rows[0].use)
        fitted = fit_survival(Products(accept, outputs.length, outputs.fold, outputs.drawn))
    return Calibrated(maps[0], maps[1], fitted.maps, kinds | {"survival_maps": ", ".join(fitted.kinds)})


def _cross_fitted(calibrator: Calibrator, outputs: Outputs, drawn: Array) -> Array:
    """Return [R, K], `accept` of every depth under calibrators of that kind, fitted on the other folds."""
    logits = outputs.logits[:, 1:, 0]
    out, use = np.ones(logits.shape), drawn[:, 1:]
    labels = outputs.length[:, None] >= np.arange(1, outputs.logits.shape[1])[None] - outputs.lag
    if outputs.soft is not None:
        labels = outputs.soft[:, 1:, 0]
    for mine, others in _sides(outputs.fold):
        rest = others[:, None] & use
        # Fitted on rows that `accept` is conditional on, and used at all depths, as live.
        out[mine] = fit_kind(calibrator.kind, logits[rest], labels[rest])(logits[mine])
    out[:, : outputs.lag] = 1.0  # nothing is scored there: `kernels.heads.decide`
    return out


def _sides(fold: Array) -> Iterator[tuple[Array, Array]]:
    """Yield which rows are of each fold, and which of the others; a fold that is alone is both."""
    for one in np.unique(fold):
        mine = fold == one
        yield mine, mine if mine.all() else ~mine
