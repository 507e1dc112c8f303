"""Policies for trees, under the rule `gain`, which extends and verifies the nodes whose expected tokens exceed their cost.

A head is fitted on nodes with an accepted path and calibrated along paths. A profile gives the prices, replay the rate that
turns seconds into tokens, and the choice of the tree to draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit, logit

from ...collect.schema import NO_TOKEN
from ...decode.profile import add_decisions
from ...decode.topology import Topology
from ...policies.contract import Array, StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import TraceError
from ...policies.heads.base import Head
from ...policies.learned import PathCalibrator, TrainingMetadata, TreeGain
from ...policies.profile import Profile
from ...policies.tree_rules import PRICED_NODES, TreeRule
from ..heads.crossfit import Folds, fit_head, on_policy_rounds
from ..heads.rows import FitRows, Visits
from ..replay.arrays import TraceArrays, policy_features, typical_context
from ..replay.bounds import best_static_tree, isolate_subtree, likeliest_nodes, restrict_to_subtree
from ..replay.run import replay
from .plan import Plan
from .rules import FIRST_DEPTHS, RATE_TOLERANCE, Part, Rates, left_out_parts, replayed_rates

PASSES = 3

LOOK_AHEAD = (0.0, 0.5, 0.8, 1.0)
"""Shares of the mean acceptance that are tried."""

FLOORS, FLOOR_TOLERANCE = (0.1, 0.05, 0.03, 0.02, 0.01), 1e-3
"""Floors that are tried, and the relative loss of rate that is tolerated: replay does not count the time that fewer branches
save in a decision."""

PRIOR_ROWS = 20.0
"""Weight, in rows, of the prior of each calibration parameter, which is its value without a fit."""

RANK_PRIOR_FACTOR = 0.05
"""Factor of `PRIOR_ROWS` for shifts by rank."""

RARE_SHARE = (-2.5, 0.0)
"""Parameters (u, v) of a rank at which no sibling was accepted, where a fit would diverge: an acceptance of 8%."""

MIN_SURVIVAL = 1e-9
"""Minimum survival that `next` is divided by, as in `kernels.trees`."""

_EDGE, _ROUNDS = 1e-6, 4


@dataclass(frozen=True)
class TreeRounds:
    """R visited rounds of a trace of trees; column 0 is the anchor, the N nodes follow.

    Attributes:
        tree: topology.
        features: [R, N + 1, F] float32.
        accepted: [R, N + 1] bool, the nodes that the target accepts.
        reachable: [R, N + 1] bool, the nodes that a policy can decide on: without a gap or an end of text on the path.
    """

    tree: Topology
    features: Array
    accepted: Array
    reachable: Array

    @classmethod
    def of(cls, arrays: TraceArrays, features: Sequence[str], visited: Visits) -> TreeRounds:
        """Return the visited rounds with the features of a head."""
        row, tree = visited.row, arrays.tree
        accepted, reachable = np.ones((2, len(row), len(tree)), dtype=bool)
        accepted[:, 1:] = arrays.accepted_nodes(row)
        reachable[:, 1:] = ~arrays.ends[row] & (arrays.tokens[row] != NO_TOKEN)
        for node, parent in enumerate(tree.parent[1:], 1):  # parents come before their children
            reachable[:, node] &= reachable[:, parent]
        return cls(tree, policy_features(arrays, features, row, visited.history).numpy(), accepted, reachable)

    @cached_property
    def width(self) -> Array:
        """[N + 1] number of children of each node."""
        return np.array([len(children) for children in self.tree.children])

    @cached_property
    def accepted_children(self) -> Array:
        """[R, N + 1, W] bool, which child of a node is accepted, by rank."""
        # Padding points at the anchor, which counts as accepted; the mask removes it.
        padded = np.zeros((len(self.tree), self.width.max()), dtype=np.int64)
        for row, children in enumerate(self.tree.children):
            padded[row, : len(children)] = children
        mask: Array = np.arange(padded.shape[1]) < self.width[:, None]
        return self.accepted[:, padded] & mask

    def scores(self, head: Head, depth: int) -> Array:
        """Return [R, B, 2] float64, the scores of a head for the B nodes of a depth."""
        rows = np.ascontiguousarray(self.features[:, self.tree.levels[depth]])
        return head.scores(rows.reshape(-1, rows.shape[-1]), depth).reshape(*rows.shape[:2], 2)

    def fit_rows(self) -> FitRows:
        """Return the training rows: the anchors, and the children of every accepted node.

        The label of `next` is whether the best child was accepted.
        """
        parents = np.maximum(self.tree.parent, 0)
        # `accept` is conditional on the path so far, so rows are children of accepted nodes only.
        use = self.accepted[:, parents] & self.reachable
        depth = np.broadcast_to(self.tree.depth, use.shape)
        labels = np.stack([self.accepted, self.accepted_children[..., 0]], -1)
        has_label = np.stack([depth > 0, self.accepted & (self.width > 0)], -1)
        columns = (self.features[use], depth[use], labels[use].astype(np.float32), has_label[use])
        features, depths, targets, mask = map(torch.from_numpy, columns)
        return FitRows(features, depths, targets, mask)


def node_ranks(tree: Topology) -> Array:
    """Return [N + 1], the rank of each node among its siblings; 0 for the anchor."""
    ranks = np.zeros(len(tree), dtype=np.int64)
    for children in tree.children:
        ranks[list(children)] = np.arange(len(children))
    return ranks


def best_child_acceptance(rows: FitRows) -> tuple[float, ...]:
    """Return a_1..a_K, the probability by depth that the best child of an accepted node is accepted."""
    out: list[float] = []
    for depth in range(int(rows.depth.max())):
        use = rows.has_label[:, 1] & (rows.depth == depth)
        out.append(float(rows.labels[use, 1].double().mean()) if bool(use.any()) else (out[-1] if out else 0.0))
    return tuple(out)


# Calibration along paths

Scored = Sequence[tuple[Head, TreeRounds]]
"""Heads, each with rounds of prompts that it was not fitted on."""


def fit_paths(parts: Scored) -> tuple[PathCalibrator, PathCalibrator]:
    """Return the calibrators of both outputs with the least log loss on all nodes, accepted or not.

    That of `accept` gives the probability that a node is accepted, that of `next` the probability that the node and its best
    child are.
    """
    tree = parts[0][1].tree
    accepted, reachable = (np.concatenate([getattr(r, name) for _, r in parts]) for name in ("accepted", "reachable"))
    ranks = node_ranks(tree)
    count = int(ranks.max()) + 1
    survival = np.ones((len(accepted), 1))  # calibrated, of the level before
    tables: tuple[list[Array], list[Array]] = ([], [])
    # From the root down: the fit of a level uses the calibrated survival of the level before, as the policy does.
    for depth, level in enumerate(tree.levels):
        accept, next_ = np.moveaxis(np.concatenate([rounds.scores(head, depth) for head, rounds in parts]), -1, 0)
        use, rank = reachable[:, level], np.broadcast_to(ranks[level], accept.shape)
        if depth == 0:
            tables[0].append(_uncalibrated(count))  # at depth 0 nothing is drawn: `accept` has no label
        else:
            first = tree.levels[depth - 1][0]
            survival = survival[:, [tree.parent[node] - first for node in level]]
            tables[0].append(_fit_level(survival[use], accept[use], accepted[:, level][use], rank[use], count))
            survival = PathCalibrator(np.array(tables[0], dtype=np.float32)).of(survival, accept, depth, ranks[level])
        best = np.array([(tree.children[node] or [0])[0] for node in level])  # 0, the root = no child
        use = use & (best > 0)
        tables[1].append(_fit_level(survival[use], next_[use], accepted[:, best][use], rank[use], count))
    return PathCalibrator(np.array(tables[0], dtype=np.float32)), PathCalibrator(np.array(tables[1], dtype=np.float32))


def _uncalibrated(ranks: int) -> Array:
    return np.array([1.0, 0.0, *[0.0] * ranks])


def _fit_level(parent: Array, logits: Array, labels: Array, rank: Array, ranks: int) -> Array:
    """Return [2 + R]: scale, tilt and shifts by rank, of a level of nodes with parents of this survival."""
    start = _uncalibrated(ranks)
    if not len(labels):
        return start
    product = np.clip(parent * expit(logits), _EDGE, 1.0 - _EDGE)
    columns = np.column_stack([logit(product), logits, rank[:, None] == np.arange(ranks)])
    return _fit_logistic(columns, labels, start, PRIOR_ROWS * np.array([1.0, 1.0, *[RANK_PRIOR_FACTOR] * ranks]))


def _fit_logistic(columns: Array, labels: Array, start: Array, hold: Array) -> Array:
    """Return the weights [P] with the least log loss over rows [M, P], plus `hold` times their squared distance from `start`.

    scikit-learn's logistic regression can only pull weights towards 0, and all of them equally.
    """

    def loss(weights: Array) -> tuple[float, Array]:
        odds, distance = columns @ weights, weights - start
        value = np.logaddexp(0.0, odds).sum() - odds @ labels + hold @ distance**2
        return float(value), (expit(odds) - labels) @ columns + 2.0 * hold * distance

    weights: Array = minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-12, "gtol": 1e-6}).x
    return weights


def path_chances(head: Head, accept: PathCalibrator, next_: PathCalibrator, rounds: TreeRounds) -> tuple[Array, Array]:
    """Return [R, N + 1] float64 each: the survival of every node, and `next` given it, if a policy decided on all nodes."""
    tree, shape = rounds.tree, rounds.accepted.shape
    survival, next_chance, ranks = np.ones(shape), np.empty(shape), node_ranks(rounds.tree)
    for depth, level in enumerate(tree.levels):
        scores = rounds.scores(head, depth)
        if depth:  # the root was not drawn
            parents = survival[:, [tree.parent[row] for row in level]]
            survival[:, level] = accept.of(parents, scores[..., 0], depth, ranks[level])
        current = survival[:, level]
        joint = next_.of(current, scores[..., 1], depth, ranks[level])
        next_chance[:, level] = joint / np.maximum(current, MIN_SURVIVAL)
    return survival, next_chance


def sibling_shares(parts: Scored, accept: PathCalibrator, next_: PathCalibrator) -> tuple[tuple[float, float], ...]:
    """Return for rank 1, 2, ... (u, v): a child of that rank is accepted with probability sigmoid(u + v logit next)."""
    chances, children, widths = [], [], []
    for head, rounds in parts:
        use = rounds.accepted & rounds.reachable & (rounds.width > 0)
        chances.append(path_chances(head, accept, next_, rounds)[1][use])
        children.append(rounds.accepted_children[use])
        widths.append(np.broadcast_to(rounds.width, use.shape)[use])
    odds, labels, width = (
        logit(np.concatenate(chances).clip(1e-4, 1.0 - 1e-4)),
        np.concatenate(children),
        np.concatenate(widths),
    )
    shares = []
    for rank in range(1, labels.shape[1]):
        use, share = width > rank, RARE_SHARE
        if labels[use, rank].any():
            columns = np.column_stack([np.ones(use.sum()), odds[use]])
            # Without a penalty the slope would diverge where few rows separate the two classes.
            u, v = _fit_logistic(columns, labels[use, rank], np.array([RARE_SHARE[0], 0.0]), np.array([0.0, 1.0]))
            share = float(u), float(v)
        shares.append(share)
    return tuple(shares)


# Prices and the rate


def tree_seconds(arrays: TraceArrays, profile: Profile, price: float) -> dict[str, Any]:
    """Return `opening_s`, `draft_s` and `verify_s` of a `TreeRule`, for a typical context of these texts.

    Args:
        arrays: a trace of trees, or of chains (their rounds cost less).
        profile: what rounds cost.
        price: seconds of a decision.
    """
    tree = arrays.tree
    outside = None if tree.is_chain else profile.tree_outside_s
    _, per_step, per_token = outside or (profile.round_s, profile.step_s, 0.0)
    branches = sum(bool(children) for children in tree.children)
    # A branch that is fed draws this many tokens on average, each of which takes time outside the models.
    drawn = tree.nodes / max(branches, 1)
    between = partial(profile.between, typical_context(arrays))
    opening = float(between(lambda table: table.draft_s[:1])[0])
    if tree.is_chain:
        # Chains are filled up to a size that is clearly cheaper, and cost what that size does.
        padded = profile.padded()[: tree.nodes + 1]
        drafts = between(lambda table: [table.later_s]).tolist()
        verify = between(lambda table: [table.verify_s[n] for n in padded]).tolist()
    else:
        drafts = between(lambda table: table.tree_draft(max(tree.width, 1))[1:]).tolist()
        verify = between(lambda table: table.tree_verify(min(tree.nodes, PRICED_NODES))).tolist()
    # The constant cost of a round is left out: the rule compares continuing with stopping.
    return {
        "opening_s": opening + per_step + per_token * len(tree.children[0]) + price,
        "draft_s": [s + per_step + per_token * drawn * rows + price for rows, s in enumerate(drafts, 1)],
        "verify_s": verify,
    }


def solve_tree(
    policy: TreeGain,
    arrays: TraceArrays,
    profile: Profile,
    firsts: Sequence[int] = FIRST_DEPTHS,
    rates: Rates | None = None,
) -> tuple[TreeGain, float]:
    """Solve rho of a tree policy by Dinkelbach's iteration; see `rules.solve_derived` for arguments and result.

    The look-ahead and the depth of the first decision are chosen on the way by replayed rate; last, the branches that need
    not be read at all.
    """
    seconds = tree_seconds(arrays, profile, profile.decision(policy.cost_name))
    rates = rates or replayed_rates([Part(arrays)], profile)
    best, best_rate = policy, 0.0

    def improve(**changes: Any) -> None:
        nonlocal best, best_rate
        # A saved policy has a floor. The rate is solved without one, and the floor is chosen last.
        rule = dataclasses.replace(best.rule, floor=0.0)
        rho = best_rate or rule.rate
        for _ in range(_ROUNDS):
            candidate = policy.with_rule(dataclasses.replace(rule, rate=rho, **seconds, **changes))
            (rate,) = rates([candidate])
            if rate > best_rate:
                best, best_rate = candidate, rate
            if abs(rate - rho) < RATE_TOLERANCE * rho:
                break
            rho = rate

    for share in LOOK_AHEAD:
        improve(ahead=share)
    for first in firsts:
        # After the deepest depth that was ever reached there is nothing to decide.
        if first != best.rule.first and first < policy.max_depth and first <= len(best.rule.acceptance):
            improve(first=first, ahead=best.rule.ahead)
    # From the highest floor, which reads the fewest branches, to the lowest: the first one without harm is taken.
    for floor in FLOORS:
        candidate = policy.with_rule(dataclasses.replace(best.rule, floor=floor))
        (rate,) = rates([candidate])
        if rate >= (1.0 - FLOOR_TOLERANCE) * best_rate:
            return candidate, rate
    return best, best_rate


# Fitting the policy and choosing its tree

Fitted = tuple[TreeGain, dict[str, Any]]
"""A policy and metrics."""


def fit_tree(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    report: TraceArrays | None = None,
    progress: Progress = silent,
) -> Fitted:
    """Fit a head on a trace of trees, calibrate it along paths on prompts that it was not fitted on, and solve its rate.

    HISTORY features depend on a policy's own rounds, and policies skip easy runs. So after the first pass, on the rounds of
    the best static tree, all is fitted again on the rounds that the policy itself visits.

    Args:
        plan: what to fit.
        arrays: the prompts to train on.
        folds: of them.
        profile: what rounds cost.
        report: prompts for held-out figures, or None.
        progress: see `Progress`.

    Raises:
        TraceError: the trace cannot be replayed.
    """
    if arrays.header.verification != "match" or arrays.header.mix or not arrays.header.has_every_anchor:
        raise TraceError(
            "--rule gain: expected dense traces under match, which can be replayed; collect them with --tree"
        )
    static, played = best_static_tree(arrays, profile)
    players: Sequence[StopPolicy] = [static]
    # The iteration of the first pass starts from the best static tree's rate, that of later ones from the pass before.
    rate = played.rate
    passes = plan.options.passes or PASSES
    for number in range(passes):
        progress("fit trees", number, passes)
        policies, rows = _fit_pass(plan, arrays, folds, on_policy_rounds(arrays, folds, players, profile))
        policy = policies[0]
        # Measured on rounds of the best static tree, which are about as wide as the policy's.
        profile = add_decisions(profile, [policy], arrays.header.vocabulary, tree=static.drawn)
        seconds = tree_seconds(arrays, profile, profile.decision(policy.cost_name))
        policy = policy.with_rule(dataclasses.replace(policy.rule, rate=rate, **seconds))
        # As in the next pass: every prompt is replayed by a head that was fitted without it, under one rule.
        rates = replayed_rates(left_out_parts(arrays, folds, [one.head for one in policies]), profile)
        policy, rate = solve_tree(policy, arrays, profile, rates=rates)
        players = [other.with_rule(policy.rule) for other in policies]
    progress("fit trees", passes, passes)
    metrics = {
        "tree": arrays.tree.name,
        "rows": rows,
        "static_tree": static.shape.name,
        "priced_tree": static.drawn.name,
    }
    if report is not None:
        learned = replay(report, policy, profile).rate
        fixed = replay(*isolate_subtree(report, static.nodes), profile).rate
        metrics |= {
            "held_out_tokens_per_s": learned,
            "held_out_static_tree_tokens_per_s": fixed,
            "held_out_ratio_to_static_tree": learned / fixed,
        }
    policy.metadata = TrainingMetadata(
        rho=rate, acceptance=tuple(policy.rule.acceptance), profile=profile.record(policy.cost_name)
    )
    return policy, metrics


def _fit_pass(plan: Plan, arrays: TraceArrays, folds: Folds, visited: Visits) -> tuple[list[TreeGain], int]:
    """Return a policy for each fold, equal except for their heads, without prices; and the rows of the first head."""
    if not len(visited.row):
        raise TraceError("--traces: no row has a label; collect more prompts or longer texts")
    fold = folds.of_rows(arrays, visited)
    heads, parts, first = [], [], None
    for number in range(folds.count):
        inside, outside = (
            TreeRounds.of(arrays, plan.features, visited.part((fold == number) == side)) for side in (True, False)
        )
        rows = outside.fit_rows()
        heads.append(fit_head(plan.head, rows, inside.fit_rows(), plan.features, plan.options.seed))
        parts.append((heads[-1].export(), inside))
        first = first or rows
    assert first is not None
    accept, next_ = fit_paths(parts)
    children = [[len(arrays.tree.children[row]) for row in level] for level in arrays.tree.levels]
    # The prices of 1 are replaced by those of `tree_seconds`.
    shares = sibling_shares(parts, accept, next_)
    rule = TreeRule(1.0, 1.0, [1.0], [1.0], best_child_acceptance(first), shares, children)
    policies = [TreeGain(plan.name, plan.features, head, accept, next_, rule, arrays.depth) for head, _ in parts]
    return policies, len(first)


def choose_tree(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    report: TraceArrays | None = None,
    progress: Progress = silent,
) -> Fitted:
    """Return `fit_tree` of the sub-tree with the highest rate, on prompts that its heads were not fitted on.

    Tokens that are drawn and not verified take time too, so a smaller tree may be faster than the recorded one. If several
    sizes are tried, one as large as the best static tree is added: where decisions gain little it is the best.

    Args:
        plan: with the sizes of the sub-trees of highest acceptance that are tried; none = the whole tree.
        arrays, folds, profile, report, progress: see `fit_tree`.
    """
    whole = list(range(arrays.tree.nodes))
    sizes = plan.options.nodes or (len(whole),)
    trees = [whole if size >= len(whole) else likeliest_nodes(arrays, size, arrays.depth) for size in sizes]
    if len(trees) > 1:
        static, _ = best_static_tree(arrays, profile)
        as_large = likeliest_nodes(arrays, len(static.nodes), static.max_depth)
        trees += [as_large] if as_large and as_large not in trees else []
    choices: list[Fitted] = []
    for done, nodes in enumerate(trees):
        if len(trees) > 1:
            progress("choose a tree", done, len(trees))
        part, held = (of if of is None or nodes is whole else restrict_to_subtree(of, nodes) for of in (arrays, report))
        assert part is not None
        choices.append(fit_tree(plan, part, folds, profile, held, progress))
    best = max(choices, key=lambda choice: choice[0].metadata.rho)
    if len(trees) > 1:
        progress("choose a tree", len(trees), len(trees))
        best[1]["trees tried"] = len(trees)
    return best
