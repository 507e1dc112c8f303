"""A learned policy for batches: what every stream's next token is expected to bring, weighed against the time of all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..contract import Array, DraftStep, DraftTree, RoundOutcome, State
from ..errors import InputError, PolicyError
from ..kernels import on_first_use
from ..learned.policy import LearnedPolicy
from ..profile import Profile
from ..rules.base import Rule
from ..rules.chains import BatchRule
from .grid import Grid, Grids, grids_of, length_rates
from .groups import Batches, batches_of

kernels = on_first_use("batches")

NOT_DRAFTED = -1.0


@dataclass(frozen=True, slots=True)
class BatchState:
    """Of `BatchStop`.

    Attributes:
        key, batch: [S] int64.
        latest: [S, B] float64, S_j of the last depth.
        expected: [S, B] float64, the survival that the token after each branch is expected to have; below 0 where none is
            drafted.
        known: [S, M] float64, survival of the tokens of all depths so far; below 0 where none was drafted.
    """

    key: Array
    batch: Array
    latest: Array
    expected: Array
    known: Array


class BatchStop(LearnedPolicy):
    """Drafts on, for those streams of a batch for which it pays, as long as it pays for the batch; all of it is sent.

    A second is worth rho(n) tokens, n being the streams that share a verification: the rate of the best fixed length in a
    batch of n, 0 among them, at the mean acceptance of the training traces, times what the rule says that the policy's own
    is of it (`train.fit.tuning.batches` solves that). At depth j the token after a branch is expected to survive with
    e = S_j next_j, the t-th one with e a_{j+2} ... a_{j+t}. The g branches of the largest e are drafted t tokens further, g
    and t those of the most tokens less rho(n) times the seconds of t draft steps of g rows, a decision with each, and of the
    verification; none where stopping is worth as much. So a draft step is bought by all the streams that it is good for
    together, and plain decoding, which is a choice at depth 0, is left only for what is expected to beat it. Where the rule's
    `first` decision comes later, the tokens before it survive with the mean acceptance.

    Costs are those of `facts.profile` (`profile`), acceptance is `facts.acceptance`. In a tree each branch counts as one
    that draws one token: it is made for chains. Arguments as of `LearnedPolicy`.

    Raises:
        PolicyError: the facts have no profile, or no acceptance as deep as the policy goes.
    """

    reads_seconds: ClassVar[bool] = False
    rule: BatchRule
    profile: Profile
    joint: ClassVar[bool] = True
    send: ClassVar[str] = "all"
    _trims_tokens: ClassVar[bool] = False

    def _prepare(self) -> None:
        """See `LearnedPolicy`."""
        told, depth = self.facts, self.max_depth
        if len(told.acceptance) < depth:
            raise PolicyError(
                f"{self.name}: rule batch: expected the mean acceptance at {depth} depths, got {len(told.acceptance)}; "
                "train the policy again"
            )
        try:
            self.profile = Profile.from_dict(told.profile, "the profile that the policy was trained with")
        except InputError as error:
            raise PolicyError(f"{self.name}: rule batch: {error.command_line.removeprefix('--profile: ')}") from None
        self._grids: Grids = grids_of(self.profile, self.profile.decision(self.cost_name))
        self._acceptance: Array = np.array(told.acceptance[:depth], dtype=np.float64)
        self._means: Array = np.cumprod(self._acceptance)
        self._rates: dict[tuple[int, int], Array] = {}
        self._pays: dict[tuple[int, int], bool] = {}
        self._shares: dict[tuple[int, int], Array] = {}

    @property
    def cost_name(self) -> str:
        """See `StopPolicy`: its decisions are others than those of the same head under another rule."""
        return f"{super().cost_name}?rule=batch"

    def with_rule(self, rule: Rule) -> LearnedPolicy:
        """Return this policy under another rule."""
        return for_batches(self, rule=rule) if isinstance(rule, BatchRule) else super().with_rule(rule)

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams without a round."""
        return self._begun(keys.copy(), np.full(streams, -1, dtype=np.int64))

    def _begun(self, key: Array, batch: Array) -> BatchState:
        """Return the state before a round."""
        streams, first = len(key), self.first
        if not first:
            none = np.zeros((streams, 0))
            return BatchState(key, batch, none, np.full((streams, 1), NOT_DRAFTED), none)
        mean = np.tile(self._means[:first], (streams, 1))  # nothing is read of what is drafted without a decision
        # What is expected of x_first, which the first decision is about; of those before it no more will be known.
        return BatchState(key, batch, np.zeros((streams, 0)), mean[:, -1:], mean[:, :-1])

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that the batch should draft on."""
        depth, alive = step.depth, step.alive
        batches = batches_of(step.batch, state.key)
        if depth == 0 and not self._may_pay(batches):
            return np.zeros_like(alive), self._begun(state.key, step.batch)
        # The head's product begins at the first decision about a drawn token; S_j of the tokens before that is the mean one.
        opens = depth <= max(self.first, 1)
        found, _ = self.survive(step, None if opens else state.latest)
        survival, known = found[0], np.zeros((len(alive), 0))
        if opens and depth > 1:
            survival = survival * self._means[depth - 2]
        if depth:  # what is not alive ended its text or met a limit: drafted, though nothing was read of it
            expected = _of_parents(state.expected, step.parent)
            if not opens:
                # Recalibrated by depth, S_j may rise above that of the parent; but what is sent must be closed under parents.
                survival = np.minimum(survival, _of_parents(state.latest, step.parent))
            known = np.concatenate([state.known, np.where(alive, survival, expected)], 1)
        gains, kept = survival * found[2], np.zeros_like(alive)
        ahead, branches = self._ahead(depth), alive.shape[1]
        # A draft step may read a row for each branch of each stream, and a round verify all that can still be drafted.
        grid = self._grids.of(batches.largest * branches, known.shape[1] + branches * len(ahead))
        kernels().draft_on(
            batches.members, batches.starts, alive, known, gains, self._trims_tokens, depth, grid.drafts, grid.verify,
            self._rate(grid), ahead, kept,
        )  # fmt: skip
        expected = np.where(kept, gains, NOT_DRAFTED)
        return kept, BatchState(state.key, step.batch, survival, expected, known)

    def _may_pay(self, batches: Batches) -> bool:
        """Whether drafting would pay for any of the batches if every token were accepted: else there is nothing to score."""
        sizes = {(size, self.max_depth) for size in batches.sizes.tolist()}  # `limited` shares what is known
        for size, depth in sizes - set(self._pays):
            one, kept = batches_of(np.zeros(size, dtype=np.int64), np.arange(size)), np.zeros((size, 1), dtype=bool)
            sure, ahead = np.ones((size, 1)), np.ones(depth)
            grid = self._grids.of(size, depth)
            kernels().draft_on(
                one.members, one.starts, sure > 0, np.zeros((size, 0)), sure, self._trims_tokens, 0, grid.drafts,
                grid.verify, self._rate(grid), ahead, kept,
            )  # fmt: skip
            self._pays[size, depth] = bool(kept.any())
        return any(self._pays[key] for key in sizes)

    def latest(self, state: State) -> Array:
        """See `LearnedPolicy.latest`."""
        found: Array = state.latest
        return found

    def _ahead(self, depth: int) -> Array:
        """Return [L], what the tokens 0, 1, ... after the next one survive with, as shares of it."""
        key = depth, self.max_depth  # `limited` shares what is known
        # `acceptance[i]` is a_{i+1}, and the token after the next one is x_{depth+2}.
        if key not in self._shares:
            self._shares[key] = np.cumprod(np.concatenate([[1.0], self._acceptance[depth + 1 : self.max_depth]]))
        return self._shares[key]

    def _rate(self, grid: Grid) -> Array:
        """Return [R] tokens that a second is worth, by streams."""
        key = len(grid.verify), self.max_depth
        if key not in self._rates:
            streams = np.arange(len(grid.verify))
            self._rates[key] = self.fixed_rate(streams) * self.rule.times(streams)
        return self._rates[key]

    def fixed_rate(self, streams: Array) -> Array:
        """Return [n] tokens a second of the best fixed length in batches of so many streams [n], at the mean acceptance."""
        tokens = np.cumsum(np.concatenate([[1.0], np.cumprod(self._acceptance[: self.max_depth])]))  # [K + 1]
        found: Array = length_rates(self._grids.costs, self._grids.context, streams, tokens).max(1)
        return found

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Forget the round."""
        return self._begun(state.key, state.batch)


