"""Why a policy is as fast as it is: calibration, lengths chosen, wrong stops, where time goes, groups, prompts, latencies.

All sections are JSON values and are computed from rounds that were replayed once (`log.play`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ...collect.acceptance import DepthOutcomes, depth_outcomes, survival as survival_by_depth
from ...collect.schema import Header
from ...decode.benchmark import Ratio
from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.display import Progress, silent
from ...policies.learned import LearnedPolicy, TreeGain
from ...policies.profile import Profile
from ..heads.calibration import BINS, calibration_error, perfect_error
from ..replay.arrays import TraceArrays, seen_features
from ..replay.bounds import OraclePlan, Regret, judge, planned_rounds
from ..replay.columns import seen_states
from ..replay.rounds import Rounds, scaled
from .pricing import Change, Priced, ProfileBootstrap, ResampleSource
from .statistics import Resamples

MOST_GROUPS, MOST_POINTS, MOST_ROUNDS = 40, 1000, 20_000
"""Groups and prompts that are shown, and rounds from which calibration is computed."""

FACTORS = (0.5, 0.71, 1.41, 2.0)
WORST_PROMPTS, WORST_ROUNDS, CONTEXT = 6, 3, 16
UNKNOWN = "▢"
"""Stands for a token that only the target proposed: a trace keeps the draft's."""

_SIMULATIONS = 20
_CHUNK = 4096
"""Rounds per call of a policy, which bounds the memory of features and hidden states."""

_DIGITS = 9
"""Of factors of seconds: timings are kept in whole nanoseconds."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A policy of a report with its replay; `kind` and `note` as of `Line`."""

    name: str
    kind: str
    note: str
    played: Rounds


@dataclass(frozen=True)
class Replays:
    """What the sections are computed from.

    Attributes:
        arrays, costs: the trace, and its latency with bootstrap samples of it.
        entries: the policies.
        fixed: every fixed length 0..K; `best` the fastest.
        plan: the oracle's.
    """

    arrays: TraceArrays
    costs: ProfileBootstrap
    entries: Sequence[Entry]
    fixed: Sequence[Rounds]
    best: Rounds
    plan: OraclePlan

    @property
    def compared(self) -> list[Entry]:
        """The best fixed length, then the entries."""
        return [Entry("best fixed", "fixed", "", self.best), *self.entries]

    def regret(self, played: Rounds) -> Regret:
        """Return what each round of a replay lost against the plan."""
        return judge(self.arrays, played, self.plan, self.costs.profile)


