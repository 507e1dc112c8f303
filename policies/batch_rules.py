"""Batches: the streams that share a verification, what their steps cost, and the learned policies that weigh both.

A learned policy of batches weighs the expected tokens of every stream against the seconds of all.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .arguments import validate_number
from .contract import Array, DraftStep, DraftTree, RoundOutcome, State
from .costs import Costs, CostTable
from .errors import InputError, PolicyError
from .kernels import on_first_use
from .learned import LearnedPolicy
from .profile import Profile
from .rules import BatchRule, interpolate_factors

kernels = on_first_use("trees")

NOT_DRAFTED = -1.0


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of S streams; within a batch the order of rows does not matter."""

    members: Array  # [M] int64, the streams with a round, batch after batch, each sorted by key
    starts: Array  # [G + 1] int64, index of the first member of each batch
    largest: int  # streams of the largest batch

    @staticmethod
    def of(batch: Array, keys: Array) -> Batches:
        """Return the batches of `batch` [S] int64 (see `DraftStep`; -1 = no round), sorted by `keys` [S] int64."""
        return _batches_of(batch.tobytes(), keys.tobytes())

    @property
    def sizes(self) -> Array:
        """[G] int64, streams of each."""
        return np.diff(self.starts)

    def spread(self, values: Array, streams: int) -> Array:
        """Return [S, ...], the value [G, ...] of each stream's batch; zeros for streams without a round."""
        out = np.zeros((streams, *values.shape[1:]), dtype=values.dtype)
        out[self.members] = values.repeat(self.sizes, axis=0)
        return out

    def sums(self, values: Array) -> Array:
        """Return [G, ...], the sums over each batch of values [S, ...]."""
        if not len(self.members):
            return np.zeros((0, *values.shape[1:]), dtype=values.dtype)
        out: Array = np.add.reduceat(values[self.members], self.starts[:-1], axis=0)
        return out

    def best(self, values: Array, offered: Array, budgets: Array) -> Array:
        """Return [S, N] bool, the `budgets` [G] largest of the offered values [S, N] float64 of each batch.

        No value may be above its parent's.
        """
        sent = np.zeros_like(offered)
        kernels().send_best(np.ascontiguousarray(values), offered, self.members, self.starts, budgets, sent)
        return sent

    def best_budgets(
        self, values: Array, offered: Array, verify: Array, rates: Array, spent: Array | None = None
    ) -> Array:
        """Return [G] int64, how many of the largest offered values of each batch to send; the smallest of equal ones.

        Args:
            values, offered: see `best`.
            verify: [R, T] seconds; see `CostGrid`.
            rates: [R] tokens that a second is worth, by streams; 0 = maximise the tokens per second of this round.
            spent: [G] float64, seconds of the round before the verification.
        """
        budgets = np.zeros(len(self.sizes), dtype=np.int64)
        spent = np.zeros(len(budgets)) if spent is None else spent
        kernels().best_budgets(values, offered, self.members, self.starts, spent, verify, rates, budgets)
        return budgets


@functools.lru_cache(maxsize=4)  # the same at each depth of a round; arrays have no hash, so they are passed as bytes
def _batches_of(batch_bytes: bytes, key_bytes: bytes) -> Batches:
    batch, keys = np.frombuffer(batch_bytes, dtype=np.int64), np.frombuffer(key_bytes, dtype=np.int64)
    order = np.lexsort((keys, batch))[np.count_nonzero(batch < 0) :]  # stable; streams without a round come first
    sorted_batch = batch[order]
    bounds = np.flatnonzero(sorted_batch[1:] != sorted_batch[:-1]) + 1
    starts = np.concatenate([[0], bounds, [len(order)]]) if len(order) else np.zeros(1, dtype=np.int64)
    return Batches(order, starts, int(np.diff(starts).max(initial=0)))


