"""One decision of one stream: features of the last drawn token, the policy's answer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..policies.contract import DraftStep, State, StopPolicy, checked_keep
from ..policies.features import Layout, Rows, compute
from ..policies.history import HistoryOne
from ..policies.single import Row, compute_row


@dataclass(frozen=True)
class Base:
    """What is known of a round before drafting: `columns` [1, .] as a tensor, or `row` as numbers."""

    columns: Tensor | None = None
    row: list[float] | None = None


class Decider:
    """Asks a policy, through `keep_one` where it has one and the logits are on the CPU, else through `keep`.

    Args:
        policy: any stop policy.
        device: of the logits.

    Attributes:
        layout: of the policy's features.
    """

    def __init__(self, policy: StopPolicy, device: torch.device) -> None:
        self.policy = policy
        self.layout = Layout(policy.features)
        self._one = policy.keep_one if device.type == "cpu" and _up_to_date(type(policy)) else None
        self._follows_path = "path_logprob" in self.layout.node

    def row(
        self,
        logits: Tensor,
        temperature: float,
        scores: Tensor,
        drawn: Tensor,
        token: int,
        above: Rows | Row | None,
        depth: int,
    ) -> Rows | Row:
        """Return what the features of a drawn token are computed from.

        Args:
            logits: [1, V] of the draft.
            temperature: of the sampling.
            scores: [1, V], what the token was the argmax of.
            drawn, token: the token, as tensor [1] and as number.
            above: the row of the token before it.
            depth: j.
        """
        parent: Any = None
        if self._follows_path:
            parent = above.path_logprob if above is not None else 0.0
        if self._one is not None:
            return Row(logits, temperature, scores, token, parent, depth)
        return Rows(logits, temperature, scores, drawn, parent, depth)

    def base(self, anchor_row: Tensor, anchor: int, history: HistoryOne) -> Base:
        """Return the ANCHOR and HISTORY columns of a round.

        Args:
            anchor_row: [1, V], the target's row that the anchor was drawn from.
            anchor: the anchor token.
            history: of the text.
        """
        past = history.values(self.layout.history)
        if self._one is not None:
            anchors = self.layout.anchor
            known = compute_row(anchors, Row(anchor_row, 0.0, None, anchor, None, 0)) if anchors else []
            return Base(row=known + past)
        device = anchor_row.device
        rows = Rows(anchor_row, tokens=torch.tensor([anchor], device=device))
        return Base(columns=self.layout.base(compute(self.layout.anchor, rows), torch.tensor([past], device=device)))

    def __call__(self, depth: int, base: Base, row: Rows | Row | None, state: State) -> tuple[bool, State]:
        """Return whether to draft on, and the policy's new state; raises what the policy raises.

        Args:
            depth: j.
            base: of the round.
            row: of x_j; None at depth 0.
            state: of the policy.
        """
        if self._one is not None:
            assert not isinstance(row, Rows) and base.row is not None
            nodes = None if row is None else compute_row(self.layout.node, row)
            return self._one(depth, self.layout.step_one(base.row, nodes), state)
        assert not isinstance(row, Row)
        assert base.columns is not None
        features = self.layout.step(base.columns, None if row is None else compute(self.layout.node, row))
        keep, state = checked_keep(self.policy, draft_step(depth, features), state)
        return bool(keep), state


def draft_step(depth: int, features: Tensor) -> DraftStep:
    """Return the step of one stream with one branch, from its features [1, F]."""
    alive, parent = _single_branch(features.device)
    return DraftStep(depth, alive, parent, features[:, None])


def _up_to_date(kind: type[StopPolicy]) -> bool:
    """Whether `keep_one` is at least as derived as `keep`: a subclass that overrides `keep` alone must be heard."""
    nearest = next(base for base in kind.__mro__ if "keep" in vars(base) or "keep_one" in vars(base))
    return "keep_one" in vars(nearest)


@functools.cache
def _single_branch(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.ones(1, 1, dtype=torch.bool, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
