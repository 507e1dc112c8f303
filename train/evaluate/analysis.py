"""Why a policy is as fast as it is: calibration, wrong stops, where time goes, groups and prompts.

All sections are JSON values. They are computed from rounds that were replayed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ...collect.acceptance import DepthOutcomes, depth_outcomes, survival as survival_by_depth
from ...decode.benchmark import Ratio
from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.display import Progress, silent
from ...policies.learned import LearnedPolicy, TreeGain
from ...policies.profile import Profile
from ..heads.calibration import BINS, calibration_error, perfect_error
from ..replay.arrays import TraceArrays, policy_features
from ..replay.bounds import ROUTE_ERRORS, OraclePlan, Regret, planned_rounds, round_regret, route_errors
from ..replay.columns import policy_states
from ..replay.rounds import Rounds, scale_costs
from .pricing import PricedReplays, ProfileBootstrap, ResampleSource
from .statistics import Resamples

MAX_GROUPS, MAX_POINTS, MAX_ROUNDS = 40, 1000, 20_000
"""Groups and prompts that are shown, and rounds from which calibration is computed."""

_SIMULATIONS = 20
_CHUNK = 4096
"""Rounds per call of a policy, which bounds the memory of features and hidden states."""

_DIGITS = 9
"""Of factors of seconds: timings are kept in whole nanoseconds."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Replays:
    """What the sections are computed from.

    Attributes:
        arrays, costs: the trace, and its latency with bootstrap samples of it.
        policies: replays by name.
        fixed: every fixed length 0..K; `best` the fastest.
        plan: the oracle's.
        estimate: [S] seconds of the achievable estimate; None = not computed.
    """

    arrays: TraceArrays
    costs: ProfileBootstrap
    policies: Mapping[str, Rounds]
    fixed: Sequence[Rounds]
    best: Rounds
    plan: OraclePlan
    estimate: Tensor | None = None

    @property
    def compared(self) -> dict[str, Rounds]:
        """The best fixed length, then the policies."""
        return {"best fixed": self.best, **self.policies}


def details(
    replays: Replays, subject: str, stops: list[Json], boot: Resamples, seed: int, progress: Progress = silent
) -> Json:
    """Return the sections by name.

    Args:
        replays: of one trace.
        subject: name of the policy that sections on one policy are about.
        stops: see `stop_costs`.
        boot: resamples of the clusters.
        seed: of random samples of large sections.
        progress: called before and after.
    """
    arrays, profile = replays.arrays, replays.costs.profile
    progress("report", 0, 1)
    learned = {name: played for name, played in replays.policies.items() if has_survival(played.policy)}
    sections = {
        "subject": subject,
        "per_prompt": per_prompt(replays, boot),
        "stops": stops,
        "routes": route_costs(replays),
        "time": [time_share(name, arrays, played, profile) for name, played in replays.compared.items()],
        "reliability": [
            reliability(name, arrays.of_policy(played.policy), played, seed) for name, played in learned.items()
        ],
        "groups": by_group(replays, seed),
        "prompts": by_prompt(replays, replays.policies[subject], seed),
    }
    progress("report", 1, 1)
    return sections


def trace_outcomes(arrays: TraceArrays) -> DepthOutcomes:
    """Return what the rounds of a trace show of each depth; a live trace is read with `extra=ROUND_COLUMNS`."""
    columns = {"accepted_length": arrays.accepted.numpy(), "cut": arrays.cut.numpy()}
    if arrays.drawn is not None:
        columns |= {"accepted": arrays.accepted_nodes().numpy(), "drawn": arrays.drawn.numpy()}
        columns |= {"tokens": arrays.tokens.numpy()}
        columns |= {name: arrays.extra[name].numpy() for name in ("observed", "sent", "explored")}
    return depth_outcomes(arrays.header, columns)


def acceptance_bands(arrays: TraceArrays, boot: Resamples) -> tuple[Ratio, ...]:
    """Return P(A >= k), k = 1, 2, ... as far as it was observed (`collect.acceptance`); empty if all rounds were cut."""
    outcomes = trace_outcomes(arrays)
    owner = arrays.owner.numpy()[outcomes.row]
    counts = np.zeros((2, arrays.sequences, arrays.depth))
    for total, by_round in zip(counts, (outcomes.observed, outcomes.accepted), strict=True):
        np.add.at(total, owner, by_round)
    shares = survival_by_depth(boot.total(counts[0]), boot.total(counts[1]))
    return tuple(boot.interval(shares[:, at]) for at in np.flatnonzero(np.isfinite(shares[0])))