def linear_costs(draft: float = 0.1, token: float = 0.01) -> Costs:
    """Return costs in units of a target call of one token, for use without a profile.

    Args:
        draft: of a draft step.
        token: of each token beyond the first, as a share of a draft step, or of a verification.
    """
    table = CostTable(0.0, (draft, draft), 0.0, (1.0, 1.0 + token))
    return Costs(table, table, 0.0, 0.0, (0.0, 0.0))


@dataclass(eq=False)
class CostGrid:
    """Seconds of the steps of a batch as float64 tables, which grow with the batches.

    Args:
        costs: of the steps, such as a profile.
        decision: seconds of a decision, one for each draft step.
        context: tokens in the cache; None = midway between the contexts of `costs`.

    Attributes:
        drafts: [2, R] of the first and each later draft step of a round, by streams.
        verify: [R, T] of a verification by streams and tokens in all, anchors included.
    """

    costs: Costs
    decision: float = 0.0
    context: float | None = None

    def __post_init__(self) -> None:
        # No fields: a digest of a policy must not depend on how far the tables have grown.
        self.drafts, self.verify = np.zeros((2, 0)), np.zeros((0, 0))

    @staticmethod
    def from_options(owner: str, profile: str | Path | Profile, draft: float, token: float) -> CostGrid:
        """Return the costs of a profile or of its path, or `linear_costs` of `draft` and `token` if it is empty.

        Raises:
            PolicyError: there is no such profile.
        """
        if not profile:
            draft, token = (validate_number(owner, k, v, 0.0) for k, v in (("draft", draft), ("token", token)))
            return CostGrid(linear_costs(draft, token))
        try:
            return CostGrid(profile if isinstance(profile, Profile) else Profile.load(str(profile)))
        except InputError as error:
            raise PolicyError(f"{owner}: {error.command_line.removeprefix('--profile: ')}") from None

    def with_profile(self, profile: Profile) -> CostGrid:
        """Return the costs of a profile if these are the default costs, otherwise return self."""
        return CostGrid(profile) if self.costs == linear_costs() else self

    def extend_to(self, streams: int, nodes: int) -> CostGrid:
        """Extend the tables to so many streams, each with up to so many drafted tokens, and return self."""
        rows = max(len(self.verify), 16, 1 << streams.bit_length())
        tokens = max(rows * (nodes + 1) + 1, self.verify.shape[1])
        if (rows, tokens) != self.verify.shape:
            costs, context, count = self.costs, self.context, np.arange(rows)
            if context is None:
                context = 0.5 * (costs.low.context + costs.high.context)
            # No streams cost as one does, and fewer tokens than anchors as the anchors.
            batch, sent = np.broadcast_arrays(np.maximum(count, 1)[:, None], np.arange(tokens))
            verify = costs.verify_s(batch, np.maximum(sent, batch), context)
            drafts = np.stack([costs.first_draft_s(count, context), costs.draft_s(count, context)])
            self.drafts = np.ascontiguousarray(drafts + self.decision * (count > 0), dtype=np.float64)
            self.verify = np.ascontiguousarray(verify, dtype=np.float64)
        return self

    def drafting_s(self, streams: Array, steps: Array) -> Array:
        """Return the seconds of so many draft steps of so many streams, broadcast."""
        first, later = self.drafts[:, streams]
        out: Array = (steps > 0) * first + np.maximum(steps - 1, 0) * later
        return out

    def length_rates(self, streams: Array, tokens: Array) -> Array:
        """Return [n, K + 1] tokens per second of every fixed length in batches of `streams` [n].

        `tokens` [K + 1] or [n, K + 1] are those that a stream is expected to commit in a round of each length.
        """
        lengths, rows = np.arange(tokens.shape[-1]), streams[:, None]
        self.extend_to(int(streams.max(initial=1)), len(lengths))
        out: Array = rows * tokens / (self.drafting_s(rows, lengths) + self.verify[rows, rows * (lengths + 1)])
        return out


@dataclass(frozen=True, slots=True)
class BatchState:
    """State of `BatchStop`; below 0 = not drafted."""

    key: Array  # [S] int64
    batch: Array  # [S] int64
    latest: Array  # [S, B] float64, S_j of the last depth
    expected: Array  # [S, B] float64, expected survival of the token after each branch
    survivals: Array  # [S, M] float64, of the tokens of all depths so far


