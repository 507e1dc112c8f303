"""The learned policy for batches: weigh the expected tokens of every stream against the seconds of all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .batches import Batches, CostGrid
from .contract import Array, DraftStep, DraftTree, RoundOutcome, State
from .errors import InputError, PolicyError
from .kernels import on_first_use
from .learned import LearnedPolicy
from .profile import Profile
from .rules import BatchRule, Rule

kernels = on_first_use("batches")

NOT_DRAFTED = -1.0


@dataclass(frozen=True, slots=True)
class BatchState:
    """State of `BatchStop`; below 0 = not drafted."""

    key: Array  # [S] int64
    batch: Array  # [S] int64
    latest: Array  # [S, B] float64, S_j of the last depth
    expected: Array  # [S, B] float64, expected survival of the token after each branch
    known: Array  # [S, M] float64, survival of the tokens of all depths so far


class BatchStop(LearnedPolicy):
    """Draft on for the streams of a batch for which it pays, as long as it pays for the batch; all of it is sent.

    A second is worth rho(n) tokens, n being the streams that share a verification: the rate of the best fixed length in a
    batch of n, 0 among them, at the mean acceptance of the training traces, times the rule's factor for the policy's
    rate. At depth j the token after a branch is expected to survive with e = S_j next_j, the t-th one with
    e a_{j+2} ... a_{j+t}. The g branches of the largest e are drafted t tokens further, g and t those of the most tokens less
    rho(n) times the seconds of t draft steps of g rows, a decision with each, and of the verification; none if stopping is
    worth as much. So all streams that a draft step helps share its price, and plain decoding, a choice at depth 0, is given
    up only for a faster round. If the rule's `first` decision comes later, the tokens before it survive with the mean
    acceptance.

    Costs are `metadata.profile`, acceptance is `metadata.acceptance`. It is for chains: in a tree each branch counts as one
    that draws one token. Arguments as of `LearnedPolicy`.

    Raises:
        PolicyError: the metadata has no profile, or no acceptance at the depths of the policy.
    """

    reads_seconds: ClassVar[bool] = False
    rule: BatchRule
    profile: Profile
    joint: ClassVar[bool] = True
    _trims_tokens: ClassVar[bool] = False

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        metadata, depth, known = self.metadata, self.max_depth, len(self.metadata.acceptance)
        if known < depth:
            text = f"expected the mean acceptance at {depth} depths, got {known}; train the policy again"
            raise PolicyError(f"{self.name}: rule batch: {text}")
        try:
            self.profile = Profile.from_dict(metadata.profile, "the profile that the policy was trained with")
        except InputError as error:
            raise PolicyError(f"{self.name}: rule batch: {error.command_line.removeprefix('--profile: ')}") from None
        self._grid = CostGrid.of_profile(self.profile, self.profile.decision(self.cost_name))
        self._undecided = CostGrid.of_profile(self.profile)  # fixed lengths take no decisions
        self._acceptance: Array = np.array(metadata.acceptance[:depth], dtype=np.float64)
        self._means: Array = np.cumprod(self._acceptance)
        self._cache: dict[tuple[str, int, int], Any] = {}  # shared by `limited` copies, so keys contain `max_depth`

    @property
    def cost_name(self) -> str:
        """See `StopPolicy`: its decisions cost other than those of the same head under another rule."""
        return f"{super().cost_name}?rule=batch"

    def with_rule(self, rule: Rule) -> LearnedPolicy:
        """Return this policy under another rule."""
        return for_batches(self, rule=rule) if isinstance(rule, BatchRule) else super().with_rule(rule)

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams without a round."""
        return self._before_round(keys.copy(), np.full(streams, -1, dtype=np.int64))

    def _before_round(self, key: Array, batch: Array) -> BatchState:
        streams, first = len(key), self.first
        if not first:
            none = np.zeros((streams, 0))
            return BatchState(key, batch, none, np.full((streams, 1), NOT_DRAFTED), none)
        mean = np.tile(self._means[:first], (streams, 1))  # tokens drafted without a decision are not read
        return BatchState(key, batch, np.zeros((streams, 0)), mean[:, -1:], mean[:, :-1])

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that the batch should draft on."""
        depth, alive = step.depth, step.alive
        batches = Batches.of(step.batch, state.key)
        if depth == 0 and not self._may_pay(batches):
            return np.zeros_like(alive), self._before_round(state.key, step.batch)
        # The head's product begins at the first decision about a drawn token; the tokens before have the mean S_j.
        begins = depth <= max(self.first, 1)
        outputs, _ = self.survive(step, None if begins else state.latest)
        survival, known = outputs[0], np.zeros((len(alive), 0))
        if depth > 1 and begins:
            survival = survival * self._means[depth - 2]
        elif not begins:  # S_j is recalibrated by depth, but the sent tokens must be closed under parents
            survival = np.minimum(survival, _of_parents(state.latest, step.parent))
        if depth:  # branches that ended or met a limit were drafted, but not read
            unread = _of_parents(state.expected, step.parent)
            known = np.concatenate([state.known, np.where(alive, survival, unread)], 1)
        gains = survival * outputs[2]
        kept = self._draft_on(batches, alive, known, gains, depth, self._shares(depth))
        return kept, BatchState(state.key, step.batch, survival, np.where(kept, gains, NOT_DRAFTED), known)

    def _draft_on(self, batches: Batches, alive: Array, known: Array, gains: Array, depth: int, shares: Array) -> Array:
        branches, kept = alive.shape[1], np.zeros_like(alive)
        # A draft step may read a row for each branch of each stream, and a round verify all that can still be drafted.
        grid = self._grid.fit(batches.largest * branches, known.shape[1] + branches * len(shares))
        kernels().draft_on(
            batches.members, batches.starts, alive, known, gains, self._trims_tokens, depth, grid.drafts, grid.verify,
            self._rates(len(grid.verify)), shares, kept,
        )  # fmt: skip
        return kept

    def _may_pay(self, batches: Batches) -> bool:
        """Return whether drafting would pay for any of the batches if every token were accepted."""
        return any(map(self._size_may_pay, batches.sizes.tolist()))

    def _size_may_pay(self, size: int) -> bool:
        key = "pays", size, self.max_depth
        if key not in self._cache:
            one, alive = Batches.of(np.zeros(size, dtype=np.int64), np.arange(size)), np.ones((size, 1), dtype=bool)
            kept = self._draft_on(one, alive, np.zeros((size, 0)), np.ones((size, 1)), 0, np.ones(self.max_depth))
            self._cache[key] = kept.any()
        return bool(self._cache[key])

    def latest(self, state: State) -> Array:
        """See `LearnedPolicy.latest`."""
        survival: Array = state.latest
        return survival

    def _shares(self, depth: int) -> Array:
        """Return [L], the survival of the tokens 0, 1, ... after the next one, as shares of that one's."""
        key = "shares", depth, self.max_depth
        if key not in self._cache:  # `acceptance[i]` is a_{i+1}, and the token after the next one is x_{depth+2}
            self._cache[key] = np.cumprod([1.0, *self._acceptance[depth + 1 : self.max_depth]])
        out: Array = self._cache[key]
        return out

    def _rates(self, rows: int) -> Array:
        """Return [R], the tokens that a second is worth, by streams."""
        key = "rates", rows, self.max_depth
        if key not in self._cache:
            self._cache[key] = self.fixed_rate(np.arange(rows)) * self.rule.rate_factors(np.arange(rows))
        out: Array = self._cache[key]
        return out

    def fixed_rate(self, streams: Array) -> Array:
        """Return [n] tokens per second of the best fixed length in batches of `streams` [n], at the mean acceptance."""
        tokens = np.cumsum(np.concatenate([[1.0], self._means[: self.max_depth]]))  # [K + 1]
        rates: Array = self._undecided.length_rates(streams, tokens).max(1)
        return rates

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Drop the round."""
        return self._before_round(state.key, state.batch)


def _of_parents(values: Array, parent: Array) -> Array:
    """Return [S, B] the values of the branches' parents; a single column as it is."""
    return values if values.shape[1] == 1 else np.take_along_axis(values, parent, 1)


