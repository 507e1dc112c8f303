"""Bounds of a trace: the oracle, the loss of each round against it, the oracle of a batch, and the best static tree.

The best tree that is drafted in every round is the result of the dynamic program of Sequoia (arXiv 2402.12374): of all
sub-trees of n nodes and depth d, the one with the most accepted nodes; then over n and d the one with the most tokens per
second under a profile. The best candidates are replayed, and the fastest is the result.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...collect.schema import NO_TOKEN
from ...decode.topology import Topology
from ...policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from ...policies.costs import MIN_CALL_S, CostTable
from ...policies.features import HISTORY_FEATURES
from ...policies.fixed import FixedLength
from ...policies.profile import Profile
from .arrays import TraceArrays, typical_context
from .rounds import COUNTS, NoPolicy, Rounds
from .run import replay

TIE_S = 1e-12
"""Difference in seconds below which two plans are equally good: sums of the same numbers in another order."""

SHORTLIST = 12
"""Number of candidates that are replayed."""

_MAX_NODES = 96
"""Number of nodes of the largest sub-tree."""

_TIE = 1e-9
"""Advantage of a node over the next one if both are accepted equally often."""


@dataclass(frozen=True)
class OraclePlan:
    """The fastest decoding of each text by someone who knows every accepted length: the oracle bound.

    Attributes:
        value: [S, L] float64 seconds from the anchor first + t to the end of the text, t = 0, 1, ...; 0 after it.
        steps: [S, L] draft depth there, the smallest of equally good ones.
        drafter: [S, L] index of the drafter.
        seconds: [S] of whole texts, including prompts.
        profile: of the plan's rounds, with a first step that costs at most as much as one that reads two tokens.
    """

    value: Tensor
    steps: Tensor
    drafter: Tensor
    seconds: Tensor
    profile: Profile


def oracle_plan(arrays: TraceArrays, profile: Profile) -> OraclePlan:
    """Return the oracle's plan, a shortest path over anchors:

        V(t) = min over 0 <= k <= K of cost(k) + V(t + min(A_t, k) + 1)

    `cost` is the smallest cost of k or more tokens, without decisions and with a backlog of one token, so that no policy is
    faster. In a tree it is that of drafting and verifying one path, as a chain if that costs less. With several drafters the
    minimum is also over the drafters, one of which drafts.
    """
    cheap, drafters = _cheapest_steps(profile), arrays.tree.drafters
    length = arrays.text_tokens - arrays.first_anchor
    longest = int(length.max())
    steps, verified, drafter = _plan_sizes(arrays, cheap)
    streams, options = arrays.sequences, len(steps)
    value = torch.zeros(streams, longest + arrays.depth + 2, dtype=torch.float64)
    chosen = torch.zeros(streams, longest + 1, dtype=torch.int64)
    k, sent = steps.repeat(streams), verified.repeat(streams)
    fed = _fed_by_plan(arrays, k, drafter.repeat(streams))
    path = ((k == sent) & (sent <= cheap.max_depth)).numpy()  # these can also be drafted as a chain
    drafted, sizes = k.numpy(), sent.numpy()
    none = np.zeros_like(drafted)  # decisions
    one = np.ones((len(drafted), drafters) if drafters > 1 else len(drafted), dtype=np.int64)  # backlog
    accepted = torch.stack([each.accepted for each in arrays.each_drafter], 1)  # [N, D]
    is_chain, by_depth = arrays.tree.is_chain, torch.argsort(steps, stable=True)
    order = torch.argsort(length, descending=True)  # only texts that reach an anchor are priced there
    length, offset, last = length[order], arrays.offset[order], (arrays.offset + arrays.rows - 1)[order]
    begins = (arrays.prompt_tokens + arrays.first_anchor)[order]
    for t in range(longest - 1, -1, -1):
        texts = int((length > t).sum())
        row, many = torch.minimum(offset + t, last)[:texts], texts * options
        context = (begins[:texts] + t).repeat_interleave(options).numpy()
        parts = drafted[:many], sizes[:many], one[:many], none[:many]
        seconds = cheap.round_seconds(context, *parts, 0.0, None if fed is None else fed[:many])
        if not is_chain and drafters == 1:
            is_path = path[:many]
            chain, _, single, free = (part[is_path] for part in parts)
            chains = cheap.round_seconds(context[is_path], chain, chain, single, free, 0.0)
            seconds[is_path] = np.minimum(seconds[is_path], chains)
        cost = torch.from_numpy(seconds).view(texts, -1)
        if is_chain or drafters > 1:
            # Verifying more tokens can be cheaper: drafting k costs at most as much as any larger round of the drafter.
            cost = cost.view(texts, drafters, -1).flip(2).cummin(2).values.flip(2).flatten(1)
        reached = t + torch.minimum(accepted[row][:, drafter], steps) + 1
        total = cost + value[:texts].gather(1, torch.minimum(reached, length[:texts, None]))
        least = total.min(1).values
        value[:texts, t] = least
        # argmax returns the first, the smallest depth
        chosen[:texts, t] = by_depth[(total <= least[:, None] + TIE_S)[:, by_depth].int().argmax(1)]
    value, chosen = (table[torch.argsort(order)] for table in (value, chosen))
    read = torch.from_numpy(profile.prefill_seconds(arrays.prompt_tokens.numpy()))
    return OraclePlan(value, steps[chosen], drafter[chosen], value[:, 0] + read, cheap)


def _fed_by_plan(arrays: TraceArrays, steps: Tensor, drafter: Tensor) -> Array | None:
    """Return `Rounds.fed` of rounds in which one path is drafted; None for chains of one drafter."""
    if arrays.tree.is_chain:
        return None
    fed = (torch.arange(arrays.depth) < steps[:, None]).long()
    if arrays.tree.drafters > 1:
        owns = torch.arange(arrays.tree.drafters) == drafter[:, None]
        fed = fed[:, None] * owns[..., None]
    return fed.numpy()


def oracle_seconds(arrays: TraceArrays, profile: Profile) -> Tensor:
    """Return [S] float64, the least seconds in which each text can be decoded: the bound of `oracle_plan`."""
    return oracle_plan(arrays, profile).seconds


def _plan_sizes(arrays: TraceArrays, profile: Profile) -> tuple[Tensor, Tensor, Tensor]:
    """Return [M] draft steps, tokens verified and drafters; of trees, including larger verifications that may be cheaper."""
    if arrays.tree.is_chain or arrays.tree.drafters > 1:  # no chain is longer than what was timed
        k = torch.arange(min(arrays.depth, profile.max_depth) + 1).repeat(arrays.tree.drafters)
        return k, k, torch.arange(arrays.tree.drafters).repeat_interleave(len(k) // arrays.tree.drafters)
    low, high = (side.tree_verify(arrays.tree.nodes) for side in (profile.low, profile.high))
    pairs = [
        (steps, sent)
        for steps in range(arrays.depth + 1)
        for sent in range(steps, arrays.tree.nodes + 1)
        if sent == steps or low[sent] < low[steps] or high[sent] < high[steps]
    ]
    steps, sent = torch.tensor(pairs).unbind(1)
    return steps, sent, torch.zeros_like(steps)


def _cheapest_steps(profile: Profile) -> Profile:
    """Return the profile with no first step that costs more than one that reads two tokens; noise can reverse them."""
    low, high = (
        dataclasses.replace(table, draft_s=(min(table.draft_s), table.draft_s[1]))
        for table in (profile.low, profile.high)
    )
    return dataclasses.replace(profile, low=low, high=high, others=tuple(map(_cheapest_steps, profile.others)))


def planned_rounds(arrays: TraceArrays, plan: OraclePlan) -> Rounds:
    """Return the rounds of the oracle's plan, in which one path is drafted and verified, in the order of decoding."""
    sequence = torch.arange(arrays.sequences)
    anchor, parts = arrays.first_anchor, []
    while len(sequence):
        at = anchor - arrays.first_anchor[sequence]
        steps = plan.steps[sequence, at]
        drafter = plan.drafter[sequence, at]
        accepted = torch.minimum(_accepted_by(arrays, arrays.offset[sequence] + at, drafter), steps)
        committed = torch.minimum(accepted + 1, arrays.text_tokens[sequence] - anchor)
        context = arrays.prompt_tokens[sequence] + anchor
        parts.append(torch.stack([sequence, anchor, context, steps, steps, accepted, committed, drafter]))
        anchor = anchor + accepted + 1
        on = anchor < arrays.text_tokens[sequence]
        sequence, anchor = sequence[on], anchor[on]
    *columns, owner = torch.cat(parts, 1)
    counts: dict[str, Any] = dict(zip(COUNTS, columns, strict=False))
    steps, drafters = counts["drafted"], arrays.tree.drafters
    backlog = torch.ones((len(steps), drafters) if drafters > 1 else len(steps), dtype=torch.int64)
    counts |= {"backlog": backlog, "decisions": torch.zeros_like(steps), "steps": steps}
    counts["history"] = torch.zeros(len(steps), len(HISTORY_FEATURES))
    fed = _fed_by_plan(arrays, steps, owner)
    feeds = None if fed is None else torch.from_numpy(fed)
    return Rounds(NoPolicy(), plan.profile, arrays.prompt_tokens, arrays.first_anchor, fed=feeds, **counts)


