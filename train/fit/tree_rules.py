"""The rule `gain`: a policy of trees that extends and verifies the nodes worth their price.

Prices from a profile, the rate that turns seconds into tokens, and the choice of the tree to draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...decode.profile import add_decisions
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import TraceError
from ...policies.learned import TrainingMetadata, TreeGain
from ...policies.profile import Profile
from ...policies.tree_rules import PRICED_NODES, TreeRule
from ..heads.crossfit import Folds, fit_head, own_visits
from ..heads.rows import Visits, visits
from ..replay.arrays import TraceArrays, typical_context
from ..replay.bounds import best_static_tree, drafted_alone, likeliest_nodes, on_subtree
from ..replay.run import replay
from .plan import Plan
from .rules import FIRST, SETTLED, Part, Rates, left_out_parts, replayed_rates
from .tree_calibration import (
    fit_paths,
    rank_acceptance,
    sibling_shares,
    tree_rows,
    tree_scores,
)

PASSES = 3

AHEAD = (0.0, 0.5, 0.8, 1.0)
"""Shares of the mean acceptance that are tried."""

FLOORS, UNHARMED = (0.1, 0.05, 0.03, 0.02, 0.01), 1e-3
"""Floors that are tried, and the share of the rate that one may cost: the rate lacks the time that fewer branches save."""

_ROUNDS = 4


# Prices and the rate


def tree_seconds(arrays: TraceArrays, profile: Profile, price: float) -> dict[str, Any]:
    """Return `opening_s`, `draft_s` and `verify_s` of a `TreeRule`, for a typical context of these texts.

    Args:
        arrays: a trace of trees, or of chains, whose rounds cost less.
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
    firsts: Sequence[int] = FIRST,
    rates: Rates | None = None,
) -> tuple[TreeGain, float]:
    """Solve rho of a tree policy by Dinkelbach's iteration: assume a rate, replay, assume the result.

    The look-ahead and the depth of the first decision are chosen on the way by replayed rate; last, the branches that need
    not be read at all.

    Args:
        policy: whose head and calibration are used.
        arrays: training traces, never the evaluated ones.
        profile: what rounds cost.
        firsts: depths of the first decision that are tried.
        rates: of policies; by default on `arrays`.

    Returns:
        The policy under the fastest rule, and its rate in tokens per second.
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
            if abs(rate - rho) < SETTLED * rho:
                break
            rho = rate

    for share in AHEAD:
        improve(ahead=share)
    for first in firsts:
        # After the deepest depth that was ever reached there is nothing to decide.
        if first != best.rule.first and first < policy.max_depth and first <= len(best.rule.acceptance):
            improve(first=first, ahead=best.rule.ahead)
    # From the highest floor, which reads the fewest branches, to the lowest: the first one without harm is taken.
    for floor in FLOORS:
        candidate = policy.with_rule(dataclasses.replace(best.rule, floor=floor))
        (rate,) = rates([candidate])
        if rate >= (1.0 - UNHARMED) * best_rate:
            return candidate, rate
    return best, best_rate


# Fitting the policy and choosing its tree


def fit_tree(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    report: TraceArrays | None = None,
    progress: Progress = silent,
) -> tuple[TreeGain, dict[str, bytes], dict[str, Any]]:
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

    Returns:
        The policy, files for later training, and metrics.

    Raises:
        TraceError: the trace cannot be replayed.
    """
    if arrays.header.verification != "match" or arrays.header.mix or not arrays.header.has_every_anchor:
        raise TraceError(
            "--rule gain: expected dense traces under match, which can be replayed; collect them with --tree"
        )
    static, played = best_static_tree(arrays, profile)
    playing: Sequence[StopPolicy] = [static]
    # The iteration of the first pass starts from the best static tree's rate, that of later ones from the pass before.
    rate = played.rate
    passes = plan.passes or PASSES
    for number in range(passes):
        progress("fit trees", number, passes)
        policies, files, rows = _fit_pass(plan, arrays, folds, own_visits(arrays, folds, playing, profile))
        policy = policies[0]
        # Measured where the best static tree is played, whose rounds are about as wide as the policy's own.
        profile = add_decisions(profile, [policy], arrays.header.vocabulary, tree=static.drawn)
        seconds = tree_seconds(arrays, profile, profile.decision(policy.cost_name))
        policy = policy.with_rule(dataclasses.replace(policy.rule, rate=rate, **seconds))
        # Like the next pass: on prompts played by heads that have not seen them, under one rule.
        rates = replayed_rates(left_out_parts(arrays, folds, [one.head for one in policies]), profile)
        policy, rate = solve_tree(policy, arrays, profile, rates=rates)
        playing = [other.with_rule(policy.rule) for other in policies]
    progress("fit trees", passes, passes)
    metrics = {"rows": rows, "static_tree": static.shape.name, "priced_tree": static.drawn.name}
    if report is not None:
        mine = replay(report, policy, profile)
        theirs = replay(*drafted_alone(report, static.nodes), profile).rate
        metrics |= {
            "held_out_tokens_per_s": mine.rate,
            "held_out_static_tree_tokens_per_s": theirs,
            "held_out_ratio_to_static_tree": mine.rate / theirs,
            "reliability": tree_scores(policy, report, visits(report, [mine])),
        }
    policy.metadata = TrainingMetadata(
        rho=rate, acceptance=tuple(policy.rule.acceptance), profile=profile.record(policy.cost_name)
    )
    return policy, files, metrics


