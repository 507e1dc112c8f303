"""A learned policy: head + calibrator + stop rule, each replaceable."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..contract import DraftStep, State, StopPolicy
from ..heads.base import NO_HIDDEN, Hidden
from ..heads.build import Head
from ..rules.base import Rule
from .calibration import NO_PIECES, Array, Calibrator, kernels
from .survival import SurvivalMaps


@dataclass(frozen=True)
class Facts:
    """What a policy was trained for and how it did; nothing here changes a decision.

    Attributes:
        temperature, verification, label: of the traces; several temperatures where the head reads the temperature.
        shaping: what else changed the distribution that the traces were sampled from (`decode.Shaping.to_dict`).
        pair: hashes of target, draft and tokenizer.
        rho: tokens per second that the derived rule assumes.
        acceptance: a_1..a_K that it looks ahead with.
        profile: the latency profile as JSON, or empty.
        provenance: command, versions, seed, traces.
        metrics: of prompts that influenced nothing in the policy.
        prompts: hashes of the training prompts: "fit" those that the head was fitted on, "select" those of early stopping,
            calibration, thresholds and rho, "report" those of held-out figures, which influence nothing.
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
    shaping: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, list[str]] = field(default_factory=dict)

    def covers(self, temperature: float) -> bool:
        """Whether the policy was trained for this temperature: for it, or for some below and some above."""
        known = self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)
        return min(known) <= temperature <= max(known)


class LearnedPolicy(StopPolicy):
    """Multiplies calibrated `accept` along each branch to S_j, recalibrates it by depth, and lets a rule decide.

    The state is S_j [S, B] float64.

    Args:
        name: shown in reports.
        features: the head's, in its order. Its hidden states are the head's as well.
        head, accept, next_, rule: its parts; `accept` and `next_` calibrate its outputs `accept` and `next`.
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
        next_: Calibrator,
        rule: Rule,
        max_depth: int,
        facts: Facts | None = None,
        survival: SurvivalMaps | None = None,
    ) -> None:
        self.name, self.features = name, tuple(features)
        self.head, self.accept, self.next, self.rule = head, accept, next_, rule
        self.first, self.max_depth, self.unasked = rule.first, max_depth, rule.unasked()
        self.facts = facts or Facts()
        self.survival = survival
        self._tables = [NO_PIECES] * (max_depth + 1) if survival is None else survival.by_depth(rule.first)
        self.sizes: Mapping[str, int] = head.sizes
        self.hidden = tuple(head.sizes)
        self._prepare()

    def _prepare(self) -> None:
        """Make what a kind of policy needs of its parts; `PolicyError` where they lack it."""

    def with_rule(self, rule: Rule) -> LearnedPolicy:
        """Return this policy under another rule."""
        parts = self.head, self.accept, self.next, rule, self.max_depth, self.facts, self.survival
        return LearnedPolicy(self.name, self.features, *parts)

    def with_head(self, head: Head) -> LearnedPolicy:
        """Return this policy with another head, fitted as its own was but on other prompts."""
        other = copy.copy(self)
        other.head = head
        return other

    def probabilities(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> tuple[Array, Array]:
        """Return calibrated (accept, next), each [...] float64, of features [..., F] float32 and hidden states [..., H]."""
        shape = features.shape[:-1]
        # Heads of hidden states alone have F = 0: of no numbers at all, reshape cannot tell what -1 stands for.
        rows = np.ascontiguousarray(features, dtype=np.float32).reshape(math.prod(shape), features.shape[-1])
        states = {name: values.reshape(-1, values.shape[-1]) for name, values in hidden.items()}
        scores = self.head.scores(rows, depth, states)
        accept, next_ = self.accept(scores[:, 0]), self.next(scores[:, 1])
        # A head that lags has scored nothing of what was drawn so far.
        accept = np.ones_like(accept) if 0 < depth <= self.head.lag else accept
        return accept.reshape(shape), next_.reshape(shape)

    def survive(self, step: DraftStep, before: Array | None) -> tuple[Array, Array]:
        """Return [3, S, B] float64, S_j, accept and next of a depth (0 where a branch is not alive), and [S, B] bool, which
        branches the rule keeps.

        Args:
            step: of the depth.
            before: [S, B'] S of the depth before; None = the product begins here.
        """
        alive, depth, features = step.alive, step.depth, step.features
        rows, hidden = features.reshape(alive.size, features.shape[-1]), step.hidden  # [S B, F]
        if hidden:
            hidden = {name: values.reshape(-1, values.shape[-1]) for name, values in hidden.items()}
        if alive.size > 1 and not alive.all():  # only these are scored
            at = np.flatnonzero(alive)
            rows, hidden = rows[at], {name: values[at] for name, values in hidden.items()}
        found, kept = np.empty((3, *alive.shape)), np.empty(alive.shape, dtype=bool)
        accept, next_, rule = self.accept, self.next, self.rule
        kernels().decide(
            self.head.scores(rows, depth, hidden),
            alive,
            step.parent,
            _NONE if before is None else before,
            depth,
            self.head.lag,
            accept.scale,
            accept.pieces,
            next_.scale,
            next_.pieces,
            self._tables[depth],
            rule.by,
            rule.strict,
            rule.together,
            rule.threshold_at(depth, step.batch),
            found,
            kept,
        )
        return found, kept

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that the rule keeps."""
        depth = step.depth
        # S_0 is 1, so the product begins at depth 1, or at the first depth at which the policy is asked.
        found, kept = self.survive(step, state if depth > 1 and depth > self.first else None)
        return kept, found[0]

    def latest(self, state: State) -> Array:
        """Return [S, B], S_j of the depth that was asked about last."""
        found: Array = state
        return found


_NONE = np.zeros((1, 0))
"""No survival of a depth before."""