class BatchStop(LearnedPolicy):
    """Extends the drafts of those streams of a batch for which a further draft step pays, and sends all drafted tokens.

    A second is worth rho(n) tokens in a batch of n streams: the rate of the best fixed length, 0 included, at the mean
    acceptance of the training traces, times the factor of the rule (`BatchRule.rates`).

    At depth j the next token of a branch is expected to survive with e = S_j next_j, and the t-th one with
    e a_{j+2} ... a_{j+t}. The policy drafts t more tokens of the g branches with the largest e. It chooses the g and t that
    maximise the expected tokens less rho(n) times the seconds of t draft steps of g rows, each with a decision, and of the
    verification. It stops if stopping is worth as much. Thus all streams share the cost of a draft step, and plain decoding
    is a choice at depth 0. Tokens before the `first` decision of the rule survive with the mean acceptance.

    Costs are `metadata.profile`, acceptance is `metadata.acceptance`. The policy is for chains: in a tree each branch counts
    as one that draws one token. Arguments as of `LearnedPolicy`.

    Raises:
        PolicyError: the metadata has no profile, or no acceptance at the depths of the policy.
    """

    reads_seconds: ClassVar[bool] = False
    rule: BatchRule
    profile: Profile
    joint: ClassVar[bool] = True

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        metadata, depth = self.metadata, self.max_depth
        if len(metadata.acceptance) < depth:
            text = f"expected the mean acceptance at {depth} depths, got {len(metadata.acceptance)}; train the policy again"
            raise PolicyError(f"{self.name}: rule batch: {text}")
        try:
            self.profile = Profile.from_dict(metadata.profile, "the profile that the policy was trained with")
        except InputError as error:
            raise PolicyError(f"{self.name}: rule batch: {error.command_line.removeprefix('--profile: ')}") from None
        self._grid = CostGrid(self.profile, self.profile.decision(self.cost_name))
        self._fixed_grid = CostGrid(self.profile)  # fixed lengths take no decisions
        acceptance = metadata.acceptance[:depth]
        self._means: Array = np.cumprod(np.array(acceptance, dtype=np.float64))
        # By depth j: relative survival of the tokens 0, 1, ... after x_{j+1}; `acceptance[i]` is a_{i+1}.
        self._ahead = [np.cumprod([1.0, *acceptance[j + 1 :]]) for j in range(depth + 1)]
        self._known_rates: dict[tuple[int, int], Array] = {}

    @property
    def cost_name(self) -> str:
        """See `StopPolicy`. A decision costs more than one of the same head under another rule."""
        return f"{super().cost_name}?rule=batch"

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
        depth, alive, branches = step.depth, step.alive, step.alive.shape[1]
        batches = Batches.of(step.batch, state.key)
        # The head's product begins at the first decision about a drawn token; the tokens before have the mean S_j.
        begins = depth <= max(self.first, 1)
        outputs, _ = self.survive(step, None if begins else state.latest)
        survival, survivals = outputs[0], np.zeros((len(alive), 0))
        if depth > 1 and begins:
            survival = survival * self._means[depth - 2]
        elif not begins:  # S_j is recalibrated by depth, but the sent tokens must be closed under parents
            survival = np.minimum(survival, _parent_values(state.latest, step.parent))
        if depth:  # branches that ended or met a limit were drafted, but not read
            unread = _parent_values(state.expected, step.parent)
            survivals = np.concatenate([state.survivals, np.where(alive, survival, unread)], 1)
        gains, kept = survival * outputs[2], np.zeros_like(alive)
        ahead = self._ahead[depth][: max(self.max_depth - depth, 1)]
        # A draft step may read a row for each branch of each stream, and a round verify all that can still be drafted.
        grid = self._grid.extend_to(batches.largest * branches, survivals.shape[1] + branches * len(ahead))
        kernels().draft_on(
            batches.members, batches.starts, alive, survivals, gains, self.rule.send == "best", depth, grid.drafts,
            grid.verify, self._rates(len(grid.verify)), ahead, kept,
        )  # fmt: skip
        return kept, BatchState(state.key, step.batch, survival, np.where(kept, gains, NOT_DRAFTED), survivals)

    def latest(self, state: State) -> Array:
        """See `LearnedPolicy.latest`."""
        survival: Array = state.latest
        return survival

    def _rates(self, rows: int) -> Array:
        """Return [R], the tokens that a second is worth, by streams."""
        key = rows, self.max_depth  # `limited` copies share the dictionary
        if key not in self._known_rates:
            streams = np.arange(rows)
            self._known_rates[key] = self.fixed_rate(streams) * interpolate_factors(self.rule.rates, streams)
        return self._known_rates[key]

    def fixed_rate(self, streams: Array) -> Array:
        """Return [n] tokens per second of the best fixed length in batches of `streams` [n], at the mean acceptance."""
        tokens = np.cumsum(np.concatenate([[1.0], self._means[: self.max_depth]]))  # [K + 1]
        rates: Array = self._fixed_grid.length_rates(streams, tokens).max(1)
        return rates

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Drop the round."""
        return self._before_round(state.key, state.batch)


def _parent_values(values: Array, parent: Array) -> Array:
    """Return [S, B] the values of the branches' parents; a single column as it is."""
    return values if values.shape[1] == 1 else np.take_along_axis(values, parent, 1)