def _accepted_by(arrays: TraceArrays, row: Tensor, drafter: Tensor) -> Tensor:
    """Return [R], the accepted length of a drafter each at rows [R]."""
    accepted = torch.stack([each.accepted[row] for each in arrays.each_drafter], 1)
    return accepted.gather(1, drafter[:, None])[:, 0]


@dataclass(frozen=True)
class Regret:
    """The loss of each round against the oracle that continues from the same anchor; all [R].

    Attributes:
        early: bool, committed less than the ideal round.
        late: bool, drafted or sent more than the ideal round in vain.
        choice_s: seconds lost by where the policy stopped, including the effect on the rest of the text.
        decision_s: seconds of decisions.
        backlog_s: seconds of reading tokens that the draft had not read, which the bound leaves out.
    """

    early: Tensor
    late: Tensor
    choice_s: Tensor
    decision_s: Tensor
    backlog_s: Tensor


def round_regret(arrays: TraceArrays, rounds: Rounds, plan: OraclePlan, profile: Profile) -> Regret:
    """Compare rounds with the oracle's plan.

    A round that took c seconds from anchor t to t' loses c + V(t') - V(t). Summed over a text the V's cancel, so that the
    losses add up to the seconds by which the policy is slower than the oracle.
    """
    sequence = rounds.sequence
    at = rounds.anchor - arrays.first_anchor[sequence]
    best = plan.steps[sequence, at]
    left = arrays.text_tokens[sequence] - rounds.anchor
    accepted = _accepted_by(arrays, arrays.offset[sequence] + at, plan.drafter[sequence, at])
    reached = torch.minimum(torch.minimum(accepted, best) + 1, left)
    bare = rounds.price(plan.profile, bare=True)
    choice = bare + plan.value[sequence, at + rounds.committed] - plan.value[sequence, at]
    decision = rounds.decision_seconds(profile)
    early = rounds.committed < reached
    late = ~early & (choice > TIE_S) & ((rounds.steps > best) | (rounds.verified > best))
    return Regret(early, late, choice, decision, rounds.price(profile) - decision - bare)


