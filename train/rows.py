"""Training rows of the two outputs, from a trace: what was seen at (anchor, depth), and what came of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policies.errors import TraceError
from .data import TraceArrays, seen_features
from .replay import Replayed


@dataclass(frozen=True)
class FitRows:
    """M rows (anchor, depth j) whose tokens x_1..x_{j-1} were accepted.

    Attributes:
        features: [M, F] float32.
        depth: [M] int64, 0..K.
        accepted: [M] bool, x_j accepted; the label of `accept` where `depth` is 1 or more.
        followed: [M] bool, x_{j+1} accepted; the label of `next` where `followed_known`.
        followed_known: [M] bool, x_1..x_j were accepted and j < K.
    """

    features: Tensor
    depth: Tensor
    accepted: Tensor
    followed: Tensor
    followed_known: Tensor

    def __len__(self) -> int:
        return len(self.depth)

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


def visits(arrays: TraceArrays, replays: Sequence[Replayed]) -> Visits:
    """Return the rounds of all `replays` of this trace."""
    log = torch.cat([r.log for r in replays])
    row = arrays.offset[log[:, 0]] + log[:, 1] - arrays.first_anchor[log[:, 0]]
    use = ~arrays.cut[row]
    return Visits(row[use], torch.cat([r.history for r in replays])[use])


def fit_rows(arrays: TraceArrays, features: Sequence[str], visited: Visits) -> FitRows:
    """Return the training rows of the rounds visited: every depth up to the first rejection."""
    seen = seen_features(arrays, features, visited.row, visited.history)
    depth = torch.arange(arrays.depth + 1)[None].expand(len(seen), -1)
    length = arrays.accepted[visited.row][:, None]
    use = length >= depth - 1
    known = (length >= depth) & (depth < arrays.depth)
    return FitRows(seen[use], depth[use], (length >= depth)[use], (length > depth)[use], known[use])


def split_prompts(arrays: TraceArrays, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the sequences (fit, held out), split by a hash of the prompt id: the same prompt is always on one side.

    Raises:
        TraceError: fewer than 4 prompts, so that a side would be empty.
    """
    ranks = sorted(set(arrays.prompt_ids), key=lambda name: hashlib.blake2b(f"{seed}\0{name}".encode()).digest())
    if len(ranks) < 4:
        raise TraceError(f"--traces: expected at least 4 prompts to split, got {len(ranks)}")
    held = set(ranks[: max(1, round(share * len(ranks)))])
    sides: tuple[list[int], list[int]] = ([], [])
    for sequence, name in enumerate(arrays.prompt_ids):
        sides[name in held].append(sequence)
    return sides


def conditional_acceptance(arrays: TraceArrays, visited: Visits) -> tuple[float, ...]:
    """Return a_1..a_K, P(A >= j | A >= j - 1) over the rounds visited; a depth never reached repeats the one above."""
    length = arrays.accepted[visited.row]
    out: list[float] = []
    for depth in range(1, arrays.depth + 1):
        reached = int((length >= depth - 1).sum())
        out.append(int((length >= depth).sum()) / reached if reached else (out[-1] if out else 0.0))
    return tuple(out)