class BatchPolicy(BatchStop):
    """A `BatchStop` that sends only the drafted tokens that are worth their verification.

    It sends the m drafted tokens of the batch with the largest survival, and chooses the m that maximises their sum less
    rho(n) times the seconds of the verification. Tokens without a decision, as at the last depth, have the expected survival.
    If tokens are hidden (`rejection`), `select` is called level by level and all tokens are sent.
    """

    def select(self, tree: DraftTree, state: State) -> Array | None:
        """Return the tokens that are worth their verification."""
        if tree.by_level or (self.first and not state.latest.shape[1]):  # or no stream reached a decision
            return None
        streams, nodes = tree.drawn.shape
        # Columns of `survivals` and nodes are both in the order of depths, so the columns are the first nodes.
        read = min(state.survivals.shape[1], nodes)
        values = np.full((streams, nodes), NOT_DRAFTED)
        values[:, :read] = state.survivals[:, :read]
        last = read - state.expected.shape[1] if read else 0  # first node at the depth of the last decision
        after = np.flatnonzero(tree.depth[0] == (tree.depth[0, read - 1] if read else 0) + 1)
        values[:, after] = state.expected[:, np.maximum(tree.parent[0, after] - last, 0)]
        offered = tree.drawn & (values >= 0.0)
        batches = Batches.of(state.batch, state.key)
        verify = self._grid.extend_to(batches.largest, nodes).verify
        return batches.best(values, offered, batches.best_budgets(values, offered, verify, self._rates(len(verify))))


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
    if policy.rule.kind == "gain":
        raise PolicyError(f"{where} needs a policy of chains that predicts survival, not {policy.rule.kind}")
    if profile is not None:
        metadata = dataclasses.replace(metadata, profile=profile.record(policy.cost_name))
    elif not metadata.profile:
        raise PolicyError(f"{where} needs a latency profile; give one (profile=FILE)")
    if rule is None:
        default = BatchRule("best" if metadata.verification in ("match", "point") else "all")
        trained = policy.rule if isinstance(policy.rule, BatchRule) else default
        # Rates are relative to fixed lengths' and hold roughly elsewhere; whether decisions pay depends on the costs.
        lengths = trained.lengths if profile is None else ()
        rule = dataclasses.replace(trained, send=send or trained.send, lengths=lengths)
    kind = BatchPolicy if rule.send == "best" else BatchStop
    parts = policy.head, policy.accept, policy.next, rule, policy.max_depth, metadata, policy.survival
    changed = kind(policy.name, policy.features, *parts)
    changed.drafter = policy.drafter
    return changed
