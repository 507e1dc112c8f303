"""The achievable estimate: throughput of the best cross-fitted policy on all recorded scalars, decisions free.

With several drafters it is that of a route: see `achievable_route`.

Acceptance probabilities of every anchor and depth come from boosted trees that were fitted without the prompt. The derived
rule, or for batches the rule `batch`, decides by them. Its few settings are chosen on the reported texts. The estimate is a
lower bound of the value of all features: more prompts would fit better models, and hidden states are not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.batch_rules import BatchStop, for_batches
from ...policies.contract import Array, RoundOutcome
from ...policies.features import CHAIN_FEATURES, DRAFT_HIDDEN, HISTORY_FEATURES, TARGET_HIDDEN, TOKEN_FEATURES, History
from ...policies.heads.base import NO_HIDDEN, Head, Hidden
from ...policies.learned import LearnedPolicy, TrainingMetadata
from ...policies.profile import Profile
from ...policies.rules import BatchRule, Derived
from ..heads import make_head
from ..heads.calibration import calibrate
from ..heads.crossfit import Folds, fit_folds, held_out_outputs, prompt_folds
from ..heads.rows import Visits, conditional_acceptance
from ..replay.arrays import TraceArrays
from ..replay.rounds import Rounds
from ..replay.run import KnownTokens, replay, replay_lengths
from .batch_rules import solve_batch_rates
from .route import OTHER_ANCHORS, SPAN_QUANTILE, rest_of_text, rule_lengths, tuned_rules
from .rules import Part, best_of, fixed_grid, solve_derived

NAME = "achievable estimate"
FOLDS = 4

ITERATIONS = 2
"""Fits, because HISTORY features depend on the rounds of the policy."""


def achievable_estimate(arrays: TraceArrays, profile: Profile, seed: int = 0) -> Rounds:
    """Return the replay of a policy that knows all recorded scalars and decides for free.

    Args:
        arrays: the dense trace of chains that is reported on.
        profile: what rounds cost.
        seed: of folds and trees.
    """
    free = profile.with_decisions({NAME: 0.0})
    played = [best_of(fixed_grid(arrays, profile))]
    names = (*recorded_scalars(arrays), *HISTORY_FEATURES)
    for _ in range(ITERATIONS):
        scored, policy = _cross_fitted(arrays, profile, names, _history(arrays, played[-1]), seed)
        solved, _ = solve_derived(policy, scored, free, policy.metadata.acceptance)
        played.append(replay(scored, solved, free))
    return best_of(played[1:])


ROUTE_LENGTHS = (2, 4, 8)
"""Draft lengths of each drafter, besides the best fixed one and the depth of the trace, that a route chooses from."""

ROUTE_TREES: Mapping[str, Any] = {
    "n_estimators": 60, "max_depth": 4, "learning_rate": 0.15, "min_child_weight": 20.0, "subsample": 0.8,
    "tree_method": "hist",
}  # fmt: skip


def achievable_route(arrays: TraceArrays, profile: Profile, seed: int = 0) -> Rounds:
    """Return the replay of a route that knows all scalars recorded before drafting and decides for free.

    An option is a drafter with a draft length, or plain decoding. Boosted trees that were fitted without the prompt predict
    for each option

        tokens - rho seconds + value of the rest of the text under the route

    at every anchor (`fit.route`), and the best option is used. It begins with the fastest tuned rule. Rho and the values are
    then those of the route before. HISTORY features at an anchor are those of the last round before it of that route.

    Args:
        arrays: a dense trace of several drafters.
        profile: what rounds cost, with all drafters.
        seed: of folds and trees.
    """
    free = dataclasses.replace(profile, decision_s=dict.fromkeys(profile.decision_s, 0.0)).with_decisions({NAME: 0.0})
    rules = tuned_rules(arrays, free)
    tables = torch.stack([rule_lengths(rule, arrays) for rule in rules])
    starts = replay_lengths(arrays, tables, tables, free)
    at = max(range(len(rules)), key=lambda index: starts[index].rate)
    current, played = tables[at], [starts[at]]
    options = _route_options(arrays, [stop.max_depth for stop in rules[at].stops])
    folds = prompt_folds(arrays, FOLDS, seed)
    for _ in range(ITERATIONS):
        history = known_history(arrays, played[-1])
        values, visited = _option_values(arrays, options, current, free, played[-1])
        choice = _predicted_best(arrays, folds, history, values, visited, seed)
        current = options[choice]
        played += replay_lengths(arrays, current[None], current[None], free)
    return best_of(played)


def _route_options(arrays: TraceArrays, best: Sequence[int]) -> Tensor:
    """Return [M, D] lengths of each option; the last one is plain decoding."""
    drafters, options = arrays.tree.drafters, []
    for index in range(drafters):
        for length in sorted({*ROUTE_LENGTHS, best[index], arrays.depth}):
            if length <= arrays.depth:
                options.append([length * (at == index) for at in range(drafters)])
    return torch.tensor([*options, [0] * drafters])


def known_history(arrays: TraceArrays, played: Rounds) -> Tensor:
    """Return [N, D * 5], the HISTORY features and `idle_tokens` of each drafter at the last round before each anchor."""
    drafters, sequence = arrays.tree.drafters, played.sequence.numpy()
    first = np.searchsorted(sequence, np.arange(arrays.sequences + 1))
    turn = np.arange(len(sequence)) - first[sequence]
    by_turn = np.argsort(turn, kind="stable")  # all first rounds, then all second ones
    columns = [column.numpy() for column in (played.drafted, played.verified, played.accepted, played.drafting)]
    cut = (played.committed <= played.accepted).numpy() | (turn == np.diff(first)[sequence] - 1)
    history = History.start(arrays.sequences, drafters)
    rows = np.zeros((len(sequence), drafters, len(HISTORY_FEATURES) + 1))
    for now in np.split(by_turn, np.cumsum(np.bincount(turn))[:-1]):
        on = sequence[now]
        rows[now] = np.concatenate([history.values(), history.idle[..., None]], -1)[on]  # type: ignore[index]
        drafted, verified, accepted = (np.zeros(arrays.sequences, dtype=np.int64) for _ in range(3))
        active, ended = np.zeros((2, arrays.sequences), dtype=bool)
        drafting = np.zeros((arrays.sequences, drafters), dtype=bool)
        for column, values in zip((drafted, verified, accepted, drafting), columns, strict=True):
            column[on] = values[now]
        active[on], ended[on] = True, cut[now]
        history = history.after(
            RoundOutcome(active, drafted, verified, accepted, ended, np.zeros(len(active)), drafting)
        )
    row = arrays.offset[played.sequence] + played.anchor - arrays.first_anchor[played.sequence]
    last = torch.zeros(len(arrays.owner), dtype=torch.int64)
    last[row] = torch.arange(len(row))
    return torch.from_numpy(rows).float().flatten(1)[last.cummax(0).values]  # each text begins with a round


def _option_values(
    arrays: TraceArrays, options: Tensor, current: Tensor, profile: Profile, played: Rounds
) -> tuple[Tensor, Tensor]:
    """Return [N, M], the value of each option at each anchor if the route follows, and [N] bool, where it begins a round.

    Args:
        arrays: the trace.
        options: [M, D] lengths.
        current: [N, D] lengths of the route.
        profile: what rounds cost.
        played: the rounds of the route.
    """
    count = len(arrays.owner)
    drafted = torch.cat([options[:, None].expand(-1, count, -1), current[None]])  # [M + 1, N, D]
    known = KnownTokens.of(arrays, drafted, drafted)
    context = (arrays.prompt_tokens[arrays.owner] + arrays.anchor_by_row).numpy()
    later = (played.anchor > arrays.first_anchor[played.sequence])[:, None] & played.drafting
    usual = [int(one[on].median()) if on.any() else 1 for one, on in zip(played.backlog.T, later.T, strict=True)]
    backlog, none = np.tile(usual, (count, 1)), np.zeros(count, dtype=np.int64)
    gains = []
    for sizes, sent, tokens in zip(known.fed, known.drafted.sum(2).numpy(), known.committed, strict=True):
        fed = (torch.arange(arrays.depth) < sizes[..., None]).long().numpy()
        seconds = profile.round_seconds(context, sent, sent, backlog, none, 0.0, fed)
        gains.append(tokens - played.rate * torch.from_numpy(seconds))
    gained = torch.stack(gains, 1)
    rest = rest_of_text(arrays, known.committed.T, gained, torch.full((count,), len(options)))
    visited = torch.zeros(count, dtype=torch.bool)
    visited[arrays.offset[played.sequence] + played.anchor - arrays.first_anchor[played.sequence]] = True
    return (gained + rest)[:, :-1], visited


def _predicted_best(
    arrays: TraceArrays, folds: Folds, history: Tensor, values: Tensor, visited: Tensor, seed: int
) -> Tensor:
    """Return [N], the option with the largest value that trees fitted without the prompt predict."""
    from xgboost import XGBRegressor

    header = arrays.header
    signals = [arrays.column(name) for name in (*header.signals, "prompt_tokens")]
    anchor = [arrays.column(name)[:, None] for name in header.anchor_features if name not in TOKEN_FEATURES]
    inputs = torch.cat([*signals, *anchor, arrays.anchor_by_row[:, None].float(), history], 1).numpy()
    rng = np.random.default_rng(seed)
    use = (visited | torch.from_numpy(rng.random(len(visited)) < OTHER_ANCHORS)) & ~arrays.cut
    gains = values - values[:, [int(values[use].mean(0).argmax())]]
    span = float(np.quantile(gains[use].abs(), SPAN_QUANTILE))  # torch has a limit of 16 million numbers
    fold = folds.of[arrays.owner]
    best = torch.zeros(len(values), dtype=torch.int64)
    for held in range(folds.count):
        rows = use & (fold != held)
        trees = XGBRegressor(**ROUTE_TREES, n_jobs=torch.get_num_threads(), random_state=seed)
        trees.fit(inputs[rows], gains[rows].clamp(-span, span).numpy())
        best[fold == held] = torch.from_numpy(trees.predict(inputs[fold == held]).argmax(1))
    return best


def achievable_in_batches(arrays: TraceArrays, profile: Profile, seed: int = 0) -> tuple[TraceArrays, BatchStop]:
    """Return a trace with cross-fitted acceptance probabilities, and the policy of batches that decides by them.

    Args:
        arrays: the dense trace of chains that is reported on.
        profile: what rounds cost, with batches.
        seed: of folds and trees.
    """
    every = torch.zeros(len(arrays.accepted), len(HISTORY_FEATURES))
    scored, policy = _cross_fitted(arrays, profile, recorded_scalars(arrays), every, seed)
    stop = for_batches(policy)
    rates = [(size, times) for size, (_, times) in solve_batch_rates(stop, [Part(scored)], profile).items()]
    return scored, for_batches(stop, rule=BatchRule(stop.rule.send, rates))


def recorded_scalars(arrays: TraceArrays) -> tuple[str, ...]:
    """Return all scalars of this trace that a policy can read, and the depth."""
    columns = arrays.columns
    node = [name for name in CHAIN_FEATURES if name in columns and name != "depth"]
    anchor = [name for name in arrays.header.anchor_features if name in columns and name not in TOKEN_FEATURES]
    return (*anchor, *node, "depth")


def _history(arrays: TraceArrays, played: Rounds) -> Tensor:
    """Return [N, 4], the HISTORY features at each anchor; inside a round, those of the round."""
    assert played.history is not None
    row = arrays.offset[played.sequence] + played.anchor - arrays.first_anchor[played.sequence]
    history = torch.zeros(len(arrays.accepted), played.history.shape[1])
    history[row] = played.history
    begins = torch.zeros(len(history), dtype=torch.int64)
    begins[row] = row
    return history[begins.cummax(0).values]  # each text begins with a round


def _cross_fitted(
    arrays: TraceArrays, profile: Profile, names: Sequence[str], history: Tensor, seed: int
) -> tuple[TraceArrays, LearnedPolicy]:
    """Return the trace with the scores of heads that were fitted without the prompts, and a policy that reads them."""
    # The header forgets recorded hidden states too: `check_sizes` would compare the two scores with the models' widths.
    bare = dataclasses.replace(arrays, hidden={}, header=dataclasses.replace(arrays.header, hidden={}))
    every = Visits(torch.arange(len(arrays.accepted)), history)
    visited = every.part(~arrays.cut)
    fitted = fit_folds(bare, prompt_folds(arrays, FOLDS, seed), names, visited, make_head("xgboost"), seed=seed)
    calibrated = calibrate(held_out_outputs(fitted, bare, names, visited))
    # [N, K + 1, 2]: every fold has a head, so no anchor is missing and rows stay in order.
    logits = torch.from_numpy(held_out_outputs(fitted, bare, names, every).logits)
    hidden: dict[str, Any] = {TARGET_HIDDEN: _Scores(logits[:, 0]), DRAFT_HIDDEN: _Scores(logits[:, 1:])}
    metadata = TrainingMetadata(
        verification=arrays.header.verification,
        acceptance=conditional_acceptance(arrays, visited),
        profile=profile.record(NAME),
    )
    depth = min(arrays.depth, profile.max_depth)
    policy = LearnedPolicy(
        NAME, (), PrecomputedHead(), calibrated.accept, calibrated.next, Derived([0.0] * depth, 1), depth, metadata,
        calibrated.survival,
    )  # fmt: skip
    return dataclasses.replace(bare, hidden=hidden), policy


class PrecomputedHead(Head):
    """A head with scores of every anchor and depth that were computed before; the trace holds them as hidden states."""

    kind = "precomputed"
    sizes: Mapping[str, int] = {TARGET_HIDDEN: 2, DRAFT_HIDDEN: 2}

    def __init__(self) -> None:
        self._tensors = {}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """See `Head`."""
        return hidden[DRAFT_HIDDEN if depth else TARGET_HIDDEN].astype(np.float64)


@dataclass(frozen=True)
class _Scores:
    """Logits of accept and next as recorded hidden states: [N, 2] of anchors or [N, K, 2] of nodes."""

    values: Tensor
    width: int = 2

    @property
    def of_nodes(self) -> bool:
        return self.values.dim() == 3

    def at(self, row: Tensor, node: Tensor | None = None) -> Tensor:
        return self.values[row, node] if self.of_nodes else self.values[row]
