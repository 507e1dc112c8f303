"""The rounds of a replay and their prices.

The rounds of a policy do not depend on what they cost, so that one replay serves every profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.costs import CostTable
from ...policies.display import Table
from ...policies.profile import Profile

COUNTS = (
    "sequence", "anchor", "context", "drafted", "verified", "accepted", "committed", "backlog", "decisions",
)  # fmt: skip
BY_ROUND = (*COUNTS, "steps", "fed", "history")
"""Fields of `Rounds`: the counts of each round, and all fields with a row per round."""


class NoPolicy(StopPolicy):
    """The policy of rounds that no policy decided: those of the oracle, and of draft lengths that are given in advance."""

    name = "plan"


@dataclass(frozen=True, repr=False, eq=False)
class Rounds:
    """The rounds of R target calls over S texts, sorted by text, in each in the order of decoding.

    Attributes:
        policy: that was replayed.
        profile: of the costs.
        prompt_tokens: [S] tokens of each prompt; 0 = the prompt is not priced.
        first_tokens: [S] tokens of each text before its first round.
        sequence, anchor: [R] the text and the anchor of each round.
        context: [R] tokens committed before the round, including the prompt's.
        drafted, verified, accepted, committed: [R] tokens.
        backlog: [R] committed tokens that the draft had not read; [R, D] with several drafters.
        decisions: [R] calls of the policy.
        steps: [R] draft steps: the depth that was drafted.
        fed: [R, K] of trees, tokens read at each draft step; None for chains. [R, D, K] with several drafters.
        history: [R, 4], the HISTORY features when each round began; 0 if unknown. [R, D, 5] with several drafters and a
            policy that routes: the last column is `History.idle`.
        caveats: what a reader of figures of these rounds must know.
    """

    policy: StopPolicy
    profile: Profile
    prompt_tokens: Tensor
    first_tokens: Tensor
    sequence: Tensor
    anchor: Tensor
    context: Tensor
    drafted: Tensor
    verified: Tensor
    accepted: Tensor
    committed: Tensor
    backlog: Tensor
    decisions: Tensor
    steps: Tensor
    history: Tensor
    fed: Tensor | None = None
    caveats: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self.policy.name

    @property
    def cost_name(self) -> str:
        """Name of the price of the policy's decisions in a profile."""
        return self.policy.cost_name

    @cached_property
    def tokens(self) -> Tensor:
        """[S] tokens of each text."""
        counts = torch.zeros(len(self.prompt_tokens), dtype=self.committed.dtype)
        return self.first_tokens + counts.index_add_(0, self.sequence, self.committed)

    @cached_property
    def seconds(self) -> Tensor:
        """[S] float64 seconds of each text, including its prompt."""
        return self.text_seconds(self.profile)

    @property
    def rate(self) -> float:
        """Tokens per second over all texts: a ratio of sums, never a mean of ratios."""
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def block_efficiency(self) -> float:
        """Committed tokens per target call."""
        return float(self.committed.sum()) / max(len(self), 1)

    @property
    def log(self) -> Tensor:
        """[R, 5] int64: sequence, anchor, drafted, verified and accepted of each round."""
        return torch.stack([self.sequence, self.anchor, self.drafted, self.verified, self.accepted], 1)

    @property
    def drafting(self) -> Tensor:
        """[R, D] bool, the drafters that drafted."""
        if self.fed is None or self.fed.dim() == 2:
            return (self.drafted > 0)[:, None]
        return self.fed[..., 0] > 0

    @property
    def table(self) -> Table:
        """One row: speed, tokens per target call, and means over rounds."""
        means = {n: float(getattr(self, n).sum()) / max(len(self), 1) for n in ("drafted", "verified", "accepted")}
        speed = {"policy": self.name, "tokens_per_s": self.rate, "tokens_per_call": self.block_efficiency}
        return Table([speed | means | {"rounds": len(self), "texts": len(self.tokens)}])

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`."""
        return self.table.to_pandas()

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def price(self, profile: Profile, *, bare: bool = False) -> Tensor:
        """Return [R] float64 seconds of each round under a profile.

        Args:
            profile: of the costs.
            bare: with free decisions, and with a draft that has read all but the anchor.
        """
        backlog, decision = (
            (torch.ones_like(self.backlog), 0.0) if bare else (self.backlog, profile.decision(self.cost_name))
        )
        context, drafted, verified, decisions = (
            column.numpy() for column in (self.context, self.drafted, self.verified, self.decisions)
        )
        fed = None if self.fed is None else self.fed.numpy()
        seconds = profile.round_seconds(context, drafted, verified, backlog.numpy(), decisions, decision, fed)
        return torch.from_numpy(seconds)

    def decision_seconds(self, profile: Profile) -> Tensor:
        """Return [R] float64 seconds of decisions."""
        return profile.decision(self.cost_name) * self.decisions.double()

    def text_seconds(self, profile: Profile) -> Tensor:
        """Return [S] float64 seconds of each text under a profile, including its prompt."""
        read = torch.from_numpy(profile.prefill_seconds(self.prompt_tokens.numpy())) * (self.prompt_tokens > 0)
        return read.double().index_add_(0, self.sequence, self.price(profile))

    def by_sequence(self, values: Tensor) -> Tensor:
        """Return [S] float64, the sums of values [R] over the rounds of each text."""
        return torch.zeros(len(self.prompt_tokens), dtype=torch.float64).index_add_(0, self.sequence, values.double())

    def among_drafters(self, index: int, drafters: int, depth: int, profile: Profile) -> Rounds:
        """Return the rounds of one drafter as rounds of D drafters in which only that one drafts.

        Args:
            index: of the drafter.
            drafters: D.
            depth: K.
            profile: with the costs of all drafters.
        """
        fed = torch.zeros(len(self), drafters, depth, dtype=torch.int64)
        own = torch.arange(depth) < self.steps[:, None] if self.fed is None else self.fed
        fed[:, index, : own.shape[1]] = own.long()
        backlog = torch.ones(len(self), drafters, dtype=torch.int64)
        backlog[:, index] = self.backlog
        return dataclasses.replace(self, fed=fed, backlog=backlog, profile=profile)

    def subset(self, texts: Sequence[int]) -> Rounds:
        """Return the rounds of these texts, numbered in this order."""
        at = torch.as_tensor(list(texts), dtype=torch.int64)
        number = torch.full((len(self.prompt_tokens),), -1)
        number[at] = torch.arange(len(at))
        keep = torch.nonzero(number[self.sequence] >= 0)[:, 0]
        keep = keep[torch.argsort(number[self.sequence[keep]], stable=True)]
        columns: dict[str, Any] = {n: v[keep] for n in BY_ROUND if (v := getattr(self, n)) is not None}
        columns |= {"sequence": number[columns["sequence"]]}
        return dataclasses.replace(
            self, prompt_tokens=self.prompt_tokens[at], first_tokens=self.first_tokens[at], **columns
        )


def scale_costs(profile: Profile, draft: float = 1.0, verify: float = 1.0) -> Profile:
    """Return a profile with the costs of draft steps and of verifications multiplied by these factors."""

    def table(side: CostTable) -> CostTable:
        return dataclasses.replace(
            side,
            draft_s=(side.draft_s[0] * draft, side.draft_s[1] * draft),
            draft_token_s=side.draft_token_s * draft,
            later_draft_s=None if side.later_draft_s is None else side.later_draft_s * draft,
            verify_s=tuple(s * verify for s in side.verify_s),
            tree_verify_s=tuple((tokens, s * verify) for tokens, s in side.tree_verify_s),
            tree_draft_s=side.tree_draft_s and (side.tree_draft_s[0] * draft, side.tree_draft_s[1] * draft),
        )

    others = tuple(scale_costs(one, draft, verify) for one in profile.others)
    return dataclasses.replace(profile, low=table(profile.low), high=table(profile.high), others=others)
