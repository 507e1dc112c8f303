"""`train` with the rule `gain`: tree traces in, the policy of a tree out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ....collect.store.folder import Trace
from ....policies.display import Progress
from ....policies.errors import InputError
from ....policies.profile import Profile
from ....policies.storage import save_policy
from ...heads.crossfit import prompt_folds
from ...replay.traces.arrays import trace_arrays
from ..held_out import split_report
from ..plan import Plan
from ..trained import Trained, facts_of
from .choice import choose_tree


def train_tree(
    plan: Plan, traces: Trace, profile: Profile, nodes: Sequence[int], folder: Path | None, progress: Progress
) -> Trained:
    """Fit the policy of the recorded trees, or of the sub-tree that is the fastest, and save it.

    Args:
        plan: checked; its head reads scalars.
        traces: of trees, every anchor, under `match`.
        profile: what rounds cost; best measured with the same tree.
        nodes: sizes of the sub-trees that are tried (`choose_tree`); none = the recorded tree.
        folder: the policy folder to write; None keeps the policy in memory.
        progress: see `Progress`.

    Raises:
        InputError: the head does not read scalars only.
        TraceError: the traces cannot be replayed, lack a feature or have too few prompts.
    """
    if plan.head.hidden:
        raise InputError(
            f"--head: {plan.head.form} reads hidden states; with --rule gain give logistic, tokens, mlp or xgboost"
        )
    needed = dict.fromkeys((*plan.features, "noisy_score", "noisy_margin"))
    arrays = trace_arrays(traces, [n for n in needed if n in (*plan.features, *traces.header.features)])
    arrays, report = split_report(arrays, plan.report_share, plan.seed)
    folds, sizes = prompt_folds(arrays, plan.folds, plan.seed), nodes or (arrays.tree.nodes,)
    chosen = choose_tree(plan, arrays, folds, profile, sizes, report=report, progress=progress)
    policy, solved, header, tree = chosen.policy, chosen.policy.metadata, traces.header, chosen.arrays.tree.name
    metrics = {"tree": tree, **chosen.metrics}
    policy.metadata = dataclasses.replace(
        facts_of(header, [header.temperature], [str(traces.folder)], plan.seed, tree=tree),
        rho=solved.rho, acceptance=solved.acceptance, profile=solved.profile, metrics=metrics, prompts=solved.prompts,
    )  # fmt: skip
    return Trained(policy, save_policy(policy, folder, chosen.files) if folder is not None else None, metrics)