def per_prompt(replays: Replays, boot: Resamples) -> Json:
    """Return the figures by which reports are compared pairwise: by sequence, and by sample of the profile's timings.

    Returns:
        `clusters`, `units` (what the report resamples) and `tokens` by sequence; `seconds` by line and sequence; `profile`
        with `fingerprint`, `is_timed`, `pace_error` and `factors`: by line, seconds of the whole sample under each sample
        of the profile's timings, relative to the measured ones.
    """
    arrays, profile = replays.arrays, replays.costs.profile
    played = {"plain decoding": replays.fixed[0], **replays.compared}
    seconds = {name: one.seconds for name, one in played.items()} | {"oracle bound": replays.plan.seconds}
    rounds = [*played.values(), planned_rounds(arrays, replays.plan)]
    # Samples with the default seed, whatever that of the report: two reports on one profile have the same ones.
    costs = ProfileBootstrap(profile)
    priced = PricedReplays(boot, costs, rounds, torch.stack(list(seconds.values()), 1))
    factors = priced.factors(ResampleSource.PROFILE)[1:].round(_DIGITS).T.tolist()
    return {
        "clusters": list(arrays.clusters),
        "units": boot.labels,
        "tokens": arrays.text_tokens.double().tolist(),
        "seconds": {name: values.tolist() for name, values in seconds.items()},
        "profile": {
            "fingerprint": profile.fingerprint,
            "is_timed": costs.is_timed,
            "pace_error": profile.noise.pace_error if profile.noise else 0.0,
            "factors": dict(zip(seconds, factors, strict=True)),
        },
    }


def stop_costs(replays: Replays) -> list[Json]:
    """Return `stop_cost` of the best fixed length and every policy."""
    arrays, profile, tokens = replays.arrays, replays.costs.profile, int(replays.arrays.text_tokens.sum())
    return [
        stop_cost(name, round_regret(arrays, played, replays.plan, profile), tokens)
        for name, played in replays.compared.items()
    ]


def stop_cost(name: str, regret: Regret, tokens: int) -> Json:
    """Return the cost of a policy's stops against the oracle.

    Returns:
        `rounds`; `early_rounds` and `late_rounds` that stopped wrongly; `early_s` and `late_s`, lost by committing less than
        the ideal round, and by drafting or sending more for nothing; `decision_s`; `other_s`, reading what the draft had not
        read, and ties; `total_s`, the sum of these four parts; `ms_per_token`, the four parts per token of text.
    """
    early, late = regret.early, regret.late
    parts = {
        "early_s": float(regret.choice_s[early].sum()),
        "late_s": float(regret.choice_s[late].sum()),
        "decision_s": float(regret.decision_s.sum()),
        "other_s": float(regret.choice_s[~early & ~late].sum() + regret.backlog_s.sum()),
    }
    per_token = [1e3 * part / max(tokens, 1) for part in parts.values()]
    counts = {"rounds": len(early), "early_rounds": int(early.sum()), "late_rounds": int(late.sum())}
    return {"name": name, **counts, **parts, "total_s": sum(parts.values()), "ms_per_token": per_token}


def route_costs(replays: Replays) -> list[Json]:
    """Return what each policy loses against the oracle by its choice of drafters; empty for one drafter.

    Returns:
        `name`, `rounds`, and for each of `bounds.ROUTE_ERRORS` the rounds with it and the seconds that they lost.
    """
    arrays, profile, out = replays.arrays, replays.costs.profile, []
    for name, played in replays.compared.items() if arrays.tree.drafters > 1 else ():
        regret = round_regret(arrays, played, replays.plan, profile)
        error = route_errors(played, replays.plan, regret)
        row: Json = {"name": name, "rounds": len(error)}
        for index, kind in enumerate(ROUTE_ERRORS):
            row[f"{kind}_rounds"] = int((error == index).sum())
            row[f"{kind}_s"] = float(regret.choice_s[error == index].sum())
        out.append(row)
    return out