ROUTE_ERRORS = ("drafter", "length", "drafted", "plain")
"""Kinds of rounds in which a route lost time: another drafter, or the best one with another length, or it drafted although
plain decoding was best, or the reverse."""


def route_errors(rounds: Rounds, plan: OraclePlan, regret: Regret) -> Tensor:
    """Return [R] int64, the index in `ROUTE_ERRORS` of each round, -1 where nothing was lost by the choice."""
    at = rounds.anchor - rounds.first_tokens[rounds.sequence]
    best, drafter = plan.steps[rounds.sequence, at], plan.drafter[rounds.sequence, at]
    uses_best = rounds.drafting.gather(1, drafter[:, None])[:, 0]
    draws = rounds.drafting.any(1)
    error = torch.where(uses_best, 1, 0)
    error[best == 0], error[~draws] = 2, 3
    return torch.where(regret.choice_s > TIE_S, error, -1)


def batch_bound(arrays: TraceArrays, profile: Profile, batch: int) -> Tensor:
    """Return [S] float64 seconds of each text, with the least sum in which `batch` streams could decode all of them.

    Streams of a batch share the cost of their rounds, so that the best plan is not a shortest path of each text. But for any
    price l of a token, and any round of s streams that sends n tokens,

        verify(s, n) >= s a + l n,   a = min over s' <= batch and n' of (verify(s', n') - l n') / s'

    and a draft step of m streams costs at least m times the smallest share of any such step. The oracle therefore needs at
    least what every text needs alone at these prices, which is the shortest path of `oracle_plan`. Every price gives a
    bound, and the highest one is returned. No policy is faster; the bound may be out of reach.

    Args:
        arrays: a dense trace of chains.
        profile: with batches, unless `batch` is 1.
        batch: number of streams.
    """
    if batch == 1 or profile.batch is None:
        return oracle_seconds(arrays, profile)
    last = float((arrays.prompt_tokens + arrays.text_tokens).max())
    # The smallest of costs that are linear in the context is concave: a line between the ends of all contexts is below it.
    contexts = min(profile.batch.low.context, 1.0), max(profile.batch.high.context, last)
    depth = min(arrays.depth, profile.max_depth)
    # Verifications can be cheapest only where their costs have a corner.
    corners, most = {n for points in profile.batch.low.verify_s.values() for n, _ in points}, batch * (depth + 1)
    tokens = np.array(sorted({n for n in corners if n <= most} | set(range(1, batch + 1)) | {most}))
    # The prices to try: 0, and the slopes from plain decoding to every larger verification.
    middle, larger = 0.5 * sum(contexts), tokens[tokens > batch]
    rises = profile.verify_s(batch, larger, middle) - profile.verify_s(batch, batch, middle)
    prices = sorted({0.0, *np.maximum(rises / (larger - batch), 0.0).tolist()})
    shares = [_stream_shares(profile, batch, tokens, price, contexts, depth) for price in prices]
    bounds = [oracle_seconds(arrays, one) for one in shares if one is not None]
    return max(bounds, key=lambda seconds: float(seconds.sum()))