def _of_parents(values: Array, parent: Array) -> Array:
    """Return [S, B] the values of branches' parents; where all have the same, [S, 1], as they are."""
    return values if values.shape[1] == 1 else np.take_along_axis(values, parent, 1)


class BatchPolicy(BatchStop):
    """The same, and of what was drafted those tokens are sent that are worth their verification.

    Of the survivals of all drafted tokens of the batch, falling, the first m are sent, m that of the most tokens less rho(n)
    times the seconds of the verification; tokens not asked about, as at the last depth, count as was expected of them. Where
    tokens are hidden (`rejection`), `select` is asked too early to know more than `keep` did: all is sent there.
    """

    send = "best"
    _trims_tokens = True

    def select(self, tree: DraftTree, state: State) -> Array | None:
        """Return the tokens that are worth their verification."""
        if tree.by_level or (self.first and not state.latest.shape[1]):  # or no stream came as far as a decision
            return None
        streams, nodes = tree.drawn.shape
        # Columns of `known` and nodes are both in the order of depths, so the columns are the first nodes.
        read = min(state.known.shape[1], nodes)
        values = np.full((streams, nodes), NOT_DRAFTED)
        values[:, :read] = state.known[:, :read]
        last = read - state.expected.shape[1] if read else 0  # where the depth that was asked about last begins
        after = np.flatnonzero(tree.depth[0] == (tree.depth[0, read - 1] if read else 0) + 1)
        # Nobody was asked about the level below: it counts as was expected when its parents were kept.
        values[:, after] = state.expected[:, np.maximum(tree.parent[0, after] - last, 0)]
        offered = tree.drawn & (values >= 0.0)
        batches = batches_of(state.batch, state.key)
        grid = self._grids.of(batches.largest, nodes)
        budgets, none = np.zeros(len(batches.sizes), dtype=np.int64), np.zeros(len(batches.sizes), dtype=np.int64)
        told = values, offered, batches.members, batches.starts
        kernels().best_budgets(*told, none, np.zeros(len(none)), grid.verify, self._rate(grid), budgets)
        sent = np.zeros_like(offered)
        kernels().send_best(*told, budgets, sent)
        return sent


