"""The rounds of a replay and their prices.

The rounds of a policy do not depend on what they cost, so that one replay serves every profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array, StopPolicy
from ...policies.costs import CostTable
from ...policies.display import Table
from ...policies.profile import Profile

Values = np.ndarray[Any, np.dtype[np.float64]]

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


_MAX_BACKLOG = 2
"""Backlog beyond which each further token of a first draft step costs as much as the one before."""


@dataclass(frozen=True)
class RoundTypes:
    """Rounds counted by type, so that pricing them by many profiles is a sum over few types; all [C].

    Attributes:
        drafted, verified, backlog: tokens; backlog is [C, D] with several drafters.
        fed: [C, K] of trees, tokens read at each draft step; None for chains. [C, D, K] with several drafters.
    """

    drafted: Array
    verified: Array
    backlog: Array
    fed: Array | None

    def seconds(self, profile: Profile, counts: Values) -> Values:
        """Return [R, C] seconds of model calls and of the overhead of rounds, without decisions.

        Rounds are priced at the mean context of their type. `Profile.round_seconds` is linear in the context, so that sums
        are exact, except in contexts so far from the measured ones that costs are held at a quarter.

        Args:
            profile: of the costs.
            counts: [R, 2, C] number of rounds of each type, and sums of their contexts.
        """
        rounds, context = counts[:, 0], counts[:, 1]
        # Types with negative counts have negative sums of contexts: their mean is positive.
        mean = np.divide(context, rounds, out=np.zeros_like(context), where=rounds != 0)
        decisions = np.zeros_like(self.drafted)
        seconds: Values = profile.round_seconds(
            mean, self.drafted, self.verified, self.backlog, decisions, 0.0, self.fed
        )
        return rounds * seconds

    @staticmethod
    def joined(types: Sequence[RoundTypes]) -> tuple[RoundTypes, list[int]]:
        """Return the types of several replays, all of chains or all of trees, and the index at which those of each begin."""
        feeds = [one.fed for one in types if one.fed is not None]
        deepest = max((fed.shape[-1] for fed in feeds), default=0)
        padded = [np.pad(fed, (*[(0, 0)] * (fed.ndim - 1), (0, deepest - fed.shape[-1]))) for fed in feeds]
        begins = np.cumsum([0, *(len(one.drafted) for one in types[:-1])]).tolist()
        drafted, verified, backlog = (
            np.concatenate([getattr(one, name) for one in types]) for name in ("drafted", "verified", "backlog")
        )
        return RoundTypes(drafted, verified, backlog, np.concatenate(padded) if padded else None), begins


def count_rounds(rounds: Rounds) -> tuple[RoundTypes, Values]:
    """Return the types of rounds and their counts by text.

    A backlog of more than `_MAX_BACKLOG` tokens is counted as one of `_MAX_BACKLOG`. Each further token adds the difference
    between the cost of a round with one token more and of a round without it: one type is counted up, another one down.

    Returns:
        C types, and [S, 2, C] rounds of each type and sums of their contexts.
    """
    texts, columns = len(rounds.prompt_tokens), (rounds.sequence, rounds.context, rounds.drafted)
    sequence, context, drafted = (column.numpy() for column in columns)
    fed = None if rounds.fed is None else rounds.fed.numpy()
    backlog = rounds.backlog.numpy().reshape(len(drafted), -1)  # [R, D]
    drafters = backlog.shape[1]
    drafting = rounds.drafting.numpy()
    beyond = np.maximum(backlog - _MAX_BACKLOG, 0) * drafting  # without drafting, the backlog is not read
    short = np.where(drafting, np.minimum(backlog, _MAX_BACKLOG), 1)
    flat = np.zeros((len(drafted), 0), dtype=np.int64) if fed is None else fed.reshape(len(fed), -1)
    rows = np.column_stack([drafted, rounds.verified.numpy(), short, flat])
    types, at = np.unique(rows, axis=0, return_inverse=True)
    # With backlog b > 2: cost(b) = cost(2) + (b - 2) (cost(3) - cost(2)). What the two types draft and send cancels; they
    # feed a token, or no first step would be priced.
    one_more = np.zeros((2 * drafters, types.shape[1]), dtype=np.int64)
    steps = 0 if fed is None else fed.shape[-1]
    for index in range(drafters):
        pair = one_more[2 * index : 2 * index + 2]
        pair[:, 0], pair[:, 2 : 2 + drafters], pair[:, 2 + index] = 1, 1, [_MAX_BACKLOG + 1, _MAX_BACKLOG]
        if fed is not None:
            pair[:, 2 + drafters + index * steps] = 1
    types = np.concatenate([types, one_more])
    counts = np.zeros((2, texts, len(types)))
    for number, value in enumerate((np.ones_like(context), context)):
        np.add.at(counts[number], (sequence, at.ravel()), value)  # numpy 2.0 keeps the axis in `at`
        for index in range(drafters):
            extra = np.bincount(sequence, value * beyond[:, index], texts)
            first = len(types) - 2 * (drafters - index)
            counts[number, :, first], counts[number, :, first + 1] = extra, -extra
    all_fed = None if fed is None else types[:, 2 + drafters :].reshape(len(types), *fed.shape[1:])
    all_backlogs = types[:, 2] if drafters == 1 else types[:, 2 : 2 + drafters]
    return RoundTypes(types[:, 0], types[:, 1], all_backlogs, all_fed), counts.transpose(1, 0, 2)
