"""Simulated worlds with true costs in closed form, for tests of coverage and for `benchmarks/intervals.py`.

A world draws prompts of random difficulty and length. A token shows the policy one of three confidences and is
accepted with a probability that depends on both. Tokens are independent given the difficulty, so that the yield of a
fixed length or of a confidence threshold is a sum over few outcomes, and the seconds of a text are a recursion over
the remaining tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from simulated_machines import Disturbance, Machine
from specstop.collect import Header
from specstop.collect.schema import TIMES, parents
from specstop.collect.store import shard_table
from specstop.decode.benchmark import Ratio
from specstop.decode.profile.measuring import Effort, measure
from specstop.decode.topology import chain
from specstop.policies import Array, Confidence, FixedLength
from specstop.policies.costs import CostTable
from specstop.train.evaluate.importance import importance_estimate

from specstop import Profile, StopPolicy, Trace, evaluate

SHOWN = np.array([0.25, 0.55, 0.85], dtype=np.float32)
"""Confidences that a token may show; the thresholds of the policies lie between them."""

DEPTH = 5
LENGTHS = np.array([24, 40, 64])
PROMPT_TOKENS = 12
ROUNDS = 16
"""Rounds of each text of a live run."""

SIZES = (20, 40, 80)
"""Number of prompts of a sample, in turn by world."""

LIVE_SIZES = (40, 160)
"""Numbers of prompts of a live run; each world is sampled at both."""

LOGGING, DEEPER, EXPLORE = Confidence(0.7, DEPTH), Confidence(0.4, DEPTH), 0.2
EXACT = 1e-9


@dataclass(frozen=True)
class Estimate:
    """An estimate in one world: method, quantity, prompts, whether the interval covers the truth, and the relative error."""

    method: str
    what: str
    prompts: int
    covered: bool
    error: float


@dataclass(frozen=True)
class World:
    """Prompts of L difficulties.

    Attributes:
        share: [L] of the prompts.
        chance: [L, 3], of each confidence.
        accept: [L, 3], P(accepted | difficulty, confidence).
        lengths: [L, 3], of each text length.
        profile: what rounds cost, whatever the context.
    """

    share: Array
    chance: Array
    accept: Array
    lengths: Array
    profile: Profile


def draw_world(chance: np.random.Generator) -> World:
    """Return a random world, with cheap or expensive drafts and similar or different prompts."""
    levels = 3
    base = np.sort(chance.uniform(0.1, 0.95, (levels, 3)), 1)
    draft = float(np.exp(chance.uniform(np.log(0.03), np.log(0.4))))
    verify = (1.0 + chance.uniform(0.0, 0.08) * np.arange(DEPTH + 1)).tolist()
    table = CostTable(10.0, (draft, draft * chance.uniform(1.0, 1.2)), 0.0, tuple(verify))
    decision = {"confidence": float(0.2 * draft * chance.uniform()), "fixed": 0.0}
    return World(
        chance.dirichlet(np.full(levels, 2.0)),
        0.1 + 0.7 * chance.dirichlet(np.full(3, 1.5), levels),
        base,
        chance.dirichlet(np.full(3, 1.0), levels),
        Profile(table, table, 0.01 * draft, 0.02, (1.0, 0.01), decision, 0.0, {"device": "simulated"}),
    )


def outcomes(world: World, level: int, policy: StopPolicy) -> tuple[Array, Array, Array, Array]:
    """Return the outcomes of a round of one difficulty under a fixed length or a confidence threshold.

    Returns:
        [M] probabilities, [M] accepted tokens, [M] whether the round drafted tokens and all were accepted, and [2, M] seconds
        with a backlog of one and of two tokens.
    """
    chance, accept, longest = world.chance[level], world.accept[level], policy.max_depth
    high = policy.threshold <= SHOWN if isinstance(policy, Confidence) else np.ones(3, dtype=bool)
    going, stopping = float(chance[high].sum()), float(chance[~high].sum())
    goes_well, ends_well = (
        float(chance[shown] @ accept[shown]) / max(total, 1e-300) for shown, total in ((high, going), (~high, stopping))
    )
    rows = [(1.0, 0, 0, 0)] if not longest else []
    for k in range(1, longest + 1):
        is_last = k == longest
        reached = going ** (k - 1) * (1.0 if is_last else stopping)
        end = float(chance @ accept) if is_last else ends_well
        calls = min(k, DEPTH - 1) if isinstance(policy, Confidence) else 0
        rows += [(reached * goes_well**m * (1 - goes_well), k, calls, m) for m in range(k - 1)]
        rows += [(reached * goes_well ** (k - 1) * p, k, calls, m) for p, m in ((1 - end, k - 1), (end, k))]
    probability, *counts = zip(*rows, strict=True)
    drafted, decisions, accepted = (np.array(c, dtype=np.int64) for c in counts)
    one, price = np.ones_like(drafted), world.profile.decision(policy.cost_name)
    seconds = [world.profile.round_seconds(one, drafted, drafted, n * one, decisions, price) for n in (1, 2)]
    return np.array(probability), accepted, (drafted > 0) & (accepted == drafted), np.stack(seconds)


def true_seconds(world: World, policy: StopPolicy) -> float:
    """Return the expected seconds of a text: over difficulties and lengths, by recursion over the tokens left."""
    total = 0.0
    longest = int(LENGTHS.max())
    for level, share in enumerate(world.share):
        chance, accepted, is_full, cost = outcomes(world, level, policy)
        value = np.zeros((longest + DEPTH + 2, 2))  # [tokens left + DEPTH + 1, backlog 1 or 2]
        for left in range(1, longest):
            after = value[
                np.maximum(left - accepted - 1, 0), is_full.astype(int)
            ]  # a backlog of 2 follows a full round
            value[left] = (cost + after) @ chance
        # The first round reads the prompt: a backlog of more than one.
        total += float(share) * float(world.lengths[level] @ value[LENGTHS - 1, 1])
    return total + float(world.profile.prefill_seconds(np.array([PROMPT_TOKENS]))[0])


def true_round(world: World, policy: StopPolicy) -> tuple[float, float]:
    """Return the expected tokens and seconds of a round with a backlog of one."""
    tokens = seconds = 0.0
    for level, share in enumerate(world.share):
        chance, accepted, _, cost = outcomes(world, level, policy)
        tokens += float(share) * float(chance @ (accepted + 1))
        seconds += float(share) * float(chance @ cost[0])
    return tokens, seconds


def _chains(world: World, level: Array, chance: np.random.Generator) -> tuple[Array, Array]:
    """Return [N, DEPTH] confidences and whether each token would be accepted, for rows of these difficulties."""
    which = (chance.random((len(level), DEPTH, 1)) > world.chance[level].cumsum(1)[:, None, :2]).sum(-1)
    accepted = chance.random(which.shape) < world.accept[level[:, None], which]
    return SHOWN[which], np.cumprod(accepted, 1).astype(bool)


def _trace(prompts: int, columns: dict[str, Array], **more: Any) -> Trace:
    """Return a trace in memory. Columns that the policies do not read are zero."""
    longest = int(columns["text_tokens"].max()) + DEPTH + 1
    header = Header(
        "simulated", "simulated", {}, 8, (), 0.0, parents(chain(DEPTH)), ("drawn_prob",), (), longest, 0, 1, prompts, "",
        **more,
    )  # fmt: skip
    rows, nodes = columns["accepted"].shape
    zeros: dict[str, Any] = {
        **dict.fromkeys(("group", "sample", "text_hash"), [""] * rows),
        "prompt_id": [f"p{s}" for s in columns["sequence"]],
        "tokens": np.zeros((rows, nodes), dtype=np.int32),
        "prompt_tokens": np.full(rows, PROMPT_TOKENS),
        "accepted_length": columns["accepted"].sum(1),
        "observed": np.ones((rows, nodes), dtype=bool),
        **dict.fromkeys(("draft_prob", "target_prob", "overlap"), np.zeros((rows, nodes), dtype=np.float32)),
        **dict.fromkeys(TIMES, np.zeros(rows)),
    }
    table = shard_table(header, [{**zeros, **columns}])
    return Trace(Path("simulated"), header, datasets.Dataset(datasets.table.InMemoryTable(table)))


def sample_dense(world: World, prompts: int, chance: np.random.Generator) -> Trace:
    """Return a dense trace with this number of prompts."""
    level = chance.choice(len(world.share), prompts, p=world.share)
    length = np.array([chance.choice(LENGTHS, p=world.lengths[at]) for at in level])
    sequence = np.repeat(np.arange(prompts), length - 1)
    anchor = np.concatenate([np.arange(1, n) for n in length])
    shown, accepted = _chains(world, level[sequence], chance)
    columns = {"sequence": sequence, "anchor": anchor, "text_tokens": length[sequence], "drawn_prob": shown}
    return _trace(prompts, {**columns, "accepted": accepted, "cut": length[sequence] - anchor <= DEPTH})


def sample_live(world: World, prompts: int, logging: Confidence, explore: float, chance: np.random.Generator) -> Trace:
    """Return a live trace under `logging`, a share of its rounds drafted to full depth."""
    level = np.repeat(chance.choice(len(world.share), prompts, p=world.share), ROUNDS)
    sequence = np.repeat(np.arange(prompts), ROUNDS)
    shown, accepted = _chains(world, level, chance)
    depth = np.minimum((shown >= logging.threshold).cumprod(1).sum(1) + 1, DEPTH)
    explored = chance.random(len(level)) < explore
    drawn = np.arange(DEPTH) < np.where(explored, DEPTH, depth)[:, None]
    accepted = accepted & drawn
    committed = accepted.sum(1) + 1
    anchor = committed.reshape(prompts, ROUNDS).cumsum(1).ravel() - committed + 1
    ends = np.repeat(anchor.reshape(prompts, ROUNDS)[:, -1] + DEPTH + 2, ROUNDS)
    columns = {
        "sequence": sequence, "anchor": anchor, "text_tokens": ends, "cut": np.zeros(len(level), dtype=bool),
        "drawn_prob": np.where(drawn, shown, 0).astype(np.float32), "accepted": accepted, "drawn": drawn, "sent": drawn,
        "explored": explored, "committed": committed, "decisions": np.minimum(depth, DEPTH - 1),
        "backlog": np.ones_like(depth),
    }  # fmt: skip
    return _trace(prompts, columns, collector="live", policy=logging.name, explore=explore)


def dense_world(seed: int) -> list[Estimate]:
    """Return the ratios that `evaluate` estimates in one world."""
    chance = np.random.default_rng([seed, 0])
    world, prompts = draw_world(chance), SIZES[seed % len(SIZES)]
    report = evaluate(sample_dense(world, prompts, chance), world.profile, [LOGGING], seed=seed)
    fixed = [true_seconds(world, FixedLength(k)) for k in range(DEPTH + 1)]
    estimates = []
    for name, rule in (("Hugging Face default", DEEPER), (LOGGING.name, LOGGING)):
        line, spent = report[name], true_seconds(world, rule)
        for what, ratio, truth in (
            ("to plain", line.to_plain, fixed[0] / spent),
            ("to best fixed", line.to_best_fixed, min(fixed) / spent),
        ):
            estimates.append(Estimate("evaluate", f"{rule.name} {what}", prompts, *compared(ratio, truth)))
    return estimates


def live_world(seed: int) -> list[Estimate]:
    """Return what `importance_estimate` estimates in one world, at each size of `LIVE_SIZES`."""
    estimates = []
    for prompts in LIVE_SIZES:
        chance = np.random.default_rng([seed, prompts])
        world = draw_world(np.random.default_rng([seed, 1]))
        trace = sample_live(world, prompts, LOGGING, EXPLORE, chance)
        estimate = importance_estimate(trace, DEEPER, world.profile, seed=seed)
        tokens, seconds = true_round(world, DEEPER)
        recorded_tokens, recorded_seconds = true_round(world, LOGGING)
        for what, ratio, truth in (
            ("tokens", estimate.tokens, tokens),
            ("seconds", estimate.seconds, seconds),
            ("rate", estimate.tokens_per_s, tokens / seconds),
            ("to recorded", estimate.to_recorded, tokens / seconds * recorded_seconds / recorded_tokens),
        ):
            estimates.append(Estimate("importance", what, prompts, *compared(ratio, truth)))
    return estimates


def compared(ratio: Ratio, truth: float) -> tuple[bool, float]:
    """Return whether an interval covers the truth, and the relative error of the value."""
    return ratio.low * (1 - EXACT) <= truth <= ratio.high * (1 + EXACT), ratio.value / truth - 1.0


def timed_profile(world: World, disturbance: Disturbance, seed: int, budget_s: float) -> Profile:
    """Return the profile of a world measured on a disturbed machine, with a budget in seconds of its simulated clock."""
    low, high = (replace(world.profile.low, context=context) for context in (12.0, 60.0))
    machine = Machine(disturbance, seed, replace(world.profile, low=low, high=high), unit_s=4e-3)
    measured = measure({"chains": machine.texts}, Effort(budget_s), clock=machine.clock)
    return Profile.measured(measured, (low.context, high.context), DEPTH)