def time_share(name: str, arrays: TraceArrays, played: Rounds, profile: Profile) -> Json:
    """Return where a policy's time goes, in milliseconds per token of text; the parts add up to `total_ms`."""
    decided = float(played.decision_seconds(profile).sum())
    total = float(played.price(profile).sum())
    # Costs add up, so that doubling one of them adds its value.
    draft = float(played.price(scale_costs(profile, draft=2.0)).sum()) - total
    verify = float(played.price(scale_costs(profile, verify=2.0)).sum()) - total
    prompt = float(profile.prefill_seconds(arrays.prompt_tokens.numpy()).sum())
    names = ("draft_ms", "verify_ms", "decision_ms", "outside_ms", "prompt_ms", "total_ms")
    parts = (draft, verify, decided, total - decided - draft - verify, prompt, total + prompt)
    scale = 1e3 / max(int(arrays.text_tokens.sum()), 1)
    return {"name": name, **{key: scale * part for key, part in zip(names, parts, strict=True)}}


def by_group(replays: Replays, seed: int) -> list[Json]:
    """Return each policy's speed against the best fixed length of the group, in the largest groups of prompts by tokens.

    Returns:
        `name`, `prompts`, `tokens`, the group's `best_fixed`, and `ratios` by policy, of the overall best fixed length and of
        the bounds; empty if there is one group only.
    """
    arrays, tokens = replays.arrays, replays.arrays.text_tokens
    members = {
        name: [at for at, group in enumerate(arrays.groups) if group == name] for name in sorted(set(arrays.groups))
    }
    if len(members) < 2:
        return []
    out = []
    for name, at in sorted(members.items(), key=lambda item: -int(tokens[item[1]].sum()))[:MAX_GROUPS]:
        boot = Resamples([arrays.clusters[i] for i in at], seed)
        fastest = min(replays.fixed, key=lambda one: float(one.seconds[at].sum()))
        rounds = [one.subset(at) for one in (fastest, *replays.compared.values())]
        reference, *spent = PricedReplays(boot, replays.costs, rounds).seconds().T
        ratios = {x: asdict(boot.interval(reference / mine)) for x, mine in zip(replays.compared, spent, strict=True)}
        # Bounds are no replays: their prices vary with the profile as those of the best fixed length.
        measured = boot.total(fastest.seconds[at].numpy())
        bounds = {"achievable estimate": replays.estimate, "oracle bound": replays.plan.seconds}
        for bound, seconds in bounds.items():
            if seconds is not None:
                ratios[bound] = asdict(boot.interval(measured / boot.total(seconds[at].numpy())))
        figures = {"prompts": boot.clusters, "tokens": int(tokens[at].sum()), "best_fixed": fastest.name}
        out.append({"name": name, **figures, "ratios": ratios})
    return out


def by_prompt(replays: Replays, played: Rounds, seed: int) -> list[Json]:
    """Return speeds over plain decoding by sequence: of the best fixed length and of a policy; of many, a random sample."""
    arrays, plain = replays.arrays, replays.fixed[0].seconds
    keep = np.arange(arrays.sequences)
    if len(keep) > MAX_POINTS:
        keep = np.sort(np.random.default_rng(seed).choice(len(keep), MAX_POINTS, replace=False))
    return [
        {
            "prompt": arrays.prompt_ids[at],
            "group": arrays.groups[at],
            "fixed": float(plain[at] / replays.best.seconds[at]),
            "policy": float(plain[at] / played.seconds[at]),
        }
        for at in keep.tolist()
    ]


def has_survival(policy: StopPolicy) -> TypeGuard[LearnedPolicy]:
    """Whether the state of a policy is the survival of a depth; that of tree policies is not."""
    return isinstance(policy, LearnedPolicy) and not isinstance(policy, TreeGain)


