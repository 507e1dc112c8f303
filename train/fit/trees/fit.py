"""Fitting the rule `gain`: a policy of trees that keeps and verifies the nodes worth their price."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ....decode.profile import add_decisions
from ....policies.contract import StopPolicy
from ....policies.display import Progress, silent
from ....policies.errors import TraceError
from ....policies.features import TOKEN_FEATURES
from ....policies.learned import TrainingMetadata, TreeGain
from ....policies.profile import Profile
from ....policies.tree_rules import TreeRule
from ...heads.base import HeadEstimator
from ...heads.crossfit import Folds, fit_head, own_visits
from ...heads.rows import Visits, visits
from ...replay.bounds.static_tree import best_static_tree, drafted_alone
from ...replay.run import replay
from ...replay.traces.arrays import TraceArrays
from ..held_out import counts, training_prompts
from ..plan import Plan
from ..rates import left_out_parts, replayed_rates
from .calibrate import fit_paths, sibling_shares
from .rows import rank_acceptance, tree_rows
from .scores import tree_scores
from .solve import solve_tree, tree_seconds

TREE_FEATURES = ("mean_accepted", "noisy_margin", "noisy_lead", "depth", "branch_rank")
"""What heads of trees read unless told otherwise: few, since decisions take time, and these come of one pass over scores."""

TOLD = ("branch_rank", "noisy_score")
"""Of these what the tokens and the margins tell already: measured, a head with tokens is as fast and decides sooner."""

PASSES = 3


def tree_features(head: HeadEstimator) -> tuple[str, ...]:
    """Return what a head of trees reads unless told otherwise."""
    names = head.default_features(TREE_FEATURES)
    return tuple(name for name in names if name not in TOLD) if set(names) & set(TOKEN_FEATURES) else names


def fit_tree(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    report: TraceArrays | None = None,
    progress: Progress = silent,
) -> tuple[TreeGain, dict[str, bytes], dict[str, Any]]:
    """Fit a head on a trace of trees, calibrate it along paths on prompts that it was not fitted on, and solve its rate.

    HISTORY features tell of a policy's own play, and policies skip easy runs: after the first pass, on the rounds of the best
    static tree, all is fitted again on the rounds that the policy itself visits.

    Args:
        plan: what to fit.
        arrays: the prompts to train on.
        folds: of them.
        profile: what rounds cost.
        report: prompts that held-out figures come from, or None.
        progress: see `Progress`.

    Returns:
        The policy, files for retraining, and metrics.

    Raises:
        TraceError: the trace cannot be replayed.
    """
    if arrays.header.verification != "match" or arrays.header.mix or not arrays.header.has_every_anchor:
        raise TraceError(
            "--rule gain: expected dense traces under match, which can be replayed; collect them with --tree"
        )
    static, played = best_static_tree(arrays, profile)
    playing: Sequence[StopPolicy] = [static]
    # Dinkelbach's iteration starts from the best static tree's rate, in later passes from that of the pass before.
    rate = played.rate
    passes = plan.passes or PASSES
    for turn in range(passes):
        progress("fit trees", turn, passes)
        visited = own_visits(arrays, folds, playing, profile)
        policies, files, fitted = _fitted(plan, arrays, folds, visited)
        policy = policies[0]
        # Priced where the best static tree is played, whose rounds are about as wide as the policy's own.
        profile = add_decisions(profile, [policy], arrays.header.vocabulary, tree=static.drawn)
        seconds = tree_seconds(arrays, profile, profile.decision(policy.cost_name))
        policy = policy.with_rule(dataclasses.replace(policy.rule, rate=rate, **seconds))
        # As the next pass is fitted: on prompts played by heads that have not seen them, under one rule.
        rates = replayed_rates(left_out_parts(arrays, folds, [one.head for one in policies]), profile)
        policy, rate = solve_tree(policy, arrays, profile, rates=rates)
        playing = [other.with_rule(policy.rule) for other in policies]
    progress("fit trees", passes, passes)
    prompts = training_prompts(arrays, folds, report)
    metrics = {
        **counts(prompts),
        "rows": fitted,
        "static_tree": static.shape.name,
        "priced_tree": static.drawn.name,
    }
    if report is not None:
        mine = replay(report, policy, profile)
        theirs = replay(*drafted_alone(report, static.nodes), profile).rate
        metrics |= {
            "held_out_tokens_per_s": mine.rate,
            "held_out_static_tree_tokens_per_s": theirs,
            "held_out_ratio_to_static_tree": mine.rate / theirs,
            "reliability": tree_scores(policy, report, visits(report, [mine])),
        }
    profile_record = profile.record(policy.cost_name)
    policy.metadata = TrainingMetadata(
        rho=rate, acceptance=tuple(policy.rule.acceptance), profile=profile_record, prompts=prompts
    )
    return policy, files, metrics


def _fitted(
    plan: Plan, arrays: TraceArrays, folds: Folds, visited: Visits
) -> tuple[list[TreeGain], dict[str, bytes], int]:
    """Return a policy for each fold under a rule without prices, all but its head alike; files and rows of the first."""
    fold = folds.of_rows(arrays, visited)
    parts = []
    for number in range(folds.count):
        inside, outside = (visited.part((fold == number) == side) for side in (True, False))
        # A fold whose rounds were all cut has nothing to stop a fit early with.
        rows, held = (
            tree_rows(arrays, plan.features, some) for some in (outside, inside if len(inside.row) else outside)
        )
        head = fit_head(plan.head, rows.rows, held.rows, plan.features, plan.seed)
        parts.append((head.export(), inside))
        if number == 0:
            first = rows, head.files_
    rows, files = first
    accept, next_ = fit_paths(parts, arrays, plan.features)
    tree = arrays.tree
    shares = sibling_shares(parts, arrays, plan.features, accept, next_)
    below = [[len(tree.children[row]) for row in level] for level in tree.levels]
    # Prices of 1 stand in until `tree_seconds` gives those of the profile.
    rule = TreeRule(1.0, 1.0, [1.0], [1.0], rank_acceptance(rows), shares, below)
    policies = [TreeGain(plan.name, plan.features, one, accept, next_, rule, arrays.depth) for one, _ in parts]
    return policies, files, len(rows.rows)