def details(replays: Replays, subject: str, boot: Resamples, seed: int, progress: Progress = silent) -> Json:
    """Return the sections by name.

    Args:
        replays: of one trace.
        subject: name of the entry that sections on one policy are about.
        boot: resamples of the clusters.
        seed: of random samples of large sections.
        progress: called before and after.
    """
    arrays, profile = replays.arrays, replays.costs.profile
    played = next(entry.played for entry in replays.entries if entry.name == subject)
    learned = [entry for entry in replays.entries if has_survival(entry.played.policy)]
    progress("report", 0, 1)
    sections = {
        "subject": subject,
        "per_prompt": per_prompt(replays, boot),
        "stops": stop_costs(replays),
        "time": [time_share(entry.name, arrays, entry.played, profile) for entry in replays.compared],
        "lengths": [lengths(name, replays, one) for name, one in ((subject, played), ("best fixed", replays.best))],
        "reliability": [reliability(entry.name, arrays, entry.played, seed) for entry in learned],
        "groups": by_group(replays, seed),
        "prompts": by_prompt(replays, played, seed),
        "sensitivity": sensitivity(replays, boot),
        "losses": largest_losses(replays, played, token_decoder(arrays.header)),
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
        `clusters`, `units` (what the report resamples), `prompts` (ids) and `tokens` by sequence; `seconds` by line and
        sequence; `profile` with `fingerprint`, `is_timed`, `pace_error` and `factors`: by line, seconds of the whole sample
        under each sample of the profile's timings, relative to the measured ones.
    """
    arrays, profile = replays.arrays, replays.costs.profile
    played = {"plain decoding": replays.fixed[0], **{e.name: e.played for e in replays.compared}}
    seconds = {name: one.seconds for name, one in played.items()} | {"oracle bound": replays.plan.seconds}
    rounds = [*played.values(), planned_rounds(arrays, replays.plan)]
    # Samples with the default seed, whatever that of the report: two reports on one profile have the same ones.
    costs = ProfileBootstrap(profile)
    priced = Priced(boot, costs, rounds, arrays.prompt_tokens, torch.stack(list(seconds.values()), 1))
    # Seconds are sums of model calls and decisions, so that the changes of both add up.
    calls, decided = (priced.factors(source)[1:] for source in (ResampleSource.PROFILE, ResampleSource.DECISIONS))
    factors = (calls + decided - 1.0).round(_DIGITS).T.tolist()
    return {
        "clusters": list(arrays.clusters),
        "units": boot.labels,
        "prompts": list(arrays.prompt_ids),
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
    """Return `stop_cost` of the best fixed length and every entry."""
    tokens = int(replays.arrays.text_tokens.sum())
    return [stop_cost(entry.name, replays.regret(entry.played), tokens) for entry in replays.compared]


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


def time_share(name: str, arrays: TraceArrays, played: Rounds, profile: Profile) -> Json:
    """Return where a policy's time goes, in milliseconds per token of text; the parts add up to `total_ms`."""
    decided = float(played.decision_seconds(profile).sum())
    total = float(played.price(profile).sum())
    # Costs add up, so that doubling one of them adds its value.
    draft = float(played.price(scaled(profile, draft=2.0)).sum()) - total
    verify = float(played.price(scaled(profile, verify=2.0)).sum()) - total
    prompt = float(profile.prefill_seconds(arrays.prompt_tokens.numpy()).sum())
    names = ("draft_ms", "verify_ms", "decision_ms", "outside_ms", "prompt_ms", "total_ms")
    parts = (draft, verify, decided, total - decided - draft - verify, prompt, total + prompt)
    scale = 1e3 / max(int(arrays.text_tokens.sum()), 1)
    return {"name": name, **{key: scale * part for key, part in zip(names, parts, strict=True)}}


def lengths(name: str, replays: Replays, played: Rounds) -> Json:
    """Return the number of rounds by draft depth 0..K: `chosen` by the policy, and `ideal` from the same anchors."""
    depths = {"chosen": played.steps, "ideal": replays.regret(played).ideal}
    counts = {key: torch.bincount(steps, minlength=replays.arrays.depth + 1).tolist() for key, steps in depths.items()}
    return {"name": name, **counts}


def by_group(replays: Replays, seed: int) -> list[Json]:
    """Return each policy's speed against the overall best fixed length in the largest groups of prompts, by tokens.

    Returns:
        `name`, `prompts`, `tokens`, the group's `best_fixed` and `ratios` by policy; empty if there is one group only.
    """
    arrays, tokens = replays.arrays, replays.arrays.text_tokens
    members = {
        name: [at for at, group in enumerate(arrays.groups) if group == name] for name in sorted(set(arrays.groups))
    }
    if len(members) < 2:
        return []
    out = []
    for name, at in sorted(members.items(), key=lambda item: -int(tokens[item[1]].sum()))[:MOST_GROUPS]:
        boot = Resamples([arrays.clusters[i] for i in at], seed)
        played = [replays.best, *(entry.played for entry in replays.entries)]
        rounds = [one.subset(at) for one in played]
        reference, *spent = Priced(boot, replays.costs, rounds, arrays.prompt_tokens[at]).seconds().T
        ratios = {e.name: boot.interval(reference / mine) for e, mine in zip(replays.entries, spent, strict=True)}
        fastest = min(replays.fixed, key=lambda one: float(one.seconds[at].sum()))
        figures = {"prompts": boot.clusters, "tokens": int(tokens[at].sum()), "best_fixed": fastest.name}
        out.append({"name": name, **figures, "ratios": {key: asdict(ratio) for key, ratio in ratios.items()}})
    return out


def by_prompt(replays: Replays, played: Rounds, seed: int) -> list[Json]:
    """Return speeds over plain decoding by sequence: of the best fixed length and of a policy; of many, a random sample."""
    arrays, plain = replays.arrays, replays.fixed[0].seconds
    keep = np.arange(arrays.sequences)
    if len(keep) > MOST_POINTS:
        keep = np.sort(np.random.default_rng(seed).choice(len(keep), MOST_POINTS, replace=False))
    return [
        {
            "prompt": arrays.prompt_ids[at],
            "group": arrays.groups[at],
            "fixed": float(plain[at] / replays.best.seconds[at]),
            "policy": float(plain[at] / played.seconds[at]),
        }
        for at in keep.tolist()
    ]


def sensitivity(replays: Replays, boot: Resamples) -> list[Json]:
    """Price the same rounds with scaled latencies: policies stop where they did, the best fixed length is chosen again.

    Returns:
        `what` is scaled by which `factor`, the `best_fixed` length and the `ratios` of the policies to it.
    """
    cases: list[tuple[str, float, Change | None]] = [("as measured", 1.0, None)]
    cases += [("draft", f, partial(scaled, draft=f)) for f in FACTORS]
    cases += [("verification", f, partial(scaled, verify=f)) for f in FACTORS]
    cases += [("decisions", f, partial(scaled, decision=f)) for f in (0.0, 2.0)]
    fixed, names = replays.fixed, [entry.name for entry in replays.entries]
    rounds = [*fixed, *(entry.played for entry in replays.entries)]
    priced = Priced(boot, replays.costs, rounds, replays.arrays.prompt_tokens)
    out = []
    for what, factor, change in cases:
        spent = priced.seconds(change=change)
        grid, policies = spent[:, : len(fixed)], spent[:, len(fixed) :]
        ratios = {name: asdict(boot.interval(grid.min(1) / policies[:, at])) for at, name in enumerate(names)}
        best = fixed[int(grid[0].argmin())].name
        out.append({"what": what, "factor": factor, "best_fixed": best, "ratios": ratios})
    return out


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
    features = seen_features(arrays, policy.features, row, history).numpy()
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
            {name: seen_states(arrays.hidden_state(name), row, nodes if depth else None) for name in policy.hidden},
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
    policy = played.policy
    assert has_survival(policy)
    row = arrays.offset[played.sequence] + played.anchor - arrays.first_anchor[played.sequence]
    use = torch.nonzero(~arrays.cut[row])[:, 0]
    if len(use) > MOST_ROUNDS:
        chosen = np.random.default_rng(seed).choice(use.numpy(), MOST_ROUNDS, replace=False)
        use = torch.from_numpy(np.sort(chosen))
    row, history = row[use], played.history[use]
    chunks = zip(row.split(_CHUNK), history.split(_CHUNK), strict=True)
    predicted = torch.cat([survival(policy, arrays, *chunk) for chunk in chunks])
    tree, start, accepted = arrays.tree, max(policy.first, 1), arrays.accepted_nodes(row)
    depths = []
    for depth in range(start, min(arrays.depth, policy.max_depth) + 1):
        level = torch.tensor(tree.levels[depth]) - 1
        use = torch.ones(len(row), len(level), dtype=torch.bool)
        if start > 1:
            use = accepted[:, [_ancestor(tree.parent, int(n) + 1, depth - start + 1) - 1 for n in level]]
        if use.any():
            depths.append(calibration(depth, predicted[:, level][use].numpy(), accepted[:, level][use].numpy(), seed))
    total = sum(one["all"]["count"] for one in depths) or 1
    means = {key: sum(one[key] * one["all"]["count"] for one in depths) / total for key in ("ece", "ece_perfect")}
    return {"name": name, "rounds": len(row), **means, "depths": depths}


def _ancestor(parent: tuple[int, ...], node: int, up: int) -> int:
    for _ in range(up):
        node = parent[node]
    return node


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


def token_decoder(header: Header) -> Callable[[int], str]:
    """Return token id -> text by the recorded tokenizer if the trace names its local folder; otherwise ids as they are."""
    if header.target and Path(header.target).is_dir():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(header.target, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError):
            return str
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
        if hashlib.blake2b(vocabulary, digest_size=8).hexdigest() == header.pair.get("tokenizer"):
            return lambda token: str(tokenizer.decode([token]))
    return str


def largest_losses(replays: Replays, played: Rounds, decode: Callable[[int], str] = str) -> list[Json]:
    """Return the texts that lose most by wrong stops of a policy, each with its worst rounds (`_loss_round`).

    Returns:
        `prompt`, `group`, `early_ms` and `late_ms` of wrong stops, speed `to_best_fixed`, and `rounds`.
    """
    arrays, rounds, regret = replays.arrays, played, replays.regret(played)
    kinds, ratio = (regret.early, regret.late), replays.best.seconds / played.seconds
    early, late = (1e3 * rounds.by_sequence(regret.choice_s * kind) for kind in kinds)
    wrong = torch.where(regret.early | regret.late, regret.choice_s, 0.0)
    out = []
    for text in torch.argsort(early + late, descending=True)[:WORST_PROMPTS].tolist():
        worst = torch.nonzero((rounds.sequence == text) & (wrong > 0))[:, 0]
        worst = worst[torch.argsort(wrong[worst], descending=True, stable=True)]
        if len(worst):
            # The last one shows the other kind of mistake, if there is one.
            other = worst[regret.early[worst] != regret.early[worst[0]]].tolist()[:1]
            shown = [at for at in worst.tolist() if at not in other][: WORST_ROUNDS - len(other)] + other
            figures = {
                "early_ms": float(early[text]),
                "late_ms": float(late[text]),
                "to_best_fixed": float(ratio[text]),
            }
            sample = [_loss_round(arrays, played, regret, at, decode) for at in shown]
            out.append({"prompt": arrays.prompt_ids[text], "group": arrays.groups[text], **figures, "rounds": sample})
    return out


def _loss_round(arrays: TraceArrays, played: Rounds, regret: Regret, at: int, decode: Callable[[int], str]) -> Json:
    """Return a round that stopped wrongly.

    Returns:
        `anchor`, tokens generated before it; `kind`, too early or too late; `chosen`, `ideal` and `accepted` depth; lost
        `ms`; `context`, the tokens before it; `pieces`, its tokens (in a tree those of the accepted path, then the first
        candidates) with `text`, `survival` as the policy computed it or None, and `state`: accepted, rejected, or missed,
        which was not drafted and would have been accepted.
    """
    rounds, policy = played, played.policy
    text, anchor, chosen = (int(values[at]) for values in (rounds.sequence, rounds.anchor, rounds.steps))
    begin = int(arrays.first_anchor[text])
    row = int(arrays.offset[text]) + anchor - begin
    nodes, length = _likely_path(arrays, row), int(arrays.accepted[row])
    guesses = [float("nan")] * len(nodes)
    if has_survival(policy):
        by_node = survival(policy, arrays, torch.tensor([row]), played.history[at : at + 1])[0]
        guesses = by_node[nodes].tolist()
    pieces = []
    for depth, (node, guess) in enumerate(list(zip(nodes, guesses, strict=True))[: max(chosen, length)], 1):
        state = ("accepted" if depth <= chosen else "missed") if depth <= length else "rejected"
        token = decode(int(arrays.tokens[row, node]))
        pieces.append({"text": token, "survival": None if np.isnan(guess) else guess, "state": state})
    # A trace keeps drafts, not texts: a token of the text is known if the draft after the token before it was accepted.
    before = range(row - min(CONTEXT, anchor - begin), row)
    return {
        "anchor": anchor,
        "kind": "too early" if bool(regret.early[at]) else "too late",
        "chosen": chosen,
        "ideal": int(regret.ideal[at]),
        "accepted": int(rounds.accepted[at]),
        "ms": 1e3 * float(regret.choice_s[at]),
        "context": [
            decode(int(arrays.tokens[one, _likely_path(arrays, one)[0]])) if int(arrays.accepted[one]) else UNKNOWN
            for one in before
        ],
        "pieces": pieces,
    }


def _likely_path(arrays: TraceArrays, row: int) -> list[int]:
    """Return the nodes of the accepted path, and below it the first candidate of each depth."""
    tree, node, out = arrays.tree, 0, []
    while children := tree.children[node]:
        accepted = [] if arrays.path is None else [child for child in children if bool(arrays.path[row, child - 1])]
        node = (accepted or children)[0]
        out.append(node - 1)
    return out
