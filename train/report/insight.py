"""Why a policy is as fast as it is: lengths chosen, wrong stops, where time goes, groups, prompts, other latencies.

Everything is computed from rounds that were replayed once (`log.play`), vectorised over rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...collect.acceptance import DepthOutcomes, depth_outcomes, survival
from ...decode.benchmark import Ratio
from ...policies.profile import Profile
from ..replay.bounds.regret import Regret
from ..replay.log import Played, scaled
from ..replay.seconds import prompt_seconds
from ..replay.traces.arrays import TraceArrays
from ..statistics import Resamples
from .pricing import Change, Draws, Priced

MOST_GROUPS = 40
MOST_POINTS = 1000
FACTORS = (0.5, 0.71, 1.41, 2.0)
_CENTRE = ("as measured", 1.0)


@dataclass(frozen=True)
class Entry:
    """A policy of a report with its replay."""

    name: str
    kind: str
    note: str
    played: Played


@dataclass(frozen=True)
class Lengths:
    """How deep a policy drafted against how deep the oracle would have, in the same rounds.

    Attributes:
        name: of the policy.
        chosen, ideal: [K + 1] rounds by depth 0..K.
        table: [K + 1, K + 1] rounds by chosen, then ideal depth.
    """

    name: str
    chosen: tuple[int, ...]
    ideal: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StopCost:
    """What a policy's stops cost against the oracle; the four parts add up to `total_s`.

    Attributes:
        name: of the policy.
        rounds, early_rounds, late_rounds: counted; the other rounds stopped right.
        early_ms, late_ms: per round, over all rounds.
        early_s, late_s: seconds lost by committing less than the ideal round, and by drafting or sending more for nothing.
        decision_s: seconds of decisions.
        other_s: reading what the draft had not read, and ties.
        total_s: seconds slower than the oracle.
        ms_per_token: (early, late, decisions, other).
    """

    name: str
    rounds: int
    early_rounds: int
    late_rounds: int
    early_ms: float
    late_ms: float
    early_s: float
    late_s: float
    decision_s: float
    other_s: float
    total_s: float
    ms_per_token: tuple[float, float, float, float]


@dataclass(frozen=True)
class TimeShare:
    """Where a policy's time goes, in milliseconds per token of text; the parts add up to `total_ms`."""

    name: str
    draft_ms: float
    verify_ms: float
    decision_ms: float
    outside_ms: float
    prompt_ms: float
    total_ms: float


@dataclass(frozen=True)
class Group:
    """A group of prompts: each policy's speed against the overall best fixed length, and the best one of the group."""

    name: str
    prompts: int
    tokens: int
    best_fixed: str
    ratios: dict[str, Ratio]


@dataclass(frozen=True)
class PromptPoint:
    """A sequence: the speed of the best fixed length and of the policy, plain decoding = 1."""

    prompt: str
    group: str
    tokens: int
    fixed: float
    policy: float


@dataclass(frozen=True)
class Sensitivity:
    """Each policy against the best fixed length if a part of the latency were `factor` times what the profile says."""

    what: str
    factor: float
    best_fixed: str
    ratios: dict[str, Ratio]


def trace_outcomes(arrays: TraceArrays) -> DepthOutcomes:
    """Return what the rounds of a trace show of each depth; a live trace is read with `extra=ROUND_COLUMNS`."""
    columns = {"accepted_length": arrays.accepted.numpy(), "cut": arrays.cut.numpy()}
    if arrays.drawn is not None:
        columns |= {"accepted": arrays.accepted_nodes().numpy(), "drawn": arrays.drawn.numpy()}
        columns |= {"tokens": arrays.tokens.numpy()}
        columns |= {name: arrays.extra[name].numpy() for name in ("observed", "sent", "explored")}
    return depth_outcomes(arrays.header, columns)


def acceptance_bands(arrays: TraceArrays, boot: Resamples) -> tuple[Ratio, ...]:
    """Return P(A >= k), k = 1, 2, ... as far as it was observed (`collect.acceptance`); empty where all rounds were cut."""
    outcomes = trace_outcomes(arrays)
    owner = arrays.owner.numpy()[outcomes.row]
    counts = np.zeros((2, arrays.sequences, arrays.depth))
    for total, by_round in zip(counts, (outcomes.observed, outcomes.accepted), strict=True):
        np.add.at(total, owner, by_round)
    shares = survival(boot.total(counts[0]), boot.total(counts[1]))
    return tuple(boot.interval(shares[:, at]) for at in np.flatnonzero(np.isfinite(shares[0])))


def lengths(name: str, played: Played, regret: Regret, depth: int) -> Lengths:
    """Count rounds by chosen and by ideal depth."""
    cell = played.rounds.steps * (depth + 1) + regret.ideal  # [R] below (K + 1)^2
    table = torch.bincount(cell, minlength=(depth + 1) ** 2).view(depth + 1, depth + 1)
    rows = tuple(tuple(row) for row in table.tolist())
    return Lengths(name, tuple(table.sum(1).tolist()), tuple(table.sum(0).tolist()), rows)