def _fit_pass(
    plan: Plan, arrays: TraceArrays, folds: Folds, visited: Visits
) -> tuple[list[TreeGain], dict[str, bytes], int]:
    """Return a policy for each fold, equal except for their heads, without prices; files and rows of the first head."""
    fold = folds.of_rows(arrays, visited)
    heads, outside = [], []
    for number in range(folds.count):
        inside, rest = (visited.part((fold == number) == side) for side in (True, False))
        rows = tree_rows(arrays, plan.features, rest)
        # A fold with cut rounds only has no rows for early stopping.
        held = tree_rows(arrays, plan.features, inside) if len(inside.row) else rows
        heads.append(fit_head(plan.head, rows, held, plan.features, plan.seed))
        outside.append((rows, inside))
    parts = [(head.export(), inside) for head, (_, inside) in zip(heads, outside, strict=True)]
    accept, next_ = fit_paths(parts, arrays, plan.features)
    shares = sibling_shares(parts, arrays, plan.features, accept, next_)
    tree, first = arrays.tree, outside[0][0]
    children = [[len(tree.children[row]) for row in level] for level in tree.levels]
    # The prices of 1 are replaced by those of `tree_seconds`.
    rule = TreeRule(1.0, 1.0, [1.0], [1.0], rank_acceptance(first), shares, children)
    policies = [TreeGain(plan.name, plan.features, head, accept, next_, rule, arrays.depth) for head, _ in parts]
    return policies, heads[0].files_, len(first)


@dataclass(frozen=True)
class TreeChoice:
    """A policy and the tree that it was fitted for.

    Attributes:
        nodes: of the recorded tree.
        arrays: the trace as that tree would have recorded it.
        policy, files, metrics: see `fit_tree`.
    """

    nodes: list[int]
    arrays: TraceArrays
    policy: TreeGain
    files: dict[str, bytes]
    metrics: dict[str, Any]


def choose_tree(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    sizes: Sequence[int],
    depth: int | None = None,
    report: TraceArrays | None = None,
    progress: Progress = silent,
) -> TreeChoice:
    """Return the policy of the sub-tree with the highest rate, on prompts that its heads were not fitted on.

    Tokens that are drawn and not verified take time too, so a smaller tree may be faster than the recorded one. If several
    sizes are tried, one as large as the best static tree is added: where decisions gain little it is the best.

    Args:
        plan: what to fit.
        arrays: a trace of a large tree, which contains all that are tried.
        folds: of the prompts.
        profile: what rounds cost.
        sizes: nodes of the sub-trees of highest acceptance that are tried; the recorded number = the whole tree.
        depth: maximum of these trees.
        report: prompts for held-out figures, or None.
        progress: see `Progress`.

    Raises:
        InputError: an impossible size; see `likeliest_nodes`.
    """
    whole = list(range(arrays.tree.nodes))
    # All trees first, so that an impossible size is refused before anything is fitted.
    trees = [whole if n >= len(whole) else likeliest_nodes(arrays, n, depth or arrays.depth) for n in sizes]
    if not trees:
        raise ValueError("sizes: expected at least one")
    if len(trees) > 1:
        static, _ = best_static_tree(arrays, profile)
        as_large = likeliest_nodes(arrays, len(static.nodes), static.max_depth)
        trees += [as_large] if as_large and as_large not in trees else []
    best: TreeChoice | None = None
    for done, nodes in enumerate(trees):
        if len(trees) > 1:
            progress("choose a tree", done, len(trees))
        part, held = (of if of is None or nodes is whole else on_subtree(of, nodes) for of in (arrays, report))
        assert part is not None
        choice = TreeChoice(nodes, part, *fit_tree(plan, part, folds, profile, held, progress))
        best = choice if best is None or choice.policy.metadata.rho > best.policy.metadata.rho else best
    assert best is not None
    if len(trees) > 1:
        progress("choose a tree", len(trees), len(trees))
        best.metrics["trees tried"] = len(trees)
    return best
