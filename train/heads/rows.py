"""Training rows of the two outputs: features at (anchor, depth) of a trace, and whether the tokens there were accepted."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...collect.schema import NO_TOKEN, Header
from ...collect.store import Trace
from ...policies.errors import TraceError
from ...policies.features import HISTORY_FEATURES
from ..replay.arrays import TraceArrays, check_compatible, policy_features, trace_arrays
from ..replay.columns import HiddenStates
from ..replay.rounds import Rounds

SOFT_COLUMNS = ("draft_prob", "target_prob")
"""Columns of `trace_arrays` (`extra`) that soft labels need."""

CHANCE_COLUMNS = ("accept_chance", "next_chance")
"""Columns with the exact chances of acceptance, in traces of completions."""

IS_DRAFT_SAMPLE = "mixed"
"""Column of a mixed trace: whether the last token that the draft had read was sampled from the draft."""

MIN_PROMPTS = 3

_BLOCK = 1 << 24  # numbers of hidden states that are read at a time


@dataclass(frozen=True)
class FitRows:
    """M rows (anchor, depth j), where x_1..x_{j-1} were accepted.

    Attributes:
        features: [M, F] float32.
        depth: [M] int64, 0..K.
        labels: [M, 2] float32 of the outputs `accept` (x_j is accepted) and `next` (x_{j+1} is accepted): 0, 1 or a chance.
        has_label: [M, 2] bool: `accept` from depth 1 on, `next` where x_j was accepted and j < K.
        hidden: [M, H] float16 hidden states by name.
    """

    features: Tensor
    depth: Tensor
    labels: Tensor
    has_label: Tensor
    hidden: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.depth)

    def subset(self, use: Tensor) -> FitRows:
        """Return the rows at indices, or where a mask [M] is true."""
        hidden = {name: states[use] for name, states in self.hidden.items()}
        return FitRows(self.features[use], self.depth[use], self.labels[use], self.has_label[use], hidden)

    @property
    def drawn(self) -> Tensor:
        """[M] bool, rows with a drawn token."""
        return self.depth > 0


def join_rows(parts: Sequence[FitRows]) -> FitRows:
    """Return the rows of all parts, one after the other."""
    columns = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("features", "depth", "labels", "has_label")
    }
    hidden = {name: torch.cat([part.hidden[name] for part in parts]) for name in parts[0].hidden}
    return FitRows(**columns, hidden=hidden)


@dataclass(frozen=True)
class Visits:
    """Rounds that policies played on a trace, without cut ones.

    Policies skip easy runs of tokens, so the anchors that they visit are harder than the average anchor. Heads are fitted on
    these anchors.

    Attributes:
        row: [R] of the anchor in the trace.
        history: [R, 4], the HISTORY features when the round began.
    """

    row: Tensor
    history: Tensor

    @classmethod
    def without_history(cls, row: Tensor) -> Visits:
        """Return one round at each of these anchors [R], all without earlier rounds."""
        return cls(row, torch.zeros(len(row), len(HISTORY_FEATURES)))

    def concatenate(self, other: Visits) -> Visits:
        """Return these rounds, followed by the other ones."""
        return Visits(torch.cat([self.row, other.row]), torch.cat([self.history, other.history]))

    def part(self, use: Tensor) -> Visits:
        """Return the rounds where `use` [R] is true."""
        return Visits(self.row[use], self.history[use])


def visits(arrays: TraceArrays, replays: Sequence[Rounds]) -> Visits:
    """Return the rounds of all `replays` of this trace."""
    sequence, anchor = (torch.cat([getattr(r, name) for r in replays]) for name in ("sequence", "anchor"))
    # Dense traces, which any policy can be replayed on, have a row for every anchor.
    row = arrays.offset[sequence] + anchor - arrays.first_anchor[sequence]
    return Visits(row, torch.cat([r.history for r in replays])).part(~arrays.cut[row])


def round_labels(arrays: TraceArrays, row: Tensor, soft: bool = False, lag: int = 0) -> tuple[Tensor, Tensor]:
    """Return (labels [R, K + 1, 2] float32, has_label [R, K + 1, 2] bool) of both outputs at depths 0..K of rounds.

    Labels are the exact chances of acceptance if the trace has them. Else they are 0 or 1. Labels exist up to the first
    rejection, because both outputs are conditional on an accepted path.

    Args:
        arrays: of chains.
        row: [R] of the anchors.
        soft: label `accept` with min(1, p/q), its chance under rejection, if the trace was read with `SOFT_COLUMNS`.
        lag: `accept` at depth j refers to x_{j - lag}, and its labels are 0 or 1.
    """
    depth, length = torch.arange(arrays.depth + 1), arrays.accepted[row][:, None]
    accept, following = length >= depth - lag, length > depth
    # Policies are not called for a token that the drafter does not know.
    has_token = pad(arrays.tokens[row] != NO_TOKEN, (1, 0))
    has_label = torch.stack(
        [(length >= depth - lag - 1) & (depth > lag) & has_token, (length >= depth) & (depth < arrays.depth)], -1
    )
    if not lag and set(CHANCE_COLUMNS) <= set(arrays.extra):
        drawn, undrawn = (arrays.extra[name][row].float() for name in CHANCE_COLUMNS)
        # `next_chance` of node j refers to x_j before it was drawn: the label of `next` at depth j - 1. No token is drawn
        # at depth 0, and none follows at depth K.
        return torch.stack([pad(drawn, (1, 0)), pad(undrawn, (0, 1))], -1), has_label
    if soft and set(SOFT_COLUMNS) <= set(arrays.extra):
        q, p = (arrays.extra[name][row].float() for name in SOFT_COLUMNS)
        # q is 0 at nodes that were not drawn. `where` computes both sides, so the division must not fail there.
        accept = pad(torch.where(q > 0, p / q.clamp_min(1e-30), 0.0).clamp(0.0, 1.0), (1, 0))
    return torch.stack([accept.float(), following.float()], -1), has_label


def fit_rows(
    arrays: TraceArrays,
    features: Sequence[str],
    visited: Visits,
    hidden: Sequence[str] = (),
    lag: int = 0,
    soft: bool = False,
) -> FitRows:
    """Return the training rows of the visited rounds: every depth up to the first rejection.

    Args:
        arrays: of chains.
        features: names.
        visited: the rounds.
        hidden: hidden states to add, float16 as they are recorded.
        lag: of the head (`Head.lag`): the row of x_j has the draft's hidden state of depth j + lag; rows without one are
            left out.
        soft: see `round_labels`.

    Raises:
        TraceError: a feature or a hidden state is not recorded.
    """
    seen = policy_features(arrays, features, visited.row, visited.history)
    labels, has_label = round_labels(arrays, visited.row, soft)
    depth = torch.arange(arrays.depth + 1).expand(len(seen), -1)
    use = has_label.any(-1) & (depth <= arrays.depth - lag)
    states = {name: _states(arrays.hidden_state(name), visited.row, use, lag) for name in hidden}
    return FitRows(seen[use], depth[use], labels[use], has_label[use], states)


def _states(recorded: HiddenStates, row: Tensor, use: Tensor, lag: int = 0) -> Tensor:
    """Return [M, H] float16, the hidden states of the rows and depths in `use` [R, K + 1]; 0 for the draft's at depth 0."""
    at, depth = use.nonzero(as_tuple=True)
    states = torch.zeros(len(at), recorded.width, dtype=torch.float16)
    recorded_rows = (depth > 0).nonzero()[:, 0] if recorded.of_nodes else torch.arange(len(at))
    # Recorded states may be on disk: they are read in blocks, so that only `states` is in memory as a whole.
    for part in recorded_rows.split(max(1, _BLOCK // recorded.width)):
        states[part] = recorded.at(row[at[part]], depth[part] - 1 + lag if recorded.of_nodes else None)
    return states


def label_columns(headers: Sequence[Header], soft: bool) -> tuple[str, ...]:
    """Return the columns that fitting needs of `trace_arrays` as `extra`; `soft`: the head's labels are min(1, p/q)."""
    chances = CHANCE_COLUMNS if all(header.given_text for header in headers) else ()
    return (*(SOFT_COLUMNS if soft else ()), *chances)


# Mixed texts (`collect --mix`)


def mixed_arrays(trace: Trace, reference: Trace, features: Sequence[str], hidden: Sequence[str]) -> TraceArrays:
    """Read a mixed trace to fit heads that are calibrated on another trace.

    Raises:
        TraceError: it is not mixed, of another pair, or lacks a feature or hidden state.
    """
    if not trace.header.mix:
        raise TraceError(f"--mixed: {trace.folder} is no mixed trace; collect one with --mix 0.15 --depth 1")
    check_compatible(
        reference.header, trace.header, str(reference.folder), str(trace.folder), ("pair", "vocabulary", "verification")
    )
    read = [name for name in features if name not in HISTORY_FEATURES]
    return trace_arrays(trace, read, (*SOFT_COLUMNS, IS_DRAFT_SAMPLE), hidden)


def mixed_rows(
    arrays: TraceArrays, without: Collection[str], features: Sequence[str], lag: int = 0, soft: bool = False
) -> FitRows:
    """Return the rows of a mixed trace, one for each position (SpecDec++, arXiv 2405.19715, token mixing).

    In a mixed text Z each token is the draft's sample Y_i with the chance `mix`, else the target's. A head without lag scores
    Y_i by the draft's state after Z_<i. SpecDec++'s head (lag 1) scores it by the state after Y_i, which exists only where
    Z_i is Y_i: other rows are left out.

    Args:
        arrays: read with the hidden states of the head.
        without: clusters of prompts that are held out.
        features: scalar features.
        lag, soft: of the head, see `fit_rows`.
    """
    use = torch.tensor([name not in without for name in arrays.clusters])
    owner = arrays.owner
    row = (use[owner] & ~arrays.cut).nonzero()[:, 0]
    if lag == 0:
        return fit_rows(arrays, features, Visits.without_history(row), tuple(arrays.hidden), soft=soft)
    if lag > 1 or features:
        raise TraceError(f"--mixed: expected a head of hidden states with lag 0 or 1, got lag {lag}")
    # The state after Y_i is in the row of the next position, which must be of the same text.
    row = row[row + 1 < len(owner)]
    row = row[(owner[row + 1] == owner[row]) & arrays.extra[IS_DRAFT_SAMPLE][row + 1].bool()]
    first = torch.zeros_like(row)
    stored = {name: arrays.hidden_state(name) for name in arrays.hidden}
    return FitRows(
        torch.zeros(len(row), 0),
        torch.ones_like(row),
        round_labels(arrays, row, soft)[0][:, 1],
        torch.tensor([True, False]).expand(len(row), 2),
        {name: states.at(row + 1, first if states.of_nodes else None) for name, states in stored.items()},
    )


# Prompts


def ranked_prompts(arrays: TraceArrays, seed: int, least: int = MIN_PROMPTS) -> list[str]:
    """Return the prompts (`TraceArrays.clusters`) in the order of a hash of their text.

    Raises:
        TraceError: fewer than `least` prompts.
    """
    names = sorted(set(arrays.clusters), key=lambda name: hashlib.blake2b(f"{seed}\0{name}".encode()).digest())
    if len(names) < least:
        raise TraceError(
            f"--traces: expected at least {least} different prompts to split, got {len(names)}; collect more prompts"
        )
    return names


def split_prompts(arrays: TraceArrays, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the sequences (rest, share), split by a hash of the prompt's text: equal texts are on the same side.

    Args:
        arrays: a trace.
        share: of the prompts, at least one; 0 = none.
        seed: of the hash.

    Raises:
        TraceError: too few prompts for the split.
    """
    ranks = ranked_prompts(arrays, seed, MIN_PROMPTS + (share > 0))
    count = max(1, round(share * len(ranks))) if share > 0 else 0
    if len(ranks) - count < MIN_PROMPTS:
        raise TraceError(
            f"--traces: {count} of {len(ranks)} prompts are held out, and {MIN_PROMPTS} are needed for the rest"
        )
    held = set(ranks[:count])
    sides: tuple[list[int], list[int]] = ([], [])
    for sequence, name in enumerate(arrays.clusters):
        sides[name in held].append(sequence)
    return sides


def conditional_acceptance(arrays: TraceArrays, visited: Visits) -> tuple[float, ...]:
    """Return a_1..a_K, P(A >= j | A >= j - 1) over the visited rounds; a depth that was never reached repeats the one before.

    a_1 is of the rounds with a first token: policies are not called where a drafter knows none.
    """
    length = arrays.accepted[visited.row]
    acceptance: list[float] = []
    for depth in range(1, arrays.depth + 1):
        eligible = length >= depth - 1 if depth > 1 else arrays.tokens[visited.row, 0] != NO_TOKEN
        reached = int(eligible.sum())
        last = acceptance[-1] if acceptance else 0.0
        acceptance.append(int((length >= depth).sum()) / reached if reached else last)
    return tuple(acceptance)