def _stream_shares(
    profile: Profile, batch: int, tokens: Array, price: float, contexts: tuple[float, float], depth: int
) -> Profile | None:
    """Return the least costs of a round for one stream, see `batch_bound`; None if a verification would cost nothing."""
    streams = np.arange(1, batch + 1)
    possible = tokens[None] >= streams[:, None]  # each stream sends at least its anchor

    def table(context: float) -> CostTable | None:
        verify = profile.verify_s(streams[:, None], tokens[None], context) - price * tokens[None]
        share = float(np.where(possible, verify / streams[:, None], np.inf).min())
        if share + price <= 0.0:
            return None
        first, later = (
            float((step_s(streams, context) / streams).min()) for step_s in (profile.first_draft_s, profile.draft_s)
        )
        sent = tuple(max(share + price * (n + 1), MIN_CALL_S) for n in range(depth + 1))
        return CostTable(context, (first, first), 0.0, sent, later)  # reading a backlog is free

    low, high = (table(context) for context in contexts)
    return Profile(low, high, 0.0, 0.0, profile.prefill_s) if low and high else None


def subtree(tree: Topology, nodes: Sequence[int]) -> Topology:
    """Return the topology of nodes that are closed under parents; nodes are numbered from 0, without the root."""
    row = {0: 0, **{node + 1: at for at, node in enumerate(sorted(nodes), 1)}}
    return Topology([-1, *(row[tree.parent[node + 1]] for node in sorted(nodes))])


def restrict_to_subtree(arrays: TraceArrays, nodes: Sequence[int]) -> TraceArrays:
    """Return the trace of a smaller tree.

    Under `match` the candidates are the best by score, and otherwise they are drawn and tried in turn, so that a smaller
    tree has the first candidates of each branch. `noisy_margin` then refers to the best sibling left out, if the larger tree
    drafted it.

    Args:
        arrays: of a dense trace.
        nodes: to keep, closed under parents, first siblings first; numbered from 0, without the root.
    """
    kept = sorted(nodes)
    part = arrays.of_nodes(kept, subtree(arrays.tree, kept), arrays.header)
    if "noisy_margin" in part.columns:
        part.columns["noisy_margin"] = _margins(arrays, {node + 1 for node in kept})[:, kept]
    return part


def _margins(arrays: TraceArrays, rows: set[int]) -> Tensor:
    """Return [N, K] `noisy_margin` if only these rows of the tree are drafted."""
    margin = arrays.columns["noisy_margin"].clone()
    for children in arrays.tree.children:
        inside, outside = ([row - 1 for row in children if (row in rows) is kept] for kept in (True, False))
        if inside and outside:
            score, is_drawn = arrays.column("noisy_score"), arrays.tokens[:, outside[:1]] != NO_TOKEN
            nearer = torch.minimum(margin[:, inside], score[:, inside] - score[:, outside[:1]])
            margin[:, inside] = torch.where(is_drawn, nearer, margin[:, inside])
    return margin


