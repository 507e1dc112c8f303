"""Training rows of the two outputs, from a trace: what was seen at (anchor, depth), and what came of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...collect.schema import NO_TOKEN, Header
from ...policies.errors import TraceError
from ...policies.features import HISTORY_FEATURES
from ..replay.run import Replayed
from ..replay.traces.arrays import TraceArrays, seen_features
from ..replay.traces.hidden_states import StoredHidden

SOFT_COLUMNS = ("draft_prob", "target_prob")
"""What soft labels want of `trace_arrays` as `extra`."""

CHANCE_COLUMNS = ("accept_chance", "next_chance")
"""The chances that come with rounds drawn given the text."""

LEAST_PROMPTS = 3

_PART = 1 << 24
"""Numbers of hidden states that are looked up at a time."""


@dataclass(frozen=True)
class FitRows:
    """M rows (anchor, depth j) whose tokens x_1..x_{j-1} were accepted.

    Attributes:
        features: [M, F] float32.
        depth: [M] int64, 0..K.
        accepted: [M] bool, x_j accepted; the label of `accept` where `depth` is 1 or more.
        followed: [M] bool, x_{j+1} accepted; the label of `next` where `followed_known`.
        followed_known: [M] bool, x_1..x_j were accepted and j < K.
        hidden: [M, H] hidden states by name, for heads that read some.
        soft: [M] min(1, p/q) of x_j, its chance of acceptance under rejection; None where the trace was read without.
        chances: [M, 2] that x_j is accepted, and x_{j+1}, as far as x_1..x_j tell: the same labels with less variance; None
            where the trace was read without `CHANCE_COLUMNS`.
    """

    features: Tensor
    depth: Tensor
    accepted: Tensor
    followed: Tensor
    followed_known: Tensor
    hidden: dict[str, Tensor] = field(default_factory=dict)
    soft: Tensor | None = None
    chances: Tensor | None = None

    def __len__(self) -> int:
        return len(self.depth)

    def label(self, name: str) -> Tensor:
        """Return [M], what `accept` ("accepted") or `next` ("followed") is fitted to: chances where known, else bits."""
        if self.chances is None:
            bits: Tensor = getattr(self, name)
            return bits
        return self.chances[:, 0 if name == "accepted" else 1]

    def has(self, name: str) -> Tensor:
        """Return [M] bool, the rows that have this label."""
        return self.drawn if name == "accepted" else self.followed_known

    @property
    def labels(self) -> Tensor:
        """[M, 2] float32, both."""
        return torch.stack([self.label("accepted"), self.label("followed")], 1).float()

    @property
    def known(self) -> Tensor:
        """[M, 2] float32, which of both there are."""
        return torch.stack([self.drawn, self.followed_known], 1).float()

    @property
    def drawn(self) -> Tensor:
        """[M] bool, rows that have a label for `accept`."""
        return self.depth > 0


@dataclass(frozen=True)
class Visits:
    """Rounds that policies played on a trace, cut ones left out.

    Policies skip easy runs, so the anchors they visit are harder than the average one; heads are fitted on visits.

    Attributes:
        row: [R] of the anchor in the trace.
        history: [R, 4], the HISTORY features when the round began.
    """

    row: Tensor
    history: Tensor

    @classmethod
    def once(cls, row: Tensor) -> Visits:
        """Return one round at each of these anchors [R], with nothing before it."""
        return cls(row, torch.zeros(len(row), len(HISTORY_FEATURES)))

    def with_more(self, other: Visits) -> Visits:
        """Return these rounds, and after them the other ones."""
        return Visits(torch.cat([self.row, other.row]), torch.cat([self.history, other.history]))

    def part(self, use: Tensor) -> Visits:
        """Return the rounds where `use` [R] holds."""
        return Visits(self.row[use], self.history[use])


def visits(arrays: TraceArrays, replays: Sequence[Replayed]) -> Visits:
    """Return the rounds of all `replays` of this trace."""
    log = torch.cat([r.log for r in replays])
    # Every anchor has its row: what replays any policy is a dense trace.
    row = arrays.offset[log[:, 0]] + log[:, 1] - arrays.first_anchor[log[:, 0]]
    return Visits(row, torch.cat([r.history for r in replays])).part(~arrays.cut[row])


def fit_rows(
    arrays: TraceArrays, features: Sequence[str], visited: Visits, hidden: Sequence[str] = (), lag: int = 0
) -> FitRows:
    """Return the training rows of the rounds visited: every depth up to the first rejection.

    Args:
        arrays: of chains.
        features: names.
        visited: the rounds.
        hidden: hidden states to add, float16 as they are recorded.
        lag: depths by which a head's `accept` is behind (`Head.lag`): the row of x_j then has the draft's hidden state of
            depth j + lag, and those without one are left out.

    Raises:
        TraceError: a feature or a hidden state is not recorded.
    """
    seen = seen_features(arrays, features, visited.row, visited.history)
    depth = torch.arange(arrays.depth + 1)[None].expand(len(seen), -1)
    length = arrays.accepted[visited.row][:, None]
    # [R, K + 1]; the first rejection is a row of `accept`, and after it the chances would be of something else.
    use = (length >= depth - 1) & (depth <= arrays.depth - lag)
    # No policy is asked about a token that the drafter does not know.
    use[:, 1:] &= arrays.tokens[visited.row] != NO_TOKEN
    known = (length >= depth) & (depth < arrays.depth)
    soft, chances = soft_labels(arrays, visited), known_chances(arrays, visited)
    return FitRows(
        seen[use],
        depth[use],
        (length >= depth)[use],
        (length > depth)[use],
        known[use],
        {name: _states(arrays.hidden_state(name), visited.row, use, lag) for name in hidden},
        soft=None if soft is None else soft[use],
        chances=None if chances is None else chances[use],
    )


def _states(recorded: StoredHidden, row: Tensor, use: Tensor, lag: int = 0) -> Tensor:
    """Return [M, H] float16, the hidden states of the rows and depths in `use` [R, K + 1]; 0 for the draft's at depth 0."""
    at, depth = use.nonzero(as_tuple=True)
    out = torch.zeros(len(at), recorded.width, dtype=torch.float16)
    known = (depth > 0).nonzero()[:, 0] if recorded.of_nodes else torch.arange(len(at))
    # Recorded states may lie on disk: a part at a time, so that nothing but `out` is held whole.
    for part in known.split(max(1, _PART // recorded.width)):
        out[part] = recorded.at(row[at[part]], depth[part] - 1 + lag if recorded.of_nodes else None)
    return out


def soft_labels(arrays: TraceArrays, visited: Visits) -> Tensor | None:
    """Return [R, K + 1] min(1, p/q) of x_j, 0 at depth 0; None unless the trace was read with `SOFT_COLUMNS`."""
    if not set(SOFT_COLUMNS) <= set(arrays.extra):
        return None
    q, p = (arrays.extra[name][visited.row].float() for name in SOFT_COLUMNS)
    # q is 0 at nodes that were not drawn: `where` works out both sides, so that the division must not fail there.
    ratio = torch.where(q > 0, p / q.clamp_min(1e-30), 0.0).clamp(0.0, 1.0)
    return torch.nn.functional.pad(ratio, (1, 0))


def known_chances(arrays: TraceArrays, visited: Visits) -> Tensor | None:
    """Return [R, K + 1, 2] the chances that x_j and x_{j+1} are accepted; None without `CHANCE_COLUMNS`."""
    if not set(CHANCE_COLUMNS) <= set(arrays.extra):
        return None
    accept, next_ = (arrays.extra[name][visited.row].float() for name in CHANCE_COLUMNS)
    pad = torch.nn.functional.pad
    # Node j's `next_chance` is of x_j before it was drawn: the label of `next` at depth j - 1. At depth 0 nothing was drawn,
    # at depth K nothing follows.
    return torch.stack([pad(accept, (1, 0)), pad(next_, (0, 1))], -1)


def label_columns(headers: Sequence[Header], soft: bool) -> tuple[str, ...]:
    """Return what fitting wants of `trace_arrays` as `extra`; `soft`: the head's labels are min(1, p/q)."""
    chances = CHANCE_COLUMNS if all(header.given_text for header in headers) else ()
    return (*(SOFT_COLUMNS if soft else ()), *chances)


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
    """Return the sequences (rest, share), split by a hash of the prompt's text: equal texts are always on one side.

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
    """Return a_1..a_K, P(A >= j | A >= j - 1) over the rounds visited; a depth never reached repeats the one before.

    a_1 is that of the rounds with a first token: where a drafter knows none, nobody is asked about the ones after it.
    """
    length = arrays.accepted[visited.row]
    out: list[float] = []
    for depth in range(1, arrays.depth + 1):
        there = length >= depth - 1 if depth > 1 else arrays.tokens[visited.row, 0] != NO_TOKEN
        reached = int(there.sum())
        out.append(int((length >= depth).sum()) / reached if reached else (out[-1] if out else 0.0))
    return tuple(out)
