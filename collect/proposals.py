"""What a draft proposes after the prefixes of a text: on the text, and where candidates leave it.

What is proposed depends on the prefix and the position alone, so two anchors whose candidates follow the text up to the same
place propose the same from there on. Candidates on the text need no forward beyond the one that reads the text. Only what
leaves it is drafted, once for each place where it does, depth by depth. Many places are rows of one forward, under a mask
that lets each see its prefix and its own branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..decode.models.cache import CachedModel
from ..decode.models.outputs import broken, check_rows, stored
from ..decode.summaries import summarise, truncation_lead
from ..decode.topology import Topology
from ..decode.verify.noise import gumbel, match_scores
from ..decode.verify.sampler import Sampler
from ..policies.features import (
    CHAIN_FEATURES,
    DRAFT_HIDDEN,
    FEATURES,
    NOISY,
    PROBABILITY,
    SAMPLED,
    TREE_FEATURES,
    Columns,
    DrawnTokens,
    Kind,
    RowSummary,
)
from .given_text import OFF_TEXT, Candidates, best_candidates, block_candidates, block_states, rejection_candidates
from .schema import NO_TOKEN, PromptTask

PRE_FEATURES = tuple(name for name in TREE_FEATURES if FEATURES[name].kind is Kind.PRE)
assert TREE_FEATURES[: len(PRE_FEATURES)] == CHAIN_FEATURES[: len(PRE_FEATURES)] == PRE_FEATURES
"""Features of a row, whatever is drawn from it; they come first at every node."""

_SEGMENT = 256
"""Places of a text that are read together."""

_AFTER_END = -3
"""Replaces the text's token after its end; neither a token nor `OFF_TEXT` nor `NO_TOKEN`."""

_LARGE = 1e300
"""Replaces an infinite p / q: its product with 0 is 0."""


@dataclass(frozen=True)
class TargetText:
    """A text with the target's rows along it.

    Attributes:
        prompt: what the text continues.
        tokens: L generated ids; anchors look past `length`.
        rows: [L, V], the target's raw row from which each was drawn.
        noise: [L, V] that each was drawn with, under `match` above temperature 0.
        states: [L, H] float16, the target's hidden states of `rows`, if they are recorded.
        length: number of tokens that belong to the text.
        anchor: [n] int64, ascending: rounds begin after so many tokens, 1 to `length` - 1.
    """

    prompt: PromptTask
    tokens: list[int]
    rows: Tensor
    noise: Tensor | None
    states: Tensor | None
    length: int
    anchor: Tensor

    @property
    def ids(self) -> list[int]:
        """Prompt and text."""
        return [*self.prompt.tokens, *self.tokens]