def survival(policy: LearnedPolicy, arrays: TraceArrays, row: Tensor, history: Tensor) -> Tensor:
    """Return [R, N] float64, S of every node as the policy computes it while it drafts; NaN where it is not called.

    Branches stay alive after a rejection, because a live policy does not know of it.

    Args:
        policy: any with `has_survival`.
        arrays: the trace.
        row: [R] of the anchors.
        history: [R, 4] at the beginning of the rounds.
    """
    features = policy_features(arrays, policy.features, row, history).numpy()
    tree, streams = arrays.tree.limited(policy.max_depth), len(row)
    out = np.full((streams, arrays.tree.nodes), np.nan)
    state = policy.start(streams, np.zeros(streams, dtype=np.int64))  # learned policies draw no random numbers
    for depth in range(policy.first, tree.deepest + 1):
        level = np.array(tree.levels[depth]) - 1  # nodes; row 0 is the root, -1 at depth 0
        nodes = torch.from_numpy(level)
        step = DraftStep(
            depth,
            np.ones((streams, len(level)), dtype=bool),
            np.tile(tree.parent_in_level[depth], (streams, 1)),
            np.ascontiguousarray(features[:, level + 1]),
            {name: policy_states(arrays.hidden_state(name), row, nodes if depth else None) for name in policy.hidden},
            np.arange(streams),
        )
        _, state = policy.keep(step, state)
        if depth:
            out[:, level] = policy.latest(state)
    return torch.from_numpy(out)


def reliability(name: str, arrays: TraceArrays, played: Rounds, seed: int) -> Json:
    """Compare survival with what was accepted, by depth, in the rounds of the policy; of many, in a random sample.

    If the first decision is at a depth above 1, survival begins there, given that everything above was accepted.

    Returns:
        `rounds`, `ece` and `ece_perfect` (means over depths, weighted by counts) and `depths`, see `calibration`.
    """
    policy, tree = played.policy, arrays.tree
    assert has_survival(policy)
    row = arrays.offset[played.sequence] + played.anchor - arrays.first_anchor[played.sequence]
    use = torch.nonzero(~arrays.cut[row])[:, 0]
    if len(use) > MAX_ROUNDS:
        chosen = np.random.default_rng(seed).choice(use.numpy(), MAX_ROUNDS, replace=False)
        use = torch.from_numpy(np.sort(chosen))
    row, history = row[use], played.history[use]
    chunks = zip(row.split(_CHUNK), history.split(_CHUNK), strict=True)
    predicted = torch.cat([survival(policy, arrays, *chunk) for chunk in chunks])
    start, accepted, depths = max(policy.first, 1), arrays.accepted_nodes(row), []
    above = list(range(tree.nodes + 1))  # by row of the tree: its ancestor at the depth before `start`
    for depth in range(1, min(arrays.depth, policy.max_depth) + 1):
        for node in tree.levels[depth] if depth >= start else ():
            above[node] = above[tree.parent[node]]
        level = torch.tensor(tree.levels[depth]) - 1
        is_selected = torch.ones(len(row), len(level), dtype=torch.bool)
        if start > 1 and depth >= start:
            is_selected = accepted[:, [above[int(node) + 1] - 1 for node in level]]
        if depth >= start and is_selected.any():
            depths.append(
                calibration(
                    depth, predicted[:, level][is_selected].numpy(), accepted[:, level][is_selected].numpy(), seed
                )
            )
    total = sum(one["all"]["count"] for one in depths) or 1
    means = {key: sum(one[key] * one["all"]["count"] for one in depths) / total for key in ("ece", "ece_perfect")}
    return {"name": name, "rounds": len(row), **means, "depths": depths}


def calibration(depth: int, predicted: Array, accepted: Array, seed: int) -> Json:
    """Return the calibration of predictions [M] of labels [M].

    Returns:
        `depth`; `all` and `bins` of equal counts, each with mean `predicted`, `observed` share, the `low` and `high` end of
        its 95% interval (Wilson) and `count`; `ece`, the expected calibration error; `ece_perfect`, that of a perfectly
        calibrated predictor with the same predictions, by chance alone.
    """
    order = np.argsort(predicted, kind="stable")
    predicted, accepted = predicted[order], accepted[order]
    parts = (np.array_split(side, min(BINS, len(predicted))) for side in (predicted, accepted))
    return {
        "depth": depth,
        "all": _bin(predicted, accepted),
        "ece": calibration_error(predicted, accepted, BINS),
        "ece_perfect": perfect_error(predicted, seed, BINS, _SIMULATIONS)[0],
        "bins": [_bin(*both) for both in zip(*parts, strict=True)],
    }


def _bin(predicted: Array, accepted: Array) -> Json:
    from scipy.stats import binomtest

    low, high = binomtest(int(accepted.sum()), len(accepted)).proportion_ci(method="wilson")
    shares = {"predicted": float(predicted.mean()), "observed": float(accepted.mean())}
    return {**shares, "low": float(low), "high": float(high), "count": len(predicted)}
