"""A learned policy: head + calibrator + stop rule, each replaceable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

import torch
from torch import Tensor

from .calibration import LEAST_ODDS, Calibrator
from .contract import DraftStep, State, StopPolicy
from .heads import Head
from .heads_base import NO_ARRAYS, NO_VECTORS, Arrays
from .rules import AnyFork, Rule
from .survival import SurvivalMaps


@dataclass(frozen=True)
class Facts:
    """What a policy was trained for and how it did; nothing here changes a decision.

    Attributes:
        temperature, verification, label: of the traces; several temperatures where the head reads the temperature.
        pair: hashes of target, draft and tokenizer.
        rho: tokens per second that the derived rule assumes.
        acceptance: a_1..a_K that it looks ahead with.
        profile: the latency profile as JSON, or empty.
        provenance: command, versions, seed, traces.
        metrics: of the held-out prompts.
    """

    temperature: float | tuple[float, ...] = 0.0
    verification: str = "match"
    label: str = "match"
    pair: dict[str, str] = field(default_factory=dict)
    rho: float = 0.0
    acceptance: tuple[float, ...] = ()
    profile: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def covers(self, temperature: float) -> bool:
        """Whether the policy was trained for this temperature: for it, or for some below and some above."""
        known = self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)
        return min(known) <= temperature <= max(known)


class LearnedPolicy(StopPolicy):
    """Multiplies calibrated `accept` along each branch to S_j, puts it right by depth, and lets a rule decide.

    Args:
        name: shown in reports.
        features: the head's, in its order. Its hidden states (`vectors`) are the head's as well.
        head, accept, following, rule: its parts; `accept` and `following` calibrate the outputs `accept` and `next`.
        max_depth: K of the traces it was trained on.
        facts: see `Facts`.
        survival: corrects the product by depth; None = the bare product.

    Attributes:
        sizes: H of each hidden state that the head reads, by name.
    """

    def __init__(
        self,
        name: str,
        features: Sequence[str],
        head: Head,
        accept: Calibrator,
        following: Calibrator,
        rule: Rule,
        max_depth: int,
        facts: Facts | None = None,
        survival: SurvivalMaps | None = None,
    ) -> None:
        self.name, self.features = name, tuple(features)
        self.head, self.accept, self.following, self.rule = head, accept, following, rule
        self.first, self.max_depth = rule.first, max_depth
        self.facts = facts or Facts()
        self.survival = survival
        self._maps = [None] * (max_depth + 1) if survival is None else survival.by_depth(rule.first)
        # A head of somebody's own need know nothing of hidden states.
        self.sizes: Mapping[str, int] = getattr(head, "sizes", {})
        self.vectors = tuple(self.sizes)
        if not hasattr(head, "logits_one"):
            vars(self)["keep_one"] = None
        self._lag, self._joint = getattr(head, "lag", 0), isinstance(rule, AnyFork)
        self._scales = None if accept.scale is None or following.scale is None else (accept.scale, following.scale)
        self._scale = None if self._scales is None else torch.tensor(self._scales)

    def with_rule(self, rule: Rule) -> LearnedPolicy:
        """Return this policy under another rule."""
        return LearnedPolicy(
            self.name,
            self.features,
            self.head,
            self.accept,
            self.following,
            rule,
            self.max_depth,
            self.facts,
            self.survival,
        )

    def probabilities(
        self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS
    ) -> tuple[Tensor, Tensor]:
        """Return calibrated (accept, next), each [...], of features [..., F] and vectors [..., H]."""
        logits = self.head.logits(features, depth, vectors) if self.vectors else self.head.logits(features, depth)
        if self._scale is not None:
            accept, following = torch.sigmoid(logits * self._scale.to(logits.device)).unbind(-1)
        else:
            accept, following = self.accept(logits[..., 0]), self.following(logits[..., 1])
        # A head that lags has scored nothing of what was drawn so far.
        return torch.ones_like(accept) if 0 < depth <= self._lag else accept, following

    def keep_one(
        self, depth: int, features: Sequence[float], state: State, vectors: Arrays = NO_ARRAYS
    ) -> tuple[bool, State]:
        """Decide for one row; see `StopPolicy.keep_one`. The state is S_j."""
        # A head of somebody's own need know nothing of hidden states.
        scores = self.head.logits_one(features, depth, vectors) if vectors else self.head.logits_one(features, depth)
        accept, following = scores
        if self._scales is not None:  # nearly always, and a call less is a microsecond less
            accept, following = accept * self._scales[0], following * self._scales[1]
            accept = 1.0 / (1.0 + exp(-accept)) if accept > LEAST_ODDS else 0.0
            following = 1.0 / (1.0 + exp(-following)) if following > LEAST_ODDS else 0.0
        else:
            accept, following = self.accept.one(accept), self.following.one(following)
        if depth == 0:
            return self.rule.keep(0, 0.0, 1.0, following), 1.0
        if depth <= self._lag:  # the head has scored nothing of what was drawn so far
            accept = 1.0
        survival = accept if depth == self.first else state * accept
        table = self._maps[depth]
        if table is not None:
            survival = table.one(survival)
        return self.rule.keep(depth, accept, survival, following), survival

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the branches that the rule keeps; the state is S_j by branch."""
        accept, following = self.probabilities(step.features, step.depth, step.vectors)
        if step.depth == 0:
            survival = torch.ones_like(accept)
        elif step.depth == self.first:
            survival = accept
        else:
            survival = state.gather(1, step.parent) * accept
        table = self._maps[step.depth]
        if table is not None:
            survival = table(survival)
        if self._joint:
            accept = torch.where(step.alive, accept, 0.0)
        return step.alive & self.rule.keep(step.depth, accept, survival, following), survival
