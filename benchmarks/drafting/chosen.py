"""What can be chosen for a drafter, by exact replay: the length of its chains, the nodes of its trees, fixed or learned."""

from __future__ import annotations

from dataclasses import dataclass

from specstop.decode import Settings, with_drafter
from specstop.decode.benchmark import Ratio
from specstop.decode.profile import loop_decisions
from specstop.policies import FixedLength, StopPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.statistics import Resamples
from specstop.train.fit.plan import TREE_FEATURES, Plan
from specstop.train.fit.rules import fixed_grid
from specstop.train.fit.run import train
from specstop.train.fit.tree_rules import TreeChoice, choose_tree, solve_tree
from specstop.train.heads import make_head
from specstop.train.heads.crossfit import FOLDS, prompt_folds
from specstop.train.replay.bounds.oracle import oracle_seconds
from specstop.train.replay.bounds.static_tree import best_static_tree
from specstop.train.replay.run import Replayed, replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays
from specstop.train.replay.traces.subtrees import on_subtree

from .ground import Ground

FIXED, CHAIN, WHOLE, STATIC, NODES = (
    "best fixed length",
    "learned length",
    "whole tree",
    "best static tree",
    "learned nodes",
)


TREE = Plan(make_head("logistic"), "gain", features=TREE_FEATURES, name="tree")
"""The policy of trees that `train --rule gain` fits unless told otherwise."""


@dataclass(frozen=True)
class Setting:
    """How a drafter may be run.

    Attributes:
        policy, tree: for `Speculator`; no tree for chains.
        test: the test prompts' trace of what it drafts.
    """

    policy: StopPolicy
    tree: str | None
    test: TraceArrays


@dataclass(frozen=True)
class Chosen:
    """What training prompts say is best, and what becomes of it on test prompts.

    Attributes:
        settings, played: by name, `FIXED` and so on.
        profile: what rounds cost, decisions of these policies included.
        plain: tokens a second of plain decoding.
        bound: tokens a second of someone who knows every accepted length, the better one of chains and trees.
    """

    settings: dict[str, Setting]
    played: dict[str, Replayed]
    profile: Profile
    plain: float
    bound: float

    def over(self, name: str, other: str) -> Ratio:
        """Return how much faster a setting is than another, with an interval over prompts."""
        samples = Resamples(self.settings[name].test.clusters)
        mine, theirs = (samples.total(self.played[which].seconds.numpy()) for which in (name, other))
        return samples.interval(theirs / mine)


def choose(ground: Ground, drafter: str) -> Chosen:
    """Return the settings of a drafter that are the fastest on training prompts, replayed on test prompts."""
    (chain_trace, chains), (tree_trace, trees) = (ground.traces(drafter, tree) for tree in (None, ground.tree))
    fit_chains, fit_trees = trace_arrays(chain_trace), trace_arrays(tree_trace)
    profile = ground.profile(drafter)
    grid = fixed_grid(fit_chains, profile)[1:]
    best = 1 + max(range(len(grid)), key=lambda at: grid[at].rate)
    static = on_subtree(trees, best_static_tree(fit_trees, profile)[0].nodes)
    length = train(chain_trace, profile, progress=ground.progress).policy
    nodes = _nodes(ground, fit_trees, profile)
    settings = {
        FIXED: Setting(FixedLength(best), None, chains),
        CHAIN: Setting(length, None, chains),
        WHOLE: Setting(FixedLength(ground.depth), ground.tree, trees),
        STATIC: Setting(FixedLength(static.depth), static.tree.name if static.tree.nodes else None, static),
        NODES: Setting(nodes.policy, nodes.arrays.tree.name, on_subtree(trees, nodes.nodes)),
    }
    for name in (CHAIN, NODES):
        profile = _with_decisions(ground, drafter, settings[name], profile)
    played = {name: replay(one.test, one.policy, profile) for name, one in settings.items()}
    bound = max(float(played[FIXED].tokens.sum() / oracle_seconds(test, profile).sum()) for test in (chains, trees))
    plain = replay(chains, FixedLength(0), profile).rate
    return Chosen(settings, played, profile, plain, bound)


def told(ground: Ground, drafter: str, chosen: Chosen) -> tuple[float, float]:
    """Return tokens a second of nodes learned on the test prompts themselves: decisions free, and at their price.

    About the most that a policy of these features can have, if it knew the test prompts.
    """
    free = chosen.profile.with_decisions({TREE.name: 0.0})
    found = _nodes(ground, ground.traces(drafter, ground.tree)[1], free)
    return replay(found.arrays, found.policy, free).rate, solve_tree(found.policy, found.arrays, chosen.profile)[1]


def _nodes(ground: Ground, arrays: TraceArrays, profile: Profile) -> TreeChoice:
    """Return the tree policy and the tree that are the fastest on prompts left out of the fit."""
    return choose_tree(TREE, arrays, prompt_folds(arrays, FOLDS, 0), profile, ground.sizes)


def _with_decisions(ground: Ground, drafter: str, setting: Setting, profile: Profile) -> Profile:
    """Return the profile with what a policy's decisions cost in the loop."""
    pair = with_drafter(ground.pair, drafter)
    settings = Settings(ground.temperature, ground.tokens, ground.depth, tree=setting.tree, verification="match")
    timed = loop_decisions(pair, [setting.policy], ground.ids(ground.fit), settings, effort=ground.effort)
    return profile.with_measured_decisions(timed)