class BatchPolicy(BatchStop):
    """The same, and of the drafted tokens those are sent that are worth their verification.

    Of the survivals of all drafted tokens of the batch, in descending order, the first m are sent, m that of the most tokens
    less rho(n) times the seconds of the verification; tokens without a decision, as at the last depth, have the expected
    survival. If tokens are hidden (`rejection`), `select` is called level by level and all are sent.
    """

    _trims_tokens = True

    def select(self, tree: DraftTree, state: State) -> Array | None:
        """Return the tokens that are worth their verification."""
        if tree.by_level or (self.first and not state.latest.shape[1]):  # or no stream reached a decision
            return None
        streams, nodes = tree.drawn.shape
        # Columns of `known` and nodes are both in the order of depths, so the columns are the first nodes.
        read = min(state.known.shape[1], nodes)
        values = np.full((streams, nodes), NOT_DRAFTED)
        values[:, :read] = state.known[:, :read]
        last = read - state.expected.shape[1] if read else 0  # first node at the depth of the last decision
        after = np.flatnonzero(tree.depth[0] == (tree.depth[0, read - 1] if read else 0) + 1)
        values[:, after] = state.expected[:, np.maximum(tree.parent[0, after] - last, 0)]
        offered = tree.drawn & (values >= 0.0)
        batches = Batches.of(state.batch, state.key)
        grid = self._grid.fit(batches.largest, nodes)
        return batches.best(
            values, offered, batches.best_budgets(values, offered, grid.verify, self._rates(len(grid.verify)))
        )


def for_batches(
    policy: LearnedPolicy, send: str = "", profile: Profile | None = None, rule: BatchRule | None = None
) -> BatchStop:
    """Return a learned policy of chains under the rule `batch`.

    Args:
        policy: its head and calibration are used.
        send: see `BatchRule`; by default that of the policy's rule, if it is `batch`, else `best` if the verification
            allows to remove drawn tokens, and `all` if not.
        profile: costs; by default those that the policy was trained with.
        rule: replaces `send`; by default the policy's rule with its rates, if it is `batch`.

    Raises:
        PolicyError: it is not a policy of chains that predicts survival, or its metadata lacks the costs.
    """
    where, metadata = f"{policy.name}: rule batch", policy.metadata
    if policy.rule.kind in ("gain", "continuation"):
        raise PolicyError(f"{where} needs a policy of chains that predicts survival, not {policy.rule.kind}")
    if not metadata.profile and profile is None:
        raise PolicyError(f"{where} needs a latency profile; give one (profile=FILE)")
    if profile is not None:
        metadata = dataclasses.replace(metadata, profile=profile.record(policy.cost_name))
    if rule is None:
        default = BatchRule("best" if metadata.verification in ("match", "point") else "all")
        trained = policy.rule if isinstance(policy.rule, BatchRule) else default
        # Rates are relative to fixed lengths' and hold roughly elsewhere; whether decisions pay depends on the costs.
        rule = BatchRule(send or trained.send, trained.rates, trained.first, trained.lengths if profile is None else ())
    kind = BatchPolicy if rule.send == "best" else BatchStop
    parts = policy.head, policy.accept, policy.next, rule, policy.max_depth, metadata, policy.survival
    return kind(policy.name, policy.features, *parts)