class Proposals:
    """What a draft proposes after each prefix that a round from the anchors of a text may reach.

    A prefix is numbered by (state, row). The state is a place of the text: the number of its tokens after the first anchor.
    The row is that of `DenseCollector.shape`, a path of candidates that left the text at this place; row 0 is the text.
    Under block verification a place has one state for each weight that a round brings there. There are P places, U states,
    and records for the F fed rows, W candidates each.

    Args:
        of: the `DenseCollector`, of which the module imports this one.
        text: the text.
        draw: number of the draw given the text.

    Attributes:
        first, places: the first anchor, and P.
        begin: [P] state in which a round begins at a place.
        place, after: [U] place of a state, and the state after the text's next token.
        next_token: [U] the text's token at the state; negative after its end.
        accepted: [U] the candidate on the text that is accepted, -1 if none is.
        token: [U, F, W] ids; `numbers` [U, F, W, 3] float64, their log-probability at temperature 1 and in the distribution
            that is sampled from, and the lead over what a filter left out; `pre` [U, F, .] PRE features; `best` [U, F, .]
            noisy scores in descending order; `hidden` [U, F, H] float16.
        weight: [U, F] float64, weight of the path under block verification.
        overlap, next_chance: [U]; `target_prob`, `accept_chance` [U, W]: what the target says of candidates on the text.
    """

    def __init__(self, of: Any, text: TargetText, draw: int) -> None:
        self.of, self.text, pair, device = of, text, of.pair, of.pair.device
        self.first, self.last = int(text.anchor[0]), int(text.anchor[-1])
        self.places = min(len(text.tokens), self.last + of.tree.deepest - 1) - self.first + 1
        self.start = len(text.prompt.tokens) + self.first  # number of tokens before place 0
        processors = of.settings.sampling.build(of.temperature, text.prompt.tokens, pair.eos, device)
        self._sampler, self._draws = Sampler(processors, of.temperature), of.choices(text.prompt.key, draw)
        # One score more than siblings: noisy_margin is to the best token that is not drawn.
        self._most = min(of.width + 1, pair.vocabulary)
        self._pre, self._post = Columns(PRE_FEATURES), Columns(of.features[len(PRE_FEATURES) :])
        self._noise: Tensor | None = None  # by place, K places further than the last one
        if text.noise is not None:
            noise, count = text.noise[self.first :], self.places + of.tree.deepest
            more = self.start + torch.arange(min(len(noise), count), count, device=device)
            new = gumbel(text.prompt.key, more, pair.vocabulary, pair.logits_dtype)
            self._noise = torch.cat([noise[:count], new])
        place = torch.arange(self.places, device=device)
        self._set_states(place, place, (place + 1).clamp_max(self.places - 1), torch.ones_like(place).double())

    def _set_states(self, begin: Tensor, place: Tensor, after: Tensor, weight: Tensor) -> None:
        of, device, states = self.of, self.of.pair.device, len(place)
        self.begin, self.place, self.after = begin, place, after
        tokens = torch.tensor([*self.text.tokens, _AFTER_END], device=device)
        self.next_token = tokens[(place + self.first).clamp_max(len(tokens) - 1)]
        size, dtype = (states, len(of.fed)), of.pair.logits_dtype
        self.token = torch.zeros(*size, of.width, dtype=torch.int64, device=device)
        self.accepted = torch.full((states,), -1, device=device)
        self.numbers = np.zeros((*size, of.width, 3))
        self.pre = np.zeros((*size, len(PRE_FEATURES)), dtype=np.float32)
        self.best = np.full((*size, max(self._most, 2)), -np.inf, dtype=np.float32)
        self.hidden = torch.zeros(*size, of.state_width, dtype=torch.float16, device=device)
        self.weight = torch.ones(*size, dtype=torch.float64, device=device)
        self.weight[:, 0] = weight
        self.overlap = torch.zeros(states, dtype=dtype, device=device)
        self.target_prob = torch.zeros(states, of.width, dtype=dtype, device=device)
        self.accept_chance, self.next_chance = torch.zeros_like(self.target_prob), torch.zeros_like(self.overlap)

    def read_text(self, draft: CachedModel) -> None:
        """Read the text with the draft, whose cache is empty, and record the candidates on it."""
        if self.of.is_block:
            # The weights, and with them the states, must be known before anything is recorded: the text is read twice.
            step = torch.ones(self.places, dtype=torch.float64, device=self.place.device)
            for place, _, sampled, target in self._segments(draft):
                inside = place[: len(target)]
                token = self.next_token[inside].clamp_min(0)[:, None]
                p, q = (torch.softmax(rows[: len(inside)].double(), -1).gather(-1, token) for rows in (target, sampled))
                # 0 / 0, a token that neither model would draw, leaves the weight as it is.
                ratio = (p / q)[:, 0].nan_to_num(1.0).clamp_max(_LARGE)
                step[inside] = torch.where(self.next_token[inside] >= 0, ratio, 1.0)
            states = block_states(step.cpu().numpy(), self.of.shape.deepest, self.last - self.first + 1)
            self._set_states(*(torch.from_numpy(values).to(step.device) for values in states))
            draft.roll_back(0)
        for place, logits, sampled, target in self._segments(draft):
            known = len(target)
            # States are numbered by place, so those of adjacent places are adjacent.
            bounds = torch.searchsorted(self.place, torch.stack([place[0], place[-1] + 1])).tolist()
            state = torch.arange(*bounds, device=place.device)
            owner = self.place[state] - place[0]
            # After the end of the text the target has no row and nothing is accepted; the draft's row fills its place.
            both = torch.cat([target, sampled[known:]]) if self.of.given_text else None
            self._record(logits, draft.states, sampled, both, owner, state, torch.zeros_like(state), 1)
            state, owner = state[owner < known], owner[owner < known]
            weights = sampled if self.of.temperature > 0 else logits
            p, q = (torch.softmax(rows[:known], -1) for rows in (target, weights))
            self.overlap[state] = torch.minimum(p, q).sum(-1)[owner]
            self.target_prob[state] = p[owner].gather(-1, self.token[state, 0].clamp_min(0))

    def _segments(self, draft: CachedModel) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Read the text; yield places [n] of it, the draft's logits there [n, V], and the processed ones of both models.

        The target's [m, V] are those of the first m places only, where the text ends.
        """
        ids, rows, begin = self.text.ids, self.text.rows, 0
        most = max(self.of.most_rows, _SEGMENT)
        for start in range(0, self.places, most):
            place = torch.arange(start, min(start + most, self.places), device=self.place.device)
            # The row of a place is that of the token before it; the first segment includes the prompt.
            end = self.start + start + len(place) - 1
            logits = draft.read(torch.tensor([ids[begin:end]], device=place.device), rows=len(place))[0]
            begin = end
            known = max(0, min(len(place), len(rows) - self.first - start))
            sampled = self._sampler(logits, partial(self._prefixes, place, torch.zeros_like(place)))
            # The target's rows go through the same sampler, and `_record` reads what it left out of the draft's.
            untruncated = self._sampler.untruncated
            prefixes = partial(self._prefixes, place[:known], torch.zeros_like(place[:known]))
            target = self._sampler(rows[self.first + start :][:known], prefixes)
            self._sampler.untruncated = untruncated
            yield place, logits, sampled, target

    def _prefixes(self, place: Tensor, row: Tensor, state: Tensor | None = None) -> list[list[int]]:
        """Return the tokens before each (place, row), rows all of one depth: the text, then the path of candidates."""
        path = torch.empty(len(row), 0, dtype=torch.int64, device=row.device)
        while bool(row.any()):  # rows of one depth: all paths reach row 0 at once
            parent = self.of.parent[row]
            token = self.token[state, self.of.fed_index[parent], self.of.rank[row]].clamp_min(0)
            path = torch.cat([token[:, None], path], 1)
            row = parent
        ids = self.text.ids
        paths = zip(place.tolist(), path.tolist(), strict=True)
        return [[*ids[: self.start + at], *tokens] for at, tokens in paths]

    def read_branches(self, draft: CachedModel, target: CachedModel | None) -> None:
        """Read the candidates off the text and record what is proposed after them, in chunks of states.

        Args:
            draft: has read the text.
            target: too; None = its rows off the text are not needed.
        """
        of, prefix = self.of, draft.length
        # Places after the last anchor are reached only by rounds that are already this deep.
        reach = of.shape.deepest - (self.place + self.first - self.last).clamp_min(0)
        line = torch.arange(len(of.shape), device=self.place.device)
        for level in of.shape.levels[2:]:  # row -> its ancestor of depth 1
            line[level] = line[[of.shape.parent[row] for row in level]]
        # What follows the candidate on the text is recorded at the next place.
        off_text = of.rank[line] != self.accepted[:, None]  # [U, rows of the shape]
        wanted = off_text & (of.fed_index >= 0) & (of.depth > 0) & (of.depth < reach[:, None])
        widest = torch.stack([wanted[:, level].sum(1) for level in of.shape.levels]).amax(0)
        states = widest.nonzero()[:, 0]
        chunk = (widest[states].cumsum(0) - 1) // of.most_rows  # of about `most_rows` rows each
        for number in chunk.unique():
            for model in (draft, target):
                if model is not None:
                    model.roll_back(prefix)  # keeps the text and drops the rows of the chunk before
            self._read_chunk(draft, target, states[chunk == number], wanted)

    def _read_chunk(self, draft: CachedModel, target: CachedModel | None, states: Tensor, wanted: Tensor) -> None:
        of = self.of
        row, index = wanted[states].T.nonzero(as_tuple=True)  # ordered by row and therefore by depth
        state, fed, rank = states[index], of.fed_index[of.parent[row]], of.rank[row]
        position = self.start + self.place[state] - 1  # of the last token of the text that each row sees
        # The columns of the text come first, then the rows of the chunk in the order in which they are fed. Each sees its
        # prefix of the text, itself and its ancestors: rows of the same state, all of them for a chain.
        text = torch.arange(draft.length, device=state.device) <= position[:, None]
        end = 0
        for depth, count in enumerate(torch.bincount(of.depth[row]).tolist()):
            if not count:
                continue
            begin, end = end, end + count
            at, after = state[begin:end], row[begin:end]
            branch = at[:, None] == state[:end]
            if not of.shape.is_chain:
                branch &= of.sees[after[:, None], row[:end]]
            mask = torch.cat([text[begin:end], branch], 1)[None, None]
            tokens = self.token[at, fed[begin:end], rank[begin:end]].clamp_min(0)[None]  # after `NO_TOKEN` all is void
            positions = (position[begin:end] + depth)[None]
            prefixes = partial(self._prefixes, self.place[at], after, at)
            logits, p = draft.read(tokens, 0, mask, positions)[0], None
            if target is not None:
                raw = target.read(tokens, 0, mask, positions)[0]
                check_rows(raw)
                p = self._sampler(raw, prefixes)
            sampled, owner = self._sampler(logits, prefixes), torch.arange(count, device=at.device)
            self._record(logits, draft.states, sampled, p, owner, at, after, depth + 1)

    def _record(
        self, logits: Tensor, states: Tensor | None, sampled: Tensor, target: Tensor | None, owner: Tensor,
        state: Tensor, row: Tensor, depth: int,
    ) -> None:  # fmt: skip
        """Record what is proposed after N prefixes.

        Args:
            logits: [R, V] of the draft, raw.
            states: its hidden states, the last R of them.
            sampled, target: [R, V] the processed ones of both models; None where the target has not read them.
            owner: [N] the row of logits of each prefix.
            state, row: [N] the prefixes.
            depth: of the candidates.
        """
        fed = self.of.fed_index[row]
        drawn = self._candidates(sampled, target, owner, state, row, depth)
        self.token[state, fed] = drawn.tokens
        on_text = row == 0
        self.accepted[state[on_text]] = drawn.accepted[on_text]
        if drawn.accept_chance is not None and drawn.next_chance is not None:
            self.accept_chance[state[on_text]] = drawn.accept_chance[on_text].to(self.accept_chance.dtype)
            self.next_chance[state[on_text]] = drawn.next_chance[on_text].to(self.next_chance.dtype)
        if drawn.weight is not None:  # a chain: row r is fed after row r - 1
            deeper = row + 1 < len(self.of.fed)
            self.weight[state[deeper], row[deeper] + 1] = drawn.weight[deeper, 0]
        if self.of.state_width:
            assert states is not None
            self.hidden[state, fed] = stored(states[0, -len(logits) :])[owner]
        tokens = drawn.tokens.clamp_min(0)
        # Parent, rank, siblings and depth stay 0: PRE columns and probabilities do not read them.
        ids = np.zeros((tokens.numel(), 6), dtype=np.int64)
        ids[:, 0], ids[:, 1] = np.repeat(owner.cpu().numpy(), tokens.shape[1]), tokens.cpu().numpy().ravel()
        columns = DrawnTokens(ids)
        needs = self._pre.needs | PROBABILITY | SAMPLED
        if drawn.best is None:
            check_rows(logits, "draft")
        else:
            needs |= NOISY
            columns.lead = truncation_lead(self._sampler.untruncated, sampled, columns)
        shaped = sampled if self._sampler.reads_prefix and self.of.temperature > 0 else None
        summary = summarise(needs, logits, columns, self.of.temperature, shaped, best=drawn.best)
        at = state.cpu().numpy(), fed.cpu().numpy()
        if drawn.best is not None:
            if not np.isfinite(summary.noisy[:, 0]).all():  # topk takes NaN for the largest
                raise broken("draft")
            self.best[at[0], at[1], : self._most] = summary.noisy
        first = DrawnTokens(np.ascontiguousarray(ids[:: tokens.shape[1]]))
        self.pre[at] = self._pre(summary, first, self.of.temperature)
        self.numbers[at] = summary.numbers[:, [0, 1, 3]].reshape(*tokens.shape, 3)  # paths depend on the anchor

    def _candidates(
        self, sampled: Tensor, target: Tensor | None, owner: Tensor, state: Tensor, row: Tensor, depth: int
    ) -> Candidates:
        """Return the candidates after N prefixes; arguments as of `_record`."""
        of, place = self.of, self.place[state]
        token = torch.where(row == 0, self.next_token[state], OFF_TEXT)
        if not of.given_text:
            # A candidate of depth d after a place has the position d - 1 after the text's token there.
            noise = None if self._noise is None else self._noise.index_select(0, place + depth - 1)
            return best_candidates(match_scores(sampled, noise), token, of.width, self._most)
        weight, parts = self.weight[state, of.fed_index[row]], []
        for part in torch.arange(len(owner)).split(max(8, of.memory_bytes // of.row_bytes)):
            q = torch.softmax(sampled[owner[part]].double(), -1)
            p = None if target is None else torch.softmax(target[owner[part]].double(), -1)
            draws = self._draws(self.start + place[part], row[part])
            if of.is_block:
                p = p if of.exact_off_text or depth == 1 else None
                parts.append(block_candidates(q, p, token[part], weight[part], draws))
            else:
                with_replacement = of.mode.name == "rejection_replace"
                parts.append(rejection_candidates(q, p, token[part], of.width, with_replacement, draws))
        return Candidates.joined(parts)

    def trees(self, place: Tensor) -> dict[str, Tensor]:
        """Return the candidates of the rounds that begin at n places, as columns [n, N] in the order of the tree's nodes.

        A token is `NO_TOKEN`, and everything else 0, where a filter left fewer tokens than the tree has siblings. A node is
        labelled if its parent is on the text, which goes on, and under `rejection` no sibling was accepted before.
        """
        of, tree, device = self.of, self.of.tree, place.device
        parent = torch.tensor(tree.parent, device=device)
        ranks = [0, *(tree.children[tree.parent[row]].index(row) for row in range(1, len(tree)))]
        rank = torch.tensor(ranks, device=device)
        # The prefix (state, row) after which each node is drawn, and the one that it leads to.
        state, row, next_state, next_row = (place.new_zeros(len(place), len(tree)) for _ in range(4))
        next_state[:, 0] = self.begin[place]
        for level in map(torch.tensor, tree.levels[1:]):
            state[:, level], row[:, level] = at, after = next_state[:, parent[level]], next_row[:, parent[level]]
            # The accepted candidate on the text leads to the next place, any other one to its row of the shape.
            on_text = (after == 0) & (self.accepted[at] == rank[level])
            next_state[:, level] = torch.where(on_text, self.after[at], at)
            next_row[:, level] = torch.where(on_text, 0, of.child[after, rank[level]])
        state, row, rank = state[:, 1:], row[:, 1:], rank[1:]
        fed = of.fed_index[row]
        token, known = self.token[state, fed, rank], (row == 0) & (self.next_token[state] >= 0)
        exists = torch.nn.functional.pad(token != NO_TOKEN, (1, 0), value=True)
        for rows in tree.levels[2:]:
            exists[:, rows] &= exists[:, parent[rows]]  # what follows a token that does not exist is void
        exists = exists[:, 1:]
        known &= exists
        features, probability = self._features(state, fed, rank)
        columns = {
            "tokens": token.where(exists, NO_TOKEN),
            "draft_prob": (probability * exists).float(),
            # Also of siblings after an accepted one, which are not tried.
            "target_prob": (self.target_prob[state, rank] * known).float(),
            "overlap": (self.overlap[state] * known).float(),
            "accepted": known & (self.accepted[state] == rank),
        }
        if of.given_text:
            known &= (self.accepted[state] < 0) | (rank <= self.accepted[state])
            columns["accept_chance"] = (self.accept_chance[state, rank] * known).float()
            columns["next_chance"] = (self.next_chance[state] * known).float()
        columns["observed"] = known
        features = features.masked_fill(~exists.cpu()[..., None], 0.0)
        columns |= zip(of.features, features.unbind(2), strict=True)
        if of.state_width:
            columns[DRAFT_HIDDEN] = self.hidden[state, fed].masked_fill(~exists[..., None], 0.0)
        return columns

    def _features(self, state: Tensor, fed: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        """Return [n, N, F] features and [n, N] probabilities of the nodes of n trees."""
        tree, at, row, index = self.of.tree, state.cpu().numpy(), fed.cpu().numpy(), rank.cpu().numpy()
        numbers = self.numbers[at, row, index]  # [n, N, 3]
        # [n, 1 + N] log-probabilities of paths, the anchor first.
        path = np.concatenate([np.zeros((len(at), 1)), numbers[..., 0]], 1)
        for level in tree.levels[2:]:
            path[:, level] += path[:, [tree.parent[node] for node in level]]
        ids = np.zeros((*at.shape, 6), dtype=np.int64)
        ids[..., 0], ids[..., 3] = at * len(self.of.fed) + row, index
        # Siblings in the tree: rows of the shape may have more, and noisy_margin is to the best token outside of the tree.
        ids[..., 4] = [len(tree.children[parent]) for parent in tree.parent[1:]]
        ids[..., 5] = tree.depth[1:]
        # The columns of `RowSummary.numbers`. No POST feature reads the largest logits or the spread of a row.
        numbers = np.concatenate([numbers[..., :2], path[:, 1:, None], numbers[..., 2:]], -1)
        best = self.best.reshape(-1, self.best.shape[-1])
        summary = RowSummary(np.zeros((1, 10), dtype=np.float32), np.zeros((1, 2)), best, numbers.reshape(-1, 4))
        post = self._post(summary, DrawnTokens(ids.reshape(-1, 6)), self.of.temperature)
        features = np.concatenate([self.pre[at, row], post.reshape(*at.shape, -1)], -1)
        return torch.from_numpy(features), torch.from_numpy(np.exp(numbers[..., 1])).to(state.device)


def closure(tree: Topology) -> Topology:
    """Return the smallest tree that contains, at its root, `tree` and the sub-tree below each of its nodes."""
    rank = {row: at for children in tree.children for at, row in enumerate(children)}
    paths = set()
    for row in range(1, len(tree)):
        path: tuple[int, ...] = ()
        # The node as seen from each of its ancestors: every suffix of its path of ranks.
        while row > 0:
            path, row = (rank[row], *path), tree.parent[row]
            paths.add(path)
    order = sorted(paths, key=lambda path: (len(path), path))
    index = {path: at for at, path in enumerate(order, 1)}
    return Topology([-1, *(index.get(path[:-1], 0) for path in order)])
