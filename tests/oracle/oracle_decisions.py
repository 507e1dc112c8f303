"""Section of decisions: every policy on synthetic steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import access
import numpy as np
from oracle_driving import DEEPEST, Drive, drive, features_at, hidden_at
from oracle_inputs import Inputs
from oracle_policies import OWN
from oracle_texts import answer
from specstop.policies import StopPolicy, load_policy

Cases = Iterator[tuple[str, Any]]

SPECS = [
    "fixed:0",
    "fixed:1",
    "fixed:3",
    "fixed:8",
    "fixed",
    "confidence:0.4",
    "confidence:0.8",
    "confidence",
    "entropy:0.6",
    "entropy:1.5",
    "entropy",
    "maxprob:0.6",
    "maxprob",
    "product:0.3",
    "product:0.05",
    "product",
    "heuristic:20",
    "heuristic:2",
    "heuristic",
    "heuristic-transient:20",
    "heuristic-transient:3",
    "adaedl:0.6",
    "adaedl:0.2",
    "adaedl",
    "ddd:-0.5",
    "ddd:-2",
    "ddd",
    "eagle:59",
    "eagle:4",
    "eagle",
    "opt:0.5",
    "opt:0.2",
    "opt",
    "c2t:2",
    "c2t:0",
    "c2t",
    "gain:0.1",
    "gain:0.02",
    "gain",
    "online:0.4",
    "online",
    "roc:0.4",
    "roc",
    "tetris:3",
    "tetris:1",
    "tetris",
    "adaptive-verification:4",
    "adaptive-verification:2",
    "adaptive-verification",
    "smartspec:0.7",
    "smartspec",
    "load",
    "load?table=1:4,2:3,5:1",
    "load?table=1:4,8:2,32:0",
    "bandit",
    "bandit?kind=thompson&arms=fixed:2,fixed:6",
    "bandit?kind=ucb&arms=fixed:1,confidence:0.4,entropy:0.6",
    "bandit?explore=0.2&arms=fixed:2,fixed:4",
]
"""Every built-in policy with some of its values."""
BROKEN = [
    "fixed:x",
    "fixed:-1",
    "confidence:2",
    "confidence:a",
    "nothing",
    "fixed:3?length=2",
    "fixed?lenght=2",
    "bandit?kind=x",
    "load?table=2:1",
    "load?table=x",
    "hub:",
    "./nowhere",
    "fixed?",
    "fixed:",
    "tetris:0",
    "eagle:-1",
    "c2t:x",
    "opt:2",
    "entropy:-1",
    "maxprob:1.5",
    "product:-0.1",
    "online:3",
    "roc:2",
    "smartspec:2",
    "gain:-1",
    "heuristic:-1",
    "adaedl:9",
]
LEARNS = ("online", "roc", "adaptive-verification", "bandit", "adaedl", "heuristic", "smartspec", "gain")
"""What they decide changes in the course of many rounds."""


def attributes(policy: StopPolicy) -> dict[str, Any]:
    """Return what a policy says of itself."""
    names = [
        "name",
        "features",
        "hidden",
        "trims",
        "carries",
        "reads_clock",
        "reads_seconds",
        "joint",
        "first",
        "max_depth",
    ]
    out = {name: getattr(policy, name) for name in names}
    unasked = {size: policy.unasked.get(size) for size in (1, 2, 3, 4, 5, 8, 16, 64)}
    limited = policy.limited(2)
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in out.items()},
        "shown": policy.shown_name.rpartition("/")[2],
        "cost": policy.cost_name,
        "unasked": {str(size): tokens for size, tokens in unasked.items() if tokens is not None},
        "limited": [limited.max_depth, limited.first, limited.name],
    }


def drives(policy: StopPolicy, spec: str) -> list[Drive]:
    """Return how a policy is driven: alone and together, in chains and trees, and for long if it learns."""
    drives = [Drive(1), Drive(5), Drive(5, 3), Drive(1, 2), Drive(5, 1, batch="together")]
    if policy.joint:
        drives += [Drive(5, 3, batch="together"), Drive(5, 1, batch="two"), Drive(8, 1, 12, batch="together")]
    if type(policy).select is not StopPolicy.select:
        drives += [Drive(5, 1, hidden_tokens=True), Drive(5, 3, batch="together", hidden_tokens=True)]
    if spec.partition(":")[0].partition("?")[0] in LEARNS:
        drives += [Drive(3, 1, 230, batch="together" if policy.joint else "alone"), Drive(2, 2, 60)]
    return drives


def decisions(inputs: Inputs, small: bool = False) -> Cases:
    """What every policy decides on synthetic steps, as masks; and which specs are refused."""
    yield "built-in policies", access.builtin_policies()
    specs = SPECS[::9] if small else SPECS
    folders = inputs.policies[::9] if small else inputs.policies
    under = (
        []
        if small
        else ["logistic-derived?rule=batch", "mlp-survival?rule=batch&send=all", "xgboost-derived?rule=batch"]
    )
    for spec in (*specs, *folders, *under, *OWN):
        where = inputs.policy(spec) if spec.partition("?")[0] in inputs.policies else spec
        policy = OWN[spec]() if spec in OWN else load_policy(where)
        if spec not in OWN:
            yield f"{spec} | facts", attributes(policy)
        for how in drives(policy, spec):
            yield f"{spec} | {how.name}", answer(lambda policy=policy, how=how: drive(policy, how))
        if spec not in SPECS:
            continue
        for name in ("plain", "trees", "batches"):
            priced = policy.with_costs(inputs.profile(name))
            if priced is not policy:
                for how in drives(priced, spec):
                    if how.rounds < 50:
                        yield f"{spec} under {name} | {how.name}", answer(lambda p=priced, how=how: drive(p, how))
    for spec in BROKEN:
        yield f"refused {spec}", answer(lambda spec=spec: load_policy(spec).name)
    for spec in folders:
        yield f"probabilities {spec}", answer(lambda spec=spec: outputs(load_policy(inputs.policy(spec))))


def outputs(policy: Any) -> dict[str, Any]:
    """Return the calibrated outputs of a learned policy's head at random rows."""
    dice = np.random.default_rng(2)
    out = {}
    for depth in (0, 1, 2, DEEPEST - 1):
        shape = 6, 1
        features = features_at(policy.features, depth, shape, dice)
        hidden = hidden_at(policy, depth, shape, 16, dice, dice.standard_normal((6, 64)))
        accept, following = access.probabilities(policy, features, depth, hidden)
        out[f"accept {depth}"], out[f"next {depth}"] = np.asarray(accept), np.asarray(following)
    return out
