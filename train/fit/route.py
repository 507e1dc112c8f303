"""`train --decide route`: learn which of several drafters drafts in a round, by iterating on the values of rounds.

A round of drafter i from anchor t that commits n tokens in c seconds has the value

    Q_i(t) = n - rho c + W(t + n),    W(t) = Q_{route(t)}(t)

where rho is the rate of the route and W the value of the rest of the text under it. Dense traces have the outcome of every
drafter at every anchor, so that W is a backward recursion over the fixed text. A regression of the round's own value
n - rho c alone was slower than a threshold on one signal: a route has to know where the round ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from ...decode.profile import add_decisions
from ...policies.contract import Array, DraftStep, State, StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import InputError
from ...policies.features import History, Kind, feature
from ...policies.fixed import FixedLength
from ...policies.heads.base import Head
from ...policies.learned import TrainingMetadata
from ...policies.profile import Profile
from ...policies.routing import RoutingPolicy, ThresholdRoute, ValueRoute, input_features
from ..heads.base import HeadEstimator
from ..heads.crossfit import prompt_folds
from ..heads.rows import FitRows
from ..replay.arrays import TraceArrays
from ..replay.rounds import Rounds
from ..replay.run import replay, replay_anchors, replay_lengths
from .plan import TrainOptions, split_report, training_prompts
from .rules import best_of, fixed_grid

PASSES = 4
"""Number of fits; each uses the values under the route before it."""

OTHER_ANCHORS = 0.15
"""Share of the anchors that the route does not visit on which heads are fitted too: the next route visits some of them."""

LEVELS: Mapping[str, Sequence[float]] = {
    "agreement_run": (1, 2, 4, 8),
    "match_prob": (0.3, 0.5, 0.7, 0.9),
    "match_length": (2, 4, 8, 16),
}
"""Thresholds of the rules that are tried, by signal."""

SPAN_QUANTILE = 0.99
"""Quantile of the absolute gains that a head can predict: larger ones are clipped."""

FEATURES = ("idle_tokens", "mean_accepted", "last_accepted")
"""Default features, besides the recorded signals and `anchor_top1`."""


@dataclass(frozen=True)
class Anchors:
    """What each option is worth at each anchor of a trace, under a route.

    Attributes:
        inputs: [N, F'] float32 of the heads.
        values: [N, D + 1] float64 Q, the drafters and plain decoding.
        visited: [N] bool, anchors where the route begins a round.
    """

    inputs: Array
    values: Array
    visited: Array


def fit_route(
    arrays: TraceArrays,
    profile: Profile,
    head: HeadEstimator,
    options: TrainOptions,
    stops: Sequence[StopPolicy] = (),
    progress: Progress = silent,
) -> RoutingPolicy:
    """Return the fastest of learned routes and tuned rules on the select prompts.

    Args:
        arrays: a dense trace of several drafters, all prompts.
        profile: what rounds cost, with all drafters.
        head: not fitted.
        options: features, seed, folds, number of passes, and share of the report prompts.
        stops: learned stop policies of the drafters, tried besides fixed lengths.
        progress: see `Progress`.

    Raises:
        InputError: a feature is not known before drafting.
        TraceError: the trace has too few prompts.
    """
    names = route_features(arrays, options.features)
    rest, report = split_report(arrays, options.report_share, options.seed)
    folds = prompt_folds(rest, options.folds, options.seed)
    fit, select = (rest.subset(folds.sequences(0, inside)) for inside in (False, True))
    progress("rules", 0, 1)
    rules = tuned_rules(fit, profile)
    for rule in [*rules] if stops else ():
        rules.append(with_stops(rule, stops))
        rules[-1].name = f"learned-stop-{rule.name}"  # their decisions have another price
    profile = add_decisions(profile, rules, arrays.header.vocabulary, arrays.header.hidden)
    progress("rules", 1, 1)
    rates = {id(rule): replay(select, rule, profile).rate for rule in rules}
    tried = [(rule, rates[id(rule)]) for rule in rules]
    current, rho = max(tried, key=lambda one: one[1])
    passes = PASSES if options.passes is None else options.passes
    for number in range(passes):
        progress("routes", number, passes)
        current = _fit_heads(current, names, fit, select, profile, rho, head, options.seed + number)
        current.name = options.name or "route"
        profile = add_decisions(profile, [current], arrays.header.vocabulary, arrays.header.hidden)
        rate = replay(select, current, profile).rate
        tried.append((current, rate))
        rho = max(rho, rate)
    progress("routes", passes, passes)
    best, rate = max(tried, key=lambda one: one[1])
    metrics: dict[str, Any] = {"drafters": ", ".join(arrays.drafters), "routes": _table(tried)}
    if report is not None:
        metrics |= _held_out(best, [rule for rule in rules if rule is not best], report, profile)
    header, prompts = arrays.header, training_prompts(rest, folds, report)
    best.metadata = TrainingMetadata(
        temperature=header.temperature, verification=header.verification, label=header.label, pair=dict(header.pair),
        rho=rate, profile=profile.record(best.cost_name), provenance={"drafter": header.facts.get("drafter")},
        sampling=dict(header.sampling), prompts=prompts,
        metrics={**{f"{name}_prompts": len(group) for name, group in prompts.items()}, **metrics},
    )  # fmt: skip
    return best


def route_features(arrays: TraceArrays, requested: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the features of a route: the requested ones, or all recorded signals and a few others.

    Raises:
        InputError: a feature is known only after drafting.
    """
    recorded = [name for name in ("anchor_top1",) if name in arrays.header.anchor_features]
    names = tuple(requested or (*arrays.header.signals, *FEATURES, *recorded))
    if late := [name for name in names if feature(name).kind in (Kind.PRE, Kind.POST)]:
        raise InputError(f"--feature: expected features that are known before drafting, got {', '.join(late)}")
    return names


# Rules


def with_stops(route: RoutingPolicy, stops: Sequence[StopPolicy]) -> RoutingPolicy:
    """Return a route with other stop policies of its drafters."""
    if isinstance(route, ThresholdRoute):
        return ThresholdRoute(route.feature, float(route.level), stops)
    assert isinstance(route, ValueRoute)
    return ValueRoute(route.name, route.route_features, route.heads, route.reference, stops, route.metadata)


def tuned_rules(arrays: TraceArrays, profile: Profile) -> list[RoutingPolicy]:
    """Return each drafter alone, and the best threshold on each signal, all with the fastest fixed lengths.

    Lengths are those that are best for a drafter alone, and then tuned one after the other under each rule.
    """
    best = {name: best_of([one for one in fixed_grid(arrays, profile) if one.policy.drafter == name])
            for name in arrays.drafters}  # fmt: skip
    stops = [FixedLength(played.policy.max_depth) for played in best.values()]
    rules: list[RoutingPolicy] = [
        ValueRoute(f"always-{name}", (), (), at, stops) for at, name in enumerate(arrays.drafters)
    ]
    for signal, levels in LEVELS.items():
        if signal in arrays.header.signals:
            candidates = [ThresholdRoute(signal, level, stops) for level in levels]
            rules.append(tune_lengths(fastest(candidates, arrays, profile), arrays, profile))
    return rules


def tune_lengths(route: RoutingPolicy, arrays: TraceArrays, profile: Profile) -> RoutingPolicy:
    """Return a route with the fastest fixed length of each drafter, tuned one after the other."""
    for index in range(len(route.stops)):
        candidates = [route]
        for length in range(1, min(arrays.depth, profile.max_depth) + 1):
            stops = [*route.stops[:index], FixedLength(length), *route.stops[index + 1 :]]
            candidates.append(with_stops(route, stops))
        route = fastest(candidates, arrays, profile)
    return route


def fastest(rules: Sequence[RoutingPolicy], arrays: TraceArrays, profile: Profile) -> RoutingPolicy:
    """Return the fastest of several routes with fixed lengths. Rules read recorded signals only, so that all play at once."""
    if any(isinstance(rule, ValueRoute) and rule.heads for rule in rules):
        return max(rules, key=lambda rule: replay(arrays, rule, profile).rate)
    lengths = torch.stack([rule_lengths(rule, arrays) for rule in rules])  # [C, N, D]
    return rules[int(np.argmax([played.rate for played in replay_lengths(arrays, lengths, lengths, profile, rules)]))]


def rule_lengths(rule: RoutingPolicy, arrays: TraceArrays) -> Tensor:
    """Return [N, D], what a rule that reads recorded signals only drafts at each anchor."""
    signals = [arrays.column(name) for name in rule.features]
    seen = torch.stack(signals, -1) if signals else torch.zeros(len(arrays.owner), arrays.tree.drafters, 0)
    return torch.from_numpy(rule.route(seen.numpy(), None)[0] * rule.lengths)


# Values


def anchor_values(
    arrays: TraceArrays, route: RoutingPolicy, names: Sequence[str], profile: Profile, rho: float
) -> Anchors:
    """Return what each option is worth at each anchor if the route is followed from where its round ends.

    HISTORY features are those of the last round before the anchor. The backlog of a drafter is its usual one.
    """
    drafters, played = arrays.tree.drafters, replay(arrays, route, profile)
    history, backlog = _history(arrays, played)
    inputs: list[Array] = []

    def keep_inputs(step: DraftStep, state: State) -> None:
        if step.depth == 0:
            columns, _ = input_features(names, drafters)
            inputs.append(step.features[..., : len(names)].reshape(len(step.features), -1)[:, columns])

    tokens, seconds = [], []
    for option in range(drafters + 1):
        probe = ValueRoute(route.name, names, (), option, route.stops)
        one = replay_anchors(arrays, probe, profile, history, backlog, None if option else keep_inputs)
        tokens.append(one.committed)
        seconds.append(one.price(profile))
    drafting = replay_anchors(arrays, route, profile, history, backlog).drafting.numpy()
    chosen = np.where(drafting.any(1), drafting.argmax(1), drafters)
    committed = torch.stack(tokens, 1)  # [N, D + 1]
    gains = committed - rho * torch.stack(seconds, 1)
    rest = rest_of_text(arrays, committed, gains, torch.from_numpy(chosen))
    visited = np.zeros(len(chosen), dtype=bool)
    visited[_rows(arrays, played)] = True
    return Anchors(np.ascontiguousarray(inputs[0]), (gains + rest).numpy(), visited)


def _rows(arrays: TraceArrays, played: Rounds) -> Array:
    """Return [R] int64, the row of each round."""
    rows: Array = (arrays.offset[played.sequence] + played.anchor - arrays.first_anchor[played.sequence]).numpy()
    return rows


def _history(arrays: TraceArrays, played: Rounds) -> tuple[History, Array]:
    """Return the history at each anchor, that of the last round, and the usual backlog of each drafter [N, D]."""
    count, values = len(arrays.owner), played.history.double().numpy()
    last = np.zeros(count, dtype=np.int64)
    last[_rows(arrays, played)] = np.arange(len(played))  # the first anchor of every text has a round
    values = values[np.maximum.accumulate(last)]  # [N, D, 5]
    # The last column of a record is only read to update it.
    record = np.concatenate([values[..., :-1], np.ones_like(values[..., :1])], -1)
    drafting, backlog = played.drafting, played.backlog
    later = (played.anchor > arrays.first_anchor[played.sequence])[:, None] & drafting
    usual = [int(backlog[later[:, at], at].median()) if later[:, at].any() else 1 for at in range(backlog.shape[1])]
    return History(record, values[..., -1]), np.tile(np.array(usual, dtype=np.int64), (count, 1))


def rest_of_text(arrays: TraceArrays, committed: Tensor, gains: Tensor, chosen: Tensor) -> Tensor:
    """Return [N, D + 1], the value of the text from where the round of each option ends.

    Args:
        arrays: the trace.
        committed, gains: [N, D + 1] tokens, and tokens less rho times seconds, of the round of each option.
        chosen: [N], the option of the route.
    """
    length, sequence = arrays.rows, torch.arange(arrays.sequences)
    longest = int(length.max())
    value = torch.zeros(arrays.sequences, longest + 1, dtype=torch.float64)
    for t in range(longest - 1, -1, -1):
        on = sequence[length > t]
        row = arrays.offset[on] + t
        option = chosen[row]
        end = torch.minimum(t + committed[row, option], length[on])
        value[on, t] = gains[row, option] + value[on, end]
    at = torch.arange(len(arrays.owner)) - arrays.offset[arrays.owner]
    ends = torch.minimum(at[:, None] + committed, length[arrays.owner][:, None])
    return value[arrays.owner[:, None], ends]


def _fit_heads(
    route: RoutingPolicy,
    names: Sequence[str],
    fit: TraceArrays,
    select: TraceArrays,
    profile: Profile,
    rho: float,
    estimator: HeadEstimator,
    seed: int,
) -> ValueRoute:
    """Return a route whose heads predict the gains over the best single option, under the given route."""
    drafters, rng = fit.tree.drafters, np.random.default_rng(seed)
    sides, uses = [], []
    for arrays in (fit, select):
        anchors = anchor_values(arrays, route, names, profile, rho)
        used = anchors.visited | (rng.random(len(anchors.visited)) < OTHER_ANCHORS)
        sides.append(anchors)
        uses.append(used & ~arrays.cut.numpy())
    reference = int(sides[0].values[uses[0]].mean(0).argmax())
    gains = [side.values[used] - side.values[used, reference][:, None] for side, used in zip(sides, uses, strict=True)]
    span = max(float(np.quantile(np.abs(gains[0]), SPAN_QUANTILE)), 1e-6)
    _, inputs = input_features(names, drafters)
    heads: list[Head] = []
    for option in (option for option in range(drafters + 1) if option != reference):
        parts = [
            _fit_rows(side.inputs[used], 0.5 + gain[:, option] / (2.0 * span))
            for side, used, gain in zip(sides, uses, gains, strict=True)
        ]
        head = clone(estimator).set_params(features=inputs)
        heads.append(head.fit(parts[0], stop_rows=parts[1]).export())
    return ValueRoute("route", names, heads, reference, route.stops)


def _fit_rows(inputs: Array, labels: Array) -> FitRows:
    """Return rows at depth 1 with one label in [0, 1] for both outputs."""
    label = torch.from_numpy(np.clip(labels, 0.0, 1.0)).float()[:, None].repeat(1, 2)
    depth = torch.ones(len(label), dtype=torch.int64)
    return FitRows(torch.from_numpy(np.ascontiguousarray(inputs)), depth, label, torch.ones_like(label).bool())


# Figures


def _table(tried: Sequence[tuple[RoutingPolicy, float]]) -> list[dict[str, Any]]:
    """Return the routes that were tried, with their rates on the select prompts."""
    rows, number = [], 0
    for route, rate in tried:
        is_learned = isinstance(route, ValueRoute) and bool(route.heads)
        number += is_learned
        name = f"{route.name}, pass {number}" if is_learned else route.name
        stops = ", ".join(stop.name for stop in route.stops)
        rows.append({"route": name, "stop policies": stops, "select tokens/s": round(rate, 2)})
    return rows


def _held_out(
    route: RoutingPolicy, rules: Sequence[RoutingPolicy], report: TraceArrays, profile: Profile
) -> dict[str, Any]:
    """Return the rates of a route and of its rivals on the report prompts."""
    played, fixed = replay(report, route, profile), best_of(fixed_grid(report, profile))
    shares = played.drafting.double().mean(0).tolist()
    rule = max([replay(report, rule, profile).rate for rule in rules], default=0.0)
    return {
        "held_out_tokens_per_s": played.rate,
        "held_out_best_fixed_tokens_per_s": fixed.rate,
        "held_out_ratio_to_best_fixed": played.rate / fixed.rate,
        "held_out_best_rule_tokens_per_s": rule,
        **{f"held_out_rounds_of_{name}": share for name, share in zip(report.drafters, shares, strict=True)},
    }