class StaticTree(StopPolicy):
    """Drafts and verifies the same sub-tree in each round.

    Args:
        tree: that rounds may draft.
        nodes: of it, closed under parents; numbered from 0, without the root.
    """

    def __init__(self, tree: Topology, nodes: Sequence[int]) -> None:
        self.tree, self.nodes = tree, tuple(sorted(nodes))
        chosen = set(self.nodes)
        self._chosen = np.array([node in chosen for node in range(tree.nodes)], dtype=bool)
        extends = [any(child - 1 in chosen for child in children) for children in tree.children]
        self._extends = [np.array([extends[row] for row in level]) for level in tree.levels]
        self.max_depth = max((tree.depth[node + 1] for node in self.nodes), default=0)
        self.first = min(1, self.max_depth)
        self.name = f"static:{self.shape.name}"

    @property
    def shape(self) -> Topology:
        """The sub-tree as a topology."""
        return subtree(self.tree, self.nodes)

    @property
    def drawn(self) -> Topology:
        """The sub-tree that is drawn if it is part of the larger tree: with siblings, at least of the first depth."""
        extended = sorted({0, *(self.tree.parent[node + 1] for node in self.nodes)})
        return subtree(self.tree, [child - 1 for row in extended for child in self.tree.children[row]])

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches with chosen nodes below them."""
        return step.alive & self._extends[step.depth], state

    def select(self, tree: DraftTree, state: State) -> Array:
        """Verify the chosen nodes."""
        out: Array = tree.drawn & self._chosen[: tree.drawn.shape[1]]
        return out


def best_subtrees(tree: Topology, acceptance: Sequence[float], depth: int) -> list[tuple[float, list[int]]]:
    """Return for n = 0, 1, ... the sub-tree of n nodes with the largest sum of acceptance: (sum, nodes).

    No node is accepted more often than its parent, so these are the n likeliest nodes.

    Args:
        tree: to choose from.
        acceptance: [K] probability of each node to be accepted.
        depth: of the deepest nodes.
    """
    within = [node for node in range(tree.nodes) if tree.depth[node + 1] <= depth]
    ranked = sorted(within, key=lambda node: -acceptance[node])  # stable: parents first
    sums = itertools.accumulate((acceptance[node] for node in ranked), initial=0.0)
    return [(value, sorted(ranked[:count])) for count, value in enumerate(sums)]


def likeliest_nodes(arrays: TraceArrays, count: int, depth: int) -> list[int]:
    """Return the sub-tree of `count` nodes, none deeper than `depth`, first siblings first, that is accepted most often."""
    return best_subtrees(arrays.tree, _acceptance(arrays), depth)[count][1]


def _acceptance(arrays: TraceArrays) -> list[float]:
    """Return [K], the share of uncut anchors at which each node is accepted, such that first siblings are preferred."""
    chances: list[float] = arrays.accepted_nodes()[~arrays.cut].double().mean(0).tolist()
    for children in arrays.tree.children:
        for row, later in zip(children[-2::-1], children[:0:-1], strict=True):
            chances[row - 1] = max(chances[row - 1], chances[later - 1])  # in few texts a later sibling may be ahead
    return [chance - _TIE * node for node, chance in enumerate(chances)]


def best_static_tree(arrays: TraceArrays, profile: Profile) -> tuple[StaticTree, Rounds]:
    """Return the fastest static tree inside the recorded one, and its replay if only this tree is drafted.

    Args:
        arrays: a dense trace.
        profile: costs of rounds.
    """
    tree, chances = arrays.tree, _acceptance(arrays)
    context, rates = typical_context(arrays), {}
    for depth in range(arrays.depth + 1):
        for value, nodes in best_subtrees(tree, chances, depth)[: _MAX_NODES + 1]:
            shape = subtree(tree, nodes)
            if not shape.is_chain or shape.nodes <= profile.max_depth:  # no chain is longer than what was timed
                rates[tuple(nodes)] = (1.0 + value) / _round_seconds(shape, profile, context)
    ranked = sorted(rates, key=lambda nodes: -rates[nodes])[:SHORTLIST]
    replays = {nodes: replay(*isolate_subtree(arrays, nodes), profile) for nodes in ranked}
    best = max(replays, key=lambda nodes: replays[nodes].rate)
    return StaticTree(tree, best), replays[best]


def isolate_subtree(arrays: TraceArrays, nodes: Sequence[int]) -> tuple[TraceArrays, StopPolicy]:
    """Return the trace and the policy to `replay` a static tree with if only this tree is drafted.

    As part of a larger tree it would pay for candidates that are drawn and never verified.

    Args:
        arrays: a trace of a larger tree.
        nodes: as of `restrict_to_subtree`.
    """
    # The policy reads no features, of which there may be gigabytes.
    part = restrict_to_subtree(dataclasses.replace(arrays, columns={}, extra={}, hidden={}), nodes)
    return part, FixedLength(part.depth)


def _round_seconds(shape: Topology, profile: Profile, context: float) -> float:
    """Return the seconds of a round that drafts and verifies a whole tree."""
    fed = np.array([[sum(bool(shape.children[row]) for row in level) for level in shape.levels[:-1]] or [0]])
    one = np.ones(1, dtype=np.int64)
    count = one * shape.nodes
    fed_by_step = None if shape.is_chain else fed
    return float(profile.round_seconds(one * context, count, count, one, 0 * one, 0.0, fed_by_step)[0])