def stop_cost(name: str, regret: Regret, tokens: int) -> StopCost:
    """Add up what the rounds of a policy lost."""
    early, late = regret.early, regret.late
    rounds = max(len(early), 1)
    early_s, late_s = float(regret.choice_s[early].sum()), float(regret.choice_s[late].sum())
    decision_s = float(regret.decision_s.sum())
    other_s = float(regret.choice_s[~early & ~late].sum() + regret.backlog_s.sum())
    parts = (early_s, late_s, decision_s, other_s)
    per_token = tuple(1e3 * part / max(tokens, 1) for part in parts)
    return StopCost(
        name,
        len(early),
        int(early.sum()),
        int(late.sum()),
        1e3 * early_s / rounds,
        1e3 * late_s / rounds,
        *parts,
        sum(parts),
        (per_token[0], per_token[1], per_token[2], per_token[3]),
    )


def time_share(name: str, arrays: TraceArrays, played: Played, profile: Profile) -> TimeShare:
    """Take the modelled time of a policy apart."""
    rounds = played.rounds
    decided = float(rounds.decision_seconds(profile).sum())
    every = float(rounds.seconds(profile).sum())
    # Costs add up, so that doubling one of them adds what it is.
    draft = float(rounds.seconds(scaled(profile, draft=2.0)).sum()) - every
    verify = float(rounds.seconds(scaled(profile, verify=2.0)).sum()) - every
    prompt = float(prompt_seconds(profile, arrays.prompt_tokens).sum())
    parts = (draft, verify, decided, every - decided - draft - verify, prompt, every + prompt)
    scale = 1e3 / max(int(arrays.text_tokens.sum()), 1)
    return TimeShare(name, *(scale * part for part in parts))


def by_group(
    arrays: TraceArrays, entries: Sequence[Entry], fixed: Sequence[Played], best: Played, draws: Draws, seed: int
) -> tuple[Group, ...]:
    """Return the largest groups, by tokens; none where all prompts are of one group."""
    names = sorted(set(arrays.groups))
    if len(names) < 2:
        return ()
    tokens, every = arrays.text_tokens.double(), Resamples(arrays.clusters, seed)
    # Rounds are counted once for all groups; each group resamples its own prompts.
    priced = Priced(every, draws, [best.rounds, *(e.played.rounds for e in entries)], arrays.prompt_tokens)
    out = []
    for group in names:
        at = torch.tensor([i for i, name in enumerate(arrays.groups) if name == group])
        boot = Resamples([arrays.clusters[i] for i in at.tolist()], seed)
        reference, *spent = priced.among(boot, at).seconds().T
        ratios = {e.name: boot.interval(reference / mine) for e, mine in zip(entries, spent, strict=True)}
        fastest = min(fixed, key=lambda one: float(one.result.seconds[at].sum()))
        out.append(Group(group, boot.clusters, int(tokens[at].sum()), fastest.result.name, ratios))
    return tuple(sorted(out, key=lambda g: -g.tokens)[:MOST_GROUPS])


def by_prompt(arrays: TraceArrays, played: Played, plain: Played, best: Played, seed: int) -> tuple[PromptPoint, ...]:
    """Return a point for each sequence; of many, a random sample."""
    fixed = (plain.result.seconds / best.result.seconds).tolist()
    policy = (plain.result.seconds / played.result.seconds).tolist()
    keep = list(range(arrays.sequences))
    if len(keep) > MOST_POINTS:
        drawn = np.random.default_rng(seed).choice(arrays.sequences, MOST_POINTS, replace=False)
        keep = sorted(drawn.tolist())
    tokens = arrays.text_tokens.tolist()
    return tuple(PromptPoint(arrays.prompt_ids[i], arrays.groups[i], tokens[i], fixed[i], policy[i]) for i in keep)


def sensitivity(
    arrays: TraceArrays, entries: Sequence[Entry], fixed: Sequence[Played], draws: Draws, boot: Resamples
) -> tuple[Sensitivity, ...]:
    """Price the same rounds with other latencies: policies as they are, the best fixed length chosen again."""
    cases: list[tuple[str, float, Change | None]] = [(*_CENTRE, None)]
    cases += [("draft", f, partial(scaled, draft=f)) for f in FACTORS]
    cases += [("verification", f, partial(scaled, verify=f)) for f in FACTORS]
    cases += [("decisions", f, partial(scaled, decision=f)) for f in (0.0, 2.0)]
    priced = Priced(boot, draws, [one.rounds for one in (*fixed, *(e.played for e in entries))], arrays.prompt_tokens)
    out = []
    for what, factor, change in cases:
        spent = priced.seconds(change=change)
        grid, mine = spent[:, : len(fixed)], spent[:, len(fixed) :]
        # The best fixed length is chosen again in each resample.
        ratios = {e.name: boot.interval(grid.min(1) / mine[:, at]) for at, e in enumerate(entries)}
        out.append(Sensitivity(what, factor, fixed[int(grid[0].argmin())].result.name, ratios))
    return tuple(out)