def for_batches(
    policy: LearnedPolicy, send: str = "", profile: Profile | None = None, rule: BatchRule | None = None
) -> BatchStop:
    """Return a learned policy of chains under the rule `batch`.

    Args:
        policy: its head and calibration are used.
        send: see `BatchRule`; empty = what the policy's rule says, if it is `batch`; else `best` where its verification lets
            drawn tokens be left out, and `all` where not.
        profile: what rounds cost; by default the one that the policy was trained with.
        rule: in the place of `send`; by default the policy's own, if it has such a one, with its rates.

    Raises:
        PolicyError: it is no policy of chains that predicts survival, or lacks what the rule needs.
    """
    if policy.rule.kind in ("gain", "continuation"):
        raise PolicyError(
            f"{policy.name}: rule batch needs a policy of chains that predicts survival, not {policy.rule.kind}"
        )
    if not policy.facts.profile and profile is None:
        raise PolicyError(f"{policy.name}: rule batch needs a latency profile; give one (profile=FILE)")
    facts = policy.facts
    if profile is not None:
        facts = dataclasses.replace(facts, profile=profile.record(policy.cost_name))
    if rule is None:
        usual = BatchRule(send or ("best" if facts.verification in ("match", "point") else "all"))
        known = policy.rule if isinstance(policy.rule, BatchRule) else usual
        # Rates are relative to fixed lengths' and hold roughly elsewhere; whether decisions pay hangs on the costs.
        rule = BatchRule(send or known.send, known.rates, known.first, known.lengths if profile is None else ())
    kind = BatchPolicy if rule.send == "best" else BatchStop
    parts = policy.head, policy.accept, policy.next, rule, policy.max_depth, facts, policy.survival
    return kind(policy.name, policy.features, *parts)
