"""Learned policies: head, calibration and stop rule, each replaceable, and what they were trained for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self

from .contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from .display import training_facts
from .errors import PolicyError, SpecstopWarning
from .heads.base import NO_HIDDEN, Head, Hidden
from .kernels import on_first_use
from .rules import THRESHOLD_RULES, BatchRule, Derived, Rule, Threshold
from .tree_rules import TreeRule

KINDS = ("identity", "temperature", "isotonic")
NO_PIECES: Array = np.zeros((4, 0))

_MAX_SIZE = 1 << 20

kernels = on_first_use("heads")
tree_kernels = on_first_use("trees")


class Calibrator:
    """A monotone map from logits to probabilities.

    Args:
        kind: "identity", "temperature" (sigmoid of logit / T) or "isotonic" (piecewise linear in the logit).
        temperature: T.
        knots: [2, n] float32, the logits (increasing) and the probabilities (not decreasing) of an isotonic map.

    Attributes:
        pieces: float64; [1, 1] the factor of the logit in a sigmoid, or [4, n + 1] upper bound, start, value and slope of
            each piece of an isotonic map, which is constant outside its knots.
    """

    def __init__(self, kind: str = "identity", temperature: float = 1.0, knots: Array | None = None) -> None:
        if kind not in KINDS or not 0 < temperature < math.inf:
            raise PolicyError(
                f"calibration: expected {', '.join(KINDS)} at a temperature above 0, not {kind} at {temperature}"
            )
        self.kind, self.temperature = kind, temperature
        self.knots: Array = np.zeros((2, 0), dtype=np.float32) if knots is None else knots
        self.pieces = _pieces(self.knots) if kind == "isotonic" else np.array([[1.0 / temperature]])

    def __call__(self, logits: Array) -> Array:
        """Return the float64 probabilities, of the same shape as `logits`."""
        scores = np.ascontiguousarray(logits, dtype=np.float64)
        out = np.empty(scores.shape)
        kernels().calibrate(scores.reshape(-1), self.pieces, out.reshape(-1))
        return out


def _pieces(knots: Array) -> Array:
    """Return `Calibrator.pieces` of an isotonic map; raise `PolicyError` unless it is monotone within [0, 1]."""
    has_form = knots.ndim == 2 and knots.shape[0] == 2 and knots.shape[1] >= 2 and bool(np.isfinite(knots).all())
    if not has_form or (np.diff(knots, axis=1) < 0).any() or (knots[1] < 0).any() or (knots[1] > 1).any():
        raise PolicyError("calibration: expected knots [2, n], n of 2 or more, increasing, the second row in [0, 1]")
    x, y = knots.astype(np.float64)
    step = np.diff(x)
    slope = np.where(step > 0, np.diff(y) / np.maximum(step, 1e-12), 0.0)
    return np.stack(
        [np.append(x, np.inf), np.append(x[:1], x), np.append(y[:1], y), np.concatenate([[0.0], slope, [0.0]])]
    )


class SurvivalMaps:
    """Recalibrates the running product of `accept` by a monotone table at each depth: S_j = g_j(S_{j-1} accept_j).

    The product of calibrated factors is not calibrated, since the features at depth j also depend on the tokens before it.
    (Sequential temperature scaling of the confidence heads in DSpark, with tables instead of temperatures.)

    Args:
        tables: [L, K, 2, n] float32, knots (probabilities before and after, neither decreasing) for products that begin at
            depth 1..L, at depths 1..K. A table of equal rows changes nothing.
    """

    def __init__(self, tables: Array) -> None:
        has_form = tables.ndim == 4 and tables.shape[2] == 2 and tables.shape[3] >= 2 and 0 < tables.size <= _MAX_SIZE
        if not has_form or tables.dtype != np.float32:
            raise PolicyError(f"calibration: expected survival tables [L, K, 2, n], got {list(tables.shape)}")
        self.tables, self.depth = tables, int(tables.shape[1])
        self._pieces = [[NO_PIECES if np.array_equal(*table) else _pieces(table) for table in row] for row in tables]

    @property
    def changed(self) -> list[int]:
        """The depths at which a product that begins at depth 1 is changed."""
        return [depth for depth, piece in enumerate(self._pieces[0], 1) if piece.size]

    def by_depth(self, first: int) -> Sequence[Array]:
        """Return the maps at depths 0..K of a product that begins at depth `first`; `NO_PIECES` = unchanged."""
        start = max(first, 1)
        return [NO_PIECES, *(self._pieces[start - 1] if start <= len(self._pieces) else [NO_PIECES] * self.depth)]


class PathCalibrator(Calibrator):
    """Calibrates whole paths of a tree: P = sigmoid(scale_d logit(p sigmoid(l)) + tilt_d l + shift_{d,r}), at most p.

    p is the calibrated chance of the path to the parent, l the head's logit at depth d of a node of rank r. The plain product
    is wrong because the draft is often as confident after a wrong token as after a right one.

    Args:
        table: [D + 1, 2 + R] float32, by depth 0..D: scale, tilt, and the shifts of rank 0..R-1. The last row and the last
            shift apply to all deeper and lower nodes.
    """

    name = "path"

    def __init__(self, table: Array) -> None:
        super().__init__()
        if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] < 3 or not np.isfinite(table).all():
            raise PolicyError("calibration: expected by depth a scale, a tilt and shifts by rank, all finite")
        self.kind, self.knots, self._table = self.name, table, table.astype(np.float64)

    def maps(self, depth: int, ranks: Array) -> Array:
        """Return [B, 3], scale, tilt and shift of the branches of a depth with these ranks [B]."""
        row = self._table[min(depth, len(self._table) - 1)]
        shift = row[2 + np.minimum(ranks, len(row) - 3)]
        return np.stack([np.full(len(shift), row[0]), np.full(len(shift), row[1]), shift], 1)

    def of(self, parent_chance: Array, logits: Array, depth: int, ranks: Array) -> Array:
        """Return [..., B] chances of whole paths, given p and l [..., B] and the ranks [B] of the branches of a depth."""
        pair = np.broadcast_arrays(parent_chance, logits)
        parents, scores = (np.ascontiguousarray(v, dtype=np.float64).reshape(-1, len(ranks)) for v in pair)
        out = np.empty(scores.shape)
        tree_kernels().path_chances(parents, scores, self.maps(depth, ranks), out)
        return out.reshape(pair[0].shape)


# Options that remove unlikely tokens, which has no effect on greedy decoding.
_FILTERS = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_MAX_CHARACTERS = 200


@dataclass(frozen=True)
class TrainingMetadata:
    """Conditions and results of the training of a policy. They do not change decisions.

    Attributes:
        temperature, verification, label, sampling: of the traces; several temperatures if the head reads the temperature.
        pair: hashes of target, draft and tokenizer.
        rho, acceptance: tokens per second, and a_1..a_K, that rules assume.
        profile: the latency profile as JSON, or empty.
        provenance: command, versions, seed, traces.
        metrics: on prompts that influenced nothing in the policy.
        prompts: hashes of the training prompts: "fit" of the head, "select" of calibration, thresholds and rho, "report".
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
    sampling: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, list[str]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return facts for display."""
        return {
            "temperature": self.temperature,
            "filter": sampling_options_text(self.sampling),
            "verification": self.verification,
            **{f"pair: {role}": value for role, value in self.pair.items()},
            "rho (tokens/s)": self.rho,
            **training_facts(self.provenance, self.metrics),
        }

    def covers(self, temperature: float) -> bool:
        """Whether a temperature lies within those of the traces."""
        temperatures = self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)
        return min(temperatures) <= temperature <= max(temperatures)


@dataclass(frozen=True)
class Conditions:
    """Conditions under which a policy is used or a trace was recorded.

    Attributes:
        temperature: 0 = greedy; None = unknown: neither it nor `sampling` is compared.
        sampling: other options that change the distribution that is sampled from, by name.
        verification: mode; "" = any.
        pair: hashes of target, draft and tokenizer; empty = any.
        tree: name of the topology of rounds; "" = any.
    """

    temperature: float | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    verification: str = ""
    pair: Mapping[str, str] = field(default_factory=dict)
    tree: str = ""


def sampling_options_text(sampling: Mapping[str, Any], temperature: float = 1.0) -> str:
    """Return the options that have an effect at a temperature as text: `top-p 0.9, min-p 0.05`, or `none`."""
    words = []
    for name, value in sorted(sampling.items()):
        if temperature > 0 or name not in _FILTERS:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"{name.replace('_', '-')} {text}")
    return " ".join(", ".join(words).split())[:_MAX_CHARACTERS] or "none"  # values in files may have any length


def sampling_text(temperature: float | str | Sequence[float], sampling: Mapping[str, Any]) -> str:
    """Return `temperature 0.7, top-p 0.9`; with all temperatures if there are several."""
    if isinstance(temperature, str):
        return f"temperature {temperature}"
    temperatures = [temperature] if isinstance(temperature, float | int) else list(temperature)
    options = sampling_options_text(sampling, max(temperatures))
    return f"temperature {', '.join(f'{t:g}' for t in temperatures)}" + (f", {options}" if options != "none" else "")


def warn_other_conditions(policy: StopPolicy, used: Conditions, where: str) -> None:
    """Warn of each condition that differs from those of training; `where` is "these traces" or "this run"."""
    trained = getattr(policy, "metadata", None)
    if not isinstance(trained, TrainingMetadata) or trained is getattr(type(policy), "metadata", None):  # a rule
        return
    different: list[tuple[str, Any, Any]] = []  # name, of training, of use
    if used.temperature is not None:
        filters = [sampling_options_text(options, used.temperature) for options in (trained.sampling, used.sampling)]
        if not trained.covers(used.temperature):
            different.append(("temperature", trained.temperature, used.temperature))
        if filters[0] != filters[1]:
            different.append(("filter", filters[0], filters[1]))
    if used.verification and trained.verification != used.verification:
        different.append(("verification", trained.verification, used.verification))
    # A pair without a tokenizer, or a drafter that needs no draft, has fewer hashes.
    if hashes := {name: value for name, value in trained.pair.items() if used.pair.get(name, value) != value}:
        different.append(("pair", hashes, {name: used.pair[name] for name in hashes}))
    tree = trained.metrics.get("tree")  # of a tree policy
    if used.tree and isinstance(tree, str) and tree != used.tree:
        different.append(("tree", tree, used.tree))
    for name, expected, current in different:
        remedy = f"; --tree {expected} drafts it" if name == "tree" else ""
        message = f"{policy.name} was trained for another {name} ({expected}) than {where} ({current}){remedy}"
        warnings.warn(message, SpecstopWarning, stacklevel=4)


_NO_SURVIVAL = np.zeros((1, 0))


class LearnedPolicy(StopPolicy):
    """Multiplies calibrated `accept` along each branch to S_j, recalibrates it by depth, and applies a stop rule.

    The state is S_j [S, B] float64. `features` are those of the head, in its order; `accept` and `next_` calibrate its
    outputs and `survival` their product.

    Attributes:
        sizes: H of each hidden state that the head reads, by name.
        tables: the map of the product at each depth; see `SurvivalMaps.by_depth`.
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
        self.tables = [NO_PIECES] * (max_depth + 1) if survival is None else survival.by_depth(rule.first)
        self.sizes: Mapping[str, int] = head.sizes
        self.hidden = tuple(head.sizes)

    def describe(self) -> dict[str, Any]:
        """Return facts for display: head, rule, conditions of the training, provenance and metrics."""
        optional = {
            "hidden states": ", ".join(f"{name} ({size} numbers)" for name, size in self.sizes.items()),
            "batch sizes without a decision": self.rule.undecided,
            "survival recalibrated at depths": [] if self.survival is None else list(self.survival.changed),
        }
        return {
            "kind": "policy",
            "name": self.name,
            "head": self.head.kind,
            "rule": self.rule.kind,
            "features": ", ".join(self.features),
            **{name: value for name, value in optional.items() if value},
            "calibration": f"accept {self.accept.kind}, next {self.next.kind}",
            "first decision at depth": self.first,
            "max depth": self.max_depth,
            "weights": sum(array.size for array in self.head.tensors().values()),
            **self.metadata.describe(),
        }

    def with_rule(self, rule: Rule) -> Self:
        """Return this policy with another rule of the same class of policies; see `batch_rules.for_batches` too."""
        parts = self.head, self.accept, self.next, rule, self.max_depth, self.metadata, self.survival
        changed = type(self)(self.name, self.features, *parts)
        changed.drafter = self.drafter
        return changed

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
            self.head.lag, self.accept.pieces, self.next.pieces, self.tables[depth],
            rule.compared, rule.strict, rule.keep_all, rule.threshold_at(depth, step.batch), values, kept,
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


class TreeGain(LearnedPolicy):
    """Tracks the survival of every node, the calibrated probability that its path is accepted, and keeps what pays.

    The expected accepted length of a set of nodes is the sum of their survivals (OPT-Tree, arXiv 2406.17276, eq. 5). After
    each depth a branch is extended if its expected children pay for the draft step and their verification (`TreeRule`).
    At the end the best nodes are verified, as many as pay. The policy reads drawn tokens and removes nodes, so it is for
    `match` verification or temperature 0. The head reads scalars only.

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
    **{rule.kind: rule for rule in (Derived, BatchRule, TreeRule)},
}


def build_rule(raw: Mapping[str, Any]) -> Rule:
    """Return the rule saved as `raw` (`Rule.to_dict`); raise `PolicyError` if it is unknown or damaged."""
    try:
        if build := RULES.get(raw["kind"]):
            return build(**{name: value for name, value in raw.items() if name != "kind"})
    except PolicyError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PolicyError(f"rule: {raw!r:.200} has a missing or invalid entry: {error}") from None
    raise PolicyError(f"unknown rule {raw['kind']!r:.80}; expected {', '.join(RULES)}")
