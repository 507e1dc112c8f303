"""Training rows of the two outputs: features at (anchor, depth) of a trace, and whether the tokens there were accepted."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...collect.schema import NO_TOKEN, Header
from ...collect.store import Trace
from ...policies.errors import TraceError
from ...policies.features import HISTORY_FEATURES
from ..replay.arrays import TraceArrays, check_alike, seen_features, trace_arrays
from ..replay.columns import HiddenStates
from ..replay.rounds import Rounds

SOFT_COLUMNS = ("draft_prob", "target_prob")
"""Columns of `trace_arrays` (`extra`) that soft labels need."""

CHANCE_COLUMNS = ("accept_chance", "next_chance")
"""Columns with the exact chances of acceptance, in traces of completions."""

OWN = "mixed"
"""Column of a mixed trace: whether the last token that the draft had read was its own sample."""

LEAST_PROMPTS = 3

_BLOCK = 1 << 24  # numbers of hidden states that are read at a time


@dataclass(frozen=True)
class FitRows:
    """M rows (anchor, depth j), where x_1..x_{j-1} were accepted.

    Attributes:
        features: [M, F] float32.
        depth: [M] int64, 0..K.
        accepted: [M] bool, whether x_j was accepted: the label of `accept` where `depth` is 1 or more.
        followed: [M] bool, whether x_{j+1} was accepted: the label of `next` where `followed_known`.
        followed_known: [M] bool, whether x_1..x_j were accepted and j < K.
        hidden: [M, H] float16 hidden states by name.
        chances: [M, 2] chances that x_j and x_{j+1} are accepted given x_1..x_j: labels with the same mean and less variance;
            None = bits are the labels. See `label_chances`.
    """

    features: Tensor
    depth: Tensor
    accepted: Tensor
    followed: Tensor
    followed_known: Tensor
    hidden: dict[str, Tensor] = field(default_factory=dict)
    chances: Tensor | None = None

    def __len__(self) -> int:
        return len(self.depth)

    def subset(self, use: Tensor) -> FitRows:
        """Return the rows at indices, or where a mask [M] is true."""
        return _map_tensors(lambda values: values[0][use], [self])

    @property
    def drawn(self) -> Tensor:
        """[M] bool, rows with a label of `accept`."""
        return self.depth > 0

    def label(self, name: str) -> Tensor:
        """Return [M], the labels "accepted" or "followed": chances if they are known, else bool."""
        if self.chances is None:
            labels: Tensor = getattr(self, name)
            return labels
        return self.chances[:, 0 if name == "accepted" else 1]

    @property
    def labels(self) -> Tensor:
        """[M, 2] float32, both labels."""
        return torch.stack([self.label("accepted"), self.label("followed")], 1).float()

    @property
    def known(self) -> Tensor:
        """[M, 2] float32, 1 where a row has the label."""
        return torch.stack([self.drawn, self.followed_known], 1).float()

    @property
    def outputs(self) -> tuple[tuple[str, Tensor], tuple[str, Tensor], tuple[str, Tensor]]:
        """(label, [M] rows) of the three regressions of linear heads: `accept`, `next` after a token, `next` at depth 0."""
        known = self.followed_known
        return ("accepted", self.drawn), ("followed", self.drawn & known), ("followed", ~self.drawn & known)


def join_rows(parts: Sequence[FitRows]) -> FitRows:
    """Return the rows of all parts, one after the other."""
    return _map_tensors(torch.cat, parts)


def _map_tensors(function: Any, parts: Sequence[FitRows]) -> FitRows:
    """Return rows each of whose tensors is `function` of the list of that tensor in all parts."""
    columns: dict[str, Any] = {}
    for name in (one.name for one in dataclasses.fields(FitRows)):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], dict):
            columns[name] = {key: function([value[key] for value in values]) for key in values[0]}
        else:
            columns[name] = None if values[0] is None else function(values)
    return FitRows(**columns)


@dataclass(frozen=True)
class Visits:
    """Rounds that policies played on a trace, without cut ones.

    Policies skip easy runs, so the anchors that they visit are harder than the average anchor. Heads are fitted on visits.

    Attributes:
        row: [R] of the anchor in the trace.
        history: [R, 4], the HISTORY features when the round began.
    """

    row: Tensor
    history: Tensor

    @classmethod
    def once(cls, row: Tensor) -> Visits:
        """Return one round at each of these anchors [R], without earlier rounds."""
        return cls(row, torch.zeros(len(row), len(HISTORY_FEATURES)))

    def with_more(self, other: Visits) -> Visits:
        """Return these rounds, then the other ones."""
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
        soft: label `accept` with min(1, p/q), if the trace was read with `SOFT_COLUMNS`.

    Raises:
        TraceError: a feature or a hidden state is not recorded.
    """
    seen = seen_features(arrays, features, visited.row, visited.history)
    depth = torch.arange(arrays.depth + 1)[None].expand(len(seen), -1)
    length = arrays.accepted[visited.row][:, None]
    # [R, K + 1]; the first rejection is a row of `accept`. Deeper rows are conditional on a rejected path.
    use = (length >= depth - 1) & (depth <= arrays.depth - lag)
    # Policies are not called for a token that the drafter does not know.
    use[:, 1:] &= arrays.tokens[visited.row] != NO_TOKEN
    known = (length >= depth) & (depth < arrays.depth)
    chances = label_chances(arrays, visited, soft)
    return FitRows(
        seen[use],
        depth[use],
        (length >= depth)[use],
        (length > depth)[use],
        known[use],
        {name: _states(arrays.hidden_state(name), visited.row, use, lag) for name in hidden},
        None if chances is None else chances[use],
    )


