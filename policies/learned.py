"""Learned policies: head, calibration and stop rule, each replaceable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self

from .calibration import NO_PIECES, Calibrator, PathCalibrator, SurvivalMaps
from .contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from .errors import PolicyError
from .features import Kind, feature
from .heads.base import NO_HIDDEN, Head, Hidden
from .kernels import on_first_use
from .rules import THRESHOLD_RULES, BatchRule, Continuation, Derived, Rule, Threshold
from .training_metadata import TrainingMetadata
from .tree_rules import TreeRule, kernels as tree_kernels

kernels = on_first_use("decisions")

_NO_SURVIVAL = np.zeros((1, 0))


class LearnedPolicy(StopPolicy):
    """Multiplies calibrated `accept` along each branch to S_j, recalibrates it by depth, and applies a stop rule.

    The state is S_j [S, B] float64. `features` are those of the head, in its order; `accept` and `next_` calibrate its
    outputs and `survival` their product.

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
        metadata: TrainingMetadata | None = None,
        survival: SurvivalMaps | None = None,
    ) -> None:
        self.name, self.features = name, tuple(features)
        self.head, self.accept, self.next, self.rule = head, accept, next_, rule
        self.first, self.max_depth, self.unasked = rule.first, max_depth, rule.unasked()
        self.metadata, self.survival = metadata or TrainingMetadata(), survival
        self._tables = [NO_PIECES] * (max_depth + 1) if survival is None else survival.by_depth(rule.first)
        self.sizes: Mapping[str, int] = head.sizes
        self.hidden = tuple(head.sizes)

    def with_rule(self, rule: Rule) -> Self:
        """Return this policy with another rule of the same class of policies; see `batch_rules.for_batches` too."""
        parts = self.head, self.accept, self.next, rule, self.max_depth, self.metadata, self.survival
        return type(self)(self.name, self.features, *parts)

    def probabilities(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> tuple[Array, Array]:
        """Return calibrated (accept, next), each [...] float64, of features [..., F] float32 and hidden states [..., H]."""
        shape = features.shape[:-1]
        rows = np.ascontiguousarray(features, dtype=np.float32).reshape(math.prod(shape), features.shape[-1])
        states = {name: values.reshape(-1, values.shape[-1]) for name, values in hidden.items()}
        scores = self.head.scores(rows, depth, states)
        lags = 0 < depth <= self.head.lag  # no drawn token is scored yet
        accept = np.ones(len(rows)) if lags else self.accept(scores[:, 0])
        return accept.reshape(shape), self.next(scores[:, 1]).reshape(shape)

    def survive(self, step: DraftStep, before: Array | None) -> tuple[Array, Array]:
        """Return S_j, accept and next of a depth, [3, S, B] float64 (0 where not alive), and the kept branches [S, B] bool.

        Args:
            step: of the depth.
            before: [S, B'] S_j of the depth before; None = the product begins here.
        """
        alive, depth, hidden = step.alive, step.depth, step.hidden
        rows = step.features.reshape(alive.size, step.features.shape[-1])  # [S B, F]
        if hidden:
            hidden = {name: values.reshape(-1, values.shape[-1]) for name, values in hidden.items()}
        if alive.size > 1 and not alive.all():
            at = np.flatnonzero(alive)
            rows, hidden = rows[at], {name: values[at] for name, values in hidden.items()}
        values, kept, rule = np.empty((3, *alive.shape)), np.empty(alive.shape, dtype=bool), self.rule
        kernels().decide(
            self.head.scores(rows, depth, hidden), alive, step.parent, _NO_SURVIVAL if before is None else before, depth,
            self.head.lag, self.accept.pieces, self.next.pieces, self._tables[depth], rule.by, rule.strict, rule.together,
            rule.threshold_at(depth, step.batch), values, kept,
        )  # fmt: skip
        return values, kept

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that pass the rule."""
        # S_0 is 1: the product begins at depth 1, or at the first decision.
        values, kept = self.survive(step, state if step.depth > 1 and step.depth > self.first else None)
        return kept, values[0]

    def latest(self, state: State) -> Array:
        """Return S_j [S, B] of the last decision."""
        survival: Array = state
        return survival


class ContinuationPolicy(LearnedPolicy):
    """Continues while the second output of the head, a value in tokens, is above the rule's margin.

    If the rule remembers, the head reads two depths: the features of this one and those of the previous decision in this
    round (0 at the first one). The state holds the remembered features [S, B, M] float32. The calibrations are not used.
    """

    rule: Continuation

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        if not isinstance(self.rule, Continuation) or self.hidden:
            raise PolicyError(
                f"{self.name}: expected a head of scalar features and the rule continuation, not the rule {self.rule.kind} "
                f"and a head that reads {', '.join(self.hidden) or 'scalars'}; choose another head or rule"
            )
        self._memory = np.array(remembered(self.features) if self.rule.remembers else [], dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches whose value of continuing is above the margin."""
        rows, alive, count = step.features, step.alive, step.features.shape[-1]
        if len(self._memory):
            rows = np.zeros((*alive.shape, count + len(self._memory)), dtype=np.float32)  # [S, B, F + M]
            rows[..., :count] = step.features
            if step.depth > self.first:
                one = state.shape[1] == 1
                rows[..., count:] = state if one else np.take_along_axis(state, step.parent[..., None], 1)
            state = step.features.take(self._memory, -1)
        at = np.flatnonzero(alive)
        value = self.head.scores(rows.reshape(alive.size, rows.shape[-1])[at], step.depth)[:, 1]
        kept = np.zeros(alive.shape, dtype=np.bool_)
        kept.flat[at] = value > self.rule.margin
        return kept, state


def remembered(features: Sequence[str]) -> list[int]:
    """Return the indices of the features that differ from depth to depth."""
    return [at for at, name in enumerate(features) if feature(name).kind in (Kind.PRE, Kind.POST) and name != "depth"]


def head_names(features: Sequence[str], rule: Rule) -> tuple[str, ...]:
    """Return the columns of the head: the features, and those of the depth before if the rule remembers them."""
    remembers = isinstance(rule, Continuation) and rule.remembers
    return (*features, *(features[at] for at in remembered(features) if remembers))


class TreeGain(LearnedPolicy):
    """Tracks the survival of every node, the calibrated probability that its path is accepted, and keeps what pays.

    The expected accepted length of a set of nodes is the sum of their survivals (OPT-Tree, arXiv 2406.17276, eq. 5). After
    each depth the branches are extended whose expected children pay for the draft step and for their verification
    (`TreeRule`); at the end the best nodes are verified, as many as pay for themselves. It reads drawn tokens and removes
    some, so it is for `match` verification or temperature 0. The head reads scalars only.

    The state within a round is survival (-1 = not read) and next of all nodes that were decided on [S, 2, N], and those of
    the last depth [S, 2, B].
    """

    reads_seconds: ClassVar[bool] = False
    accept: PathCalibrator
    next: PathCalibrator
    rule: TreeRule

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        if not isinstance(self.rule, TreeRule) or {type(self.accept), type(self.next)} != {PathCalibrator}:
            raise PolicyError("a tree policy has the rule gain and calibrations of paths")
        if self.hidden:
            raise PolicyError(f"{self.name}: a tree policy reads scalars only, not {', '.join(self.hidden)}")
        self._maps: dict[tuple[int, int], Array] = {}  # by depth and B, [2, B, 3] maps of `accept` and `next`

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that are worth another draft step."""
        depth, rule, (streams, branches), size = step.depth, self.rule, step.alive.shape, step.alive.size
        unknown = state is None or depth <= max(self.first, 1)  # nothing was read before the first decision
        known, before = (np.empty((streams, 2, 0)),) * 2 if unknown else state
        level, rows, parent_chance = rule.level(depth, branches), np.empty(size, dtype=np.int64), np.empty(size)
        read = np.empty((size, step.features.shape[2]), dtype=np.float32)
        count = tree_kernels().read_branches(
            np.ascontiguousarray(step.alive), np.ascontiguousarray(step.parent), step.features, before, level.ranks,
            level.mean, level.mean_parent, level.floor, rule.share_table, rows, parent_chance, read,
        )  # fmt: skip
        scores = self.head.scores(read[:count], depth)
        if (maps := self._maps.get((depth, branches))) is None:
            both = [calibrator.maps(depth, level.ranks) for calibrator in (self.accept, self.next)]
            maps = self._maps[depth, branches] = np.stack(both)
        values = np.empty((streams, 2, branches))
        tree_kernels().survive(scores, rows, parent_chance, maps, depth == 0, values)
        if depth == 0:  # the root is no node
            return rule.extend(0, values, known), None
        known = np.concatenate((known, values), 2)  # [S, 2, N + B]
        return rule.extend(depth, values, known), (known, values)

    def node_survival(self, tree: DraftTree, state: State) -> Array:
        """Return [S, N], the survival of the nodes: expected if never read, -1 if not drawn."""
        parent, depth, drawn = (np.ascontiguousarray(values) for values in (tree.parent, tree.depth, tree.drawn))
        return self.rule.survival(parent, depth, drawn, np.empty((len(drawn), 2, 0)) if state is None else state[0])

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the nodes that are worth their verification."""
        return self.rule.select(self.node_survival(tree, state))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Reset the state of the round."""
        return None


RULES: Mapping[str, Callable[..., Rule]] = {
    **{kind: partial(Threshold, kind) for kind in THRESHOLD_RULES},
    **{rule.kind: rule for rule in (Derived, Continuation, BatchRule, TreeRule)},
}


def build_rule(raw: Mapping[str, Any]) -> Rule:
    """Return the rule saved as `raw` (`Rule.to_dict`); raise `PolicyError` if it is unknown or damaged."""
    try:
        if build := RULES.get(raw["kind"]):
            return build(**{name: value for name, value in raw.items() if name != "kind"})
    except PolicyError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PolicyError(f"rule: {raw!r} lacks or mangles {error}") from None
    raise PolicyError(f"unknown rule {raw['kind']!r}; expected {', '.join(RULES)}")
