"""What S streams drafted in a round, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..policies.contract import Array
from ..policies.kernels import on_first_use
from .topology import Topology

kernels = on_first_use("rounds")


class Drafted:
    """What S streams drafted; [S, N] bool by row of the tree, whose roots are the first rows.

    Args:
        streams: S.
        tree: of N rows, K deep.

    Attributes:
        drawn: tokens were drawn there (roots are not drawn).
        dropped: the policy leaves them out.
        fed: the draft read them, to draw below.
        asked: the policy was asked whether to extend them.
        sent: what the target reads.
        capped: [S] bool, an end of text or a length limit ended drafting, not the policy.
        drafted, verified, decisions: [S] int64, tokens drawn, tokens sent, depths at which the policy was asked.
        steps: [S, K] int64, rows fed at each depth.
    """

    def __init__(self, streams: int, tree: Topology) -> None:
        self._tree = tree
        # One block [4, S, N], which the kernel takes as one argument; the marks are views of it.
        self._marks = np.zeros((4, streams, len(tree)), dtype=bool)
        self.drawn, self.dropped, self.fed, self.asked = self._marks
        self.capped = np.zeros(streams, dtype=bool)

    def count(self) -> None:
        """Work out `sent`, the sums and the steps."""
        tree, marks = self._tree, self._marks
        streams = marks.shape[1]
        self.sent, counts = np.empty_like(self.drawn), np.empty((3, streams), dtype=np.int64)
        # One column at least: the first draft step is priced by itself (`latency.costs`).
        self.steps = np.empty((streams, max(tree.deepest, 1)), dtype=np.int64)
        kernels().count_round(tree.parents, tree.depths, marks, self.sent, counts, self.steps)
        self.drafted, self.verified, self.decisions = counts

    @property
    def fed_by_step(self) -> Array | None:
        """`steps` of a tree; None for a chain, where the number of tokens says it."""
        return None if self._tree.is_chain else self.steps


@dataclass
class Finished:
    """A round of S streams; all arrays are [S].

    Attributes:
        active: bool, streams that had a round; the other rows are void.
        context: tokens committed before it, the prompt's included.
        backlog: committed tokens that the draft had not read.
        found: what was drafted.
        accepted, committed: min(A, k), and the tokens that were added to the text.
        cut: bool, it met an end of text or a limit.
        seconds: modelled by the latency profile; 0 without one.
    """

    active: Array
    context: Array
    backlog: Array
    found: Drafted
    accepted: Array
    committed: Array
    cut: Array

    def __post_init__(self) -> None:
        self.drafted, self.verified, self.decisions = self.found.drafted, self.found.verified, self.found.decisions
        self.fed_by_step, self.seconds = self.found.fed_by_step, np.zeros(len(self.active))