def _states(recorded: HiddenStates, row: Tensor, use: Tensor, lag: int = 0) -> Tensor:
    """Return [M, H] float16, the hidden states of the rows and depths in `use` [R, K + 1]; 0 for the draft's at depth 0."""
    at, depth = use.nonzero(as_tuple=True)
    states = torch.zeros(len(at), recorded.width, dtype=torch.float16)
    known = (depth > 0).nonzero()[:, 0] if recorded.of_nodes else torch.arange(len(at))
    # Recorded states may be on disk: they are read in blocks, so that only `states` is in memory as a whole.
    for part in known.split(max(1, _BLOCK // recorded.width)):
        states[part] = recorded.at(row[at[part]], depth[part] - 1 + lag if recorded.of_nodes else None)
    return states


def label_chances(arrays: TraceArrays, visited: Visits, soft: bool) -> Tensor | None:
    """Return [R, K + 1, 2] chances as labels of x_j and x_{j+1}, or None: exact ones if the trace has them.

    Else, with `soft`, min(1, p/q) of x_j, its chance of acceptance under rejection (0 at depth 0), and whether x_{j+1} was
    accepted.
    """
    exact = known_chances(arrays, visited)
    if exact is not None or not soft or not set(SOFT_COLUMNS) <= set(arrays.extra):
        return exact
    q, p = (arrays.extra[name][visited.row].float() for name in SOFT_COLUMNS)
    # q is 0 at nodes that were not drawn. `where` computes both sides, so the division must not fail there.
    ratio = pad(torch.where(q > 0, p / q.clamp_min(1e-30), 0.0).clamp(0.0, 1.0), (1, 0))
    followed = arrays.accepted[visited.row][:, None] > torch.arange(arrays.depth + 1)
    return torch.stack([ratio, followed.float()], -1)


def known_chances(arrays: TraceArrays, visited: Visits) -> Tensor | None:
    """Return [R, K + 1, 2] the chances that x_j and x_{j+1} are accepted; None without `CHANCE_COLUMNS`."""
    if not set(CHANCE_COLUMNS) <= set(arrays.extra):
        return None
    accept, next_ = (arrays.extra[name][visited.row].float() for name in CHANCE_COLUMNS)
    # `next_chance` of node j refers to x_j before it was drawn: the label of `next` at depth j - 1. No token is drawn at
    # depth 0, and none follows at depth K.
    return torch.stack([pad(accept, (1, 0)), pad(next_, (0, 1))], -1)


def label_columns(headers: Sequence[Header], soft: bool) -> tuple[str, ...]:
    """Return the columns that fitting needs of `trace_arrays` as `extra`; `soft`: the head's labels are min(1, p/q)."""
    chances = CHANCE_COLUMNS if all(header.given_text for header in headers) else ()
    return (*(SOFT_COLUMNS if soft else ()), *chances)


# Mixed texts (`collect --mix`)


def mixed_arrays(trace: Trace, like: Trace, features: Sequence[str], hidden: Sequence[str]) -> TraceArrays:
    """Read a mixed trace to fit heads that are calibrated on another trace.

    Raises:
        TraceError: it is not mixed, of another pair, or lacks a feature or hidden state.
    """
    if not trace.header.mix:
        raise TraceError(f"--mixed: {trace.folder} is no mixed trace; collect one with --mix 0.15 --depth 1")
    check_alike(like.header, trace.header, str(like.folder), str(trace.folder), ("pair", "vocabulary", "verification"))
    read = [name for name in features if name not in HISTORY_FEATURES]
    return trace_arrays(trace, read, (*SOFT_COLUMNS, OWN), hidden)


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
        return fit_rows(arrays, features, Visits.once(row), tuple(arrays.hidden), soft=soft)
    if lag > 1 or features:
        raise TraceError(f"--mixed: expected a head of hidden states with lag 0 or 1, got lag {lag}")
    # The state after Y_i is in the row of the next position, which must be of the same text.
    row = row[row + 1 < len(owner)]
    row = row[(owner[row + 1] == owner[row]) & arrays.extra[OWN][row + 1].bool()]
    first, none = torch.zeros_like(row), torch.zeros_like(row).bool()
    chances = label_chances(arrays, Visits.once(row), soft)
    stored = {name: arrays.hidden_state(name) for name in arrays.hidden}
    return FitRows(
        torch.zeros(len(row), 0),
        torch.ones_like(row),
        arrays.accepted[row] >= 1,
        none,
        none,
        {name: states.at(row + 1, first if states.of_nodes else None) for name, states in stored.items()},
        None if chances is None else chances[:, 1],
    )


# Prompts


def ranked_prompts(arrays: TraceArrays, seed: int, least: int = LEAST_PROMPTS) -> list[str]:
    """Return the prompts (`TraceArrays.clusters`) in the order of a hash of their text.

    Raises:
        TraceError: fewer than `least` prompts.
    """
    names = sorted(set(arrays.clusters), key=lambda name: hashlib.blake2b(f"{seed}\0{name}".encode()).digest())
    if len(names) < least:
        more = "" if least == LEAST_PROMPTS else "; --report-share 0 needs one less"
        raise TraceError(f"--traces: expected at least {least} different prompts to split, got {len(names)}{more}")
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
    ranks = ranked_prompts(arrays, seed, LEAST_PROMPTS + (share > 0))
    count = max(1, round(share * len(ranks))) if share > 0 else 0
    if len(ranks) - count < LEAST_PROMPTS:
        raise TraceError(
            f"--traces: {count} of {len(ranks)} prompts are held out, and {LEAST_PROMPTS} are needed for the rest"
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
        there = length >= depth - 1 if depth > 1 else arrays.tokens[visited.row, 0] != NO_TOKEN
        reached = int(there.sum())
        last = acceptance[-1] if acceptance else 0.0
        acceptance.append(int((length >= depth).sum()) / reached if reached else last)
    return tuple(acceptance)
