"""What a draft proposes after the prefixes of a text: on the text, and where candidates leave it.

Proposals depend on the prefix and the position alone, so two anchors with candidates that follow the text up to the same
place have the same proposals from there on. Candidates on the text need no forward beyond the one that reads the text. Only
what leaves it is drafted, once for each place where it does, depth by depth. Many places are rows of one forward, under a
mask that lets each see its prefix and its own branch.
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
from ..decode.models.outputs import check_rows, stored
from ..decode.summaries import summarise, truncation_lead
from ..decode.topology import Topology
from ..decode.verify.noise import gumbel, match_scores
from ..decode.verify.sampler import Sampler
from ..policies.contract import Array
from ..policies.features import DRAFT_HIDDEN, PROBABILITY, SAMPLED, TOP, Columns, DrawnTokens, RowSummary
from .given_text import OFF_TEXT, Candidates, best_candidates, block_candidates, block_states, rejection_candidates
from .schema import NO_TOKEN, PromptTask

_SEGMENT = 256
"""Places of a text that are read together."""

_AFTER_END = -3
"""Next token of the text after its end; neither a token nor `OFF_TEXT` nor `NO_TOKEN`."""

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


class Shape:
    """The candidates after one place of a text, as tensors: the closure of a tree, of N rows and at most W siblings.

    Attributes:
        topology: row 0 is the text, other rows are paths of candidates.
        width: W.
        child: [N, W] row of each child; 0 where there is none.
        parent, depth, rank: [N] int64; the rank is among siblings.
        has_children: [N] bool, rows after which something is proposed.
        sees: [N, N] bool, each row's ancestors and itself.
    """

    def __init__(self, tree: Topology, device: torch.device) -> None:
        self.topology = shape = closure(tree)
        self.width = max(map(len, shape.children))
        self.child = torch.zeros(len(shape), self.width, dtype=torch.int64, device=device)
        for row, children in enumerate(shape.children):
            self.child[row, : len(children)] = torch.tensor(children, dtype=torch.int64, device=device)
        self.parent, self.depth, self.rank = (
            torch.tensor(values, device=device) for values in (shape.parent, shape.depth, sibling_ranks(shape))
        )
        self.has_children = torch.tensor([bool(children) for children in shape.children], device=device)
        self.sees = shape.sees.to(device)


class Proposals:
    """What a draft proposes after each prefix that a round from the anchors of a text may reach.

    A prefix is numbered by (state, row). The state is a place of the text: the number of its tokens after the first anchor.
    The row is that of the shape, a path of candidates that left the text at this place; row 0 is the text. Under block
    verification a place has one state for each weight that a round brings there. There are P places, U states, and N rows
    with W candidates each.

    Args:
        collector: the `DenseCollector`, which imports this module; provides settings and shape.
        text: the text.
        draw: number of the draw given the text.
        draft: with an empty cache.
        target: too; None = its rows off the text are not needed.

    Attributes:
        first, places: the first anchor, and P.
        begin: [P] state in which a round begins at a place.
        place, after: [U] place of a state, and the state after the text's next token.
        next_token: [U] the text's token at the state; negative after its end.
        accepted: [U] the candidate on the text that is accepted, -1 if none is.
        token: [U, N, W] ids of the candidates.
        top, stats, best: [U, N, .] of the draft's row after the prefix, see `RowSummary` (`best` is `noisy`).
        numbers: [U, N, W, 3] float64, log-probability of each candidate at temperature 1 and in the distribution that is
            sampled from, and its lead over what a filter removed.
        hidden: [U, N, H] float16, states of the draft.
        weight: [U, N] float64, weight of the path under block verification.
        overlap, next_chance: [U]; `target_prob`, `accept_chance` [U, W]: what the target says of candidates on the text.
    """

    def __init__(
        self, collector: Any, text: TargetText, draw: int, draft: CachedModel, target: CachedModel | None
    ) -> None:
        self.collector, self.text, self.shape, pair = collector, text, collector.shape, collector.pair
        temperature, depth, device = collector.temperature, collector.tree.deepest, pair.device
        self.first, self.last = int(text.anchor[0]), int(text.anchor[-1])
        self.places = min(len(text.tokens), self.last + depth - 1) - self.first + 1
        self.start = len(text.prompt.tokens) + self.first  # number of tokens before place 0
        processors = collector.settings.sampling.build(temperature, text.prompt.tokens, pair.eos, device)
        self._sampler = Sampler(processors, temperature)
        self._choices = partial(collector.choices, text.prompt.key, draw)
        self._columns = Columns(collector.features)
        # One score more than siblings: noisy_margin is to the best token that is not drawn.
        self._most = min(self.shape.width + 1, pair.vocabulary)
        self._noise: Tensor | None = None  # by place, K places further than the last one
        if text.noise is not None:
            noise, count = text.noise[self.first :], self.places + depth
            more = self.start + torch.arange(min(len(noise), count), count, device=device)
            new = gumbel(text.prompt.key, more, pair.vocabulary, pair.logits_dtype)
            self._noise = torch.cat([noise[:count], new])
        self.begin = self.place = torch.arange(self.places, device=device)
        self.after = (self.place + 1).clamp_max(self.places - 1)
        weight = torch.ones_like(self.place).double()
        if collector.is_block:
            # The weights, and with them the states, are required before anything is recorded: the text is read twice.
            states = block_states(self._steps(draft), depth, self.last - self.first + 1)
            self.begin, self.place, self.after, weight = (torch.from_numpy(values).to(device) for values in states)
            draft.roll_back(0)
        self.next_token = self._text_tokens(self.place)
        size, width, dtype = (len(self.place), len(self.shape.topology)), self.shape.width, pair.logits_dtype
        self.token = torch.zeros(*size, width, dtype=torch.int64, device=device)
        self.accepted = torch.full(size[:1], -1, device=device)
        self.numbers = np.zeros((*size, width, 3))
        self.top, self.stats = np.zeros((*size, TOP), dtype=np.float32), np.zeros((*size, 2))
        self.best = np.full((*size, max(self._most, 2)), -np.inf, dtype=np.float32)
        self.hidden = torch.zeros(*size, collector.state_width, dtype=torch.float16, device=device)
        self.weight = torch.ones(*size, dtype=torch.float64, device=device)
        self.weight[:, 0] = weight
        self.overlap, self.next_chance = torch.zeros(2, size[0], dtype=dtype, device=device)
        self.target_prob, self.accept_chance = torch.zeros(2, size[0], width, dtype=dtype, device=device)
        self._read_text(draft)
        if target is not None:
            # Only for the keys that candidates off the text attend to: the text has the target's rows.
            target.read(torch.tensor([text.ids[: draft.lengths[0]]], device=device), rows=1)
        self._read_branches(draft, target)

    def _text_tokens(self, place: Tensor) -> Tensor:
        """Return the token of the text at each place, `_AFTER_END` after its end."""
        tokens = torch.tensor([*self.text.tokens, _AFTER_END], device=place.device)
        return tokens[(place + self.first).clamp_max(len(tokens) - 1)]

    def _steps(self, draft: CachedModel) -> Array:
        """Read the text with the draft; return [P] p / q of the text's token at each place."""
        step = torch.ones(self.places, dtype=torch.float64, device=self.place.device)
        for place, _, sampled, target in self._segments(draft):
            inside = place[: len(target)]
            token = self._text_tokens(inside)[:, None]
            p, q = (
                torch.softmax(rows[: len(inside)].double(), -1).gather(-1, token.clamp_min(0))
                for rows in (target, sampled)
            )
            # 0 / 0, a token that neither model would draw, leaves the weight as it is.
            ratio = (p / q).nan_to_num(1.0).clamp_max(_LARGE)
            step[inside] = torch.where(token >= 0, ratio, 1.0)[:, 0]
        return np.asarray(step.cpu().numpy())

    def _read_text(self, draft: CachedModel) -> None:
        """Read the text with the draft and record the candidates on it."""
        for place, logits, sampled, target in self._segments(draft):
            # States are numbered by place, so those of adjacent places are adjacent.
            bounds = torch.searchsorted(self.place, torch.stack([place[0], place[-1] + 1])).tolist()
            state = torch.arange(*bounds, device=place.device)
            owner = self.place[state] - place[0]
            # After the end of the text the target has no row and nothing is accepted; the draft's row fills its place.
            both = torch.cat([target, sampled[len(target) :]]) if self.collector.given_text else None
            self._record(logits, draft.states, sampled, both, owner, state, torch.zeros_like(state), 1)
            state, owner = state[owner < len(target)], owner[owner < len(target)]
            weights = sampled if self.collector.temperature > 0 else logits
            p, q = (torch.softmax(rows[: len(target)], -1) for rows in (target, weights))
            self.overlap[state] = torch.minimum(p, q).sum(-1)[owner]
            self.target_prob[state] = p[owner].gather(-1, self.token[state, 0].clamp_min(0))

    def _segments(self, draft: CachedModel) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Read the text; yield places [n] of it, the draft's logits there [n, V], and the processed ones of both models.

        The target's [m, V] are those of the first m places only, where the text ends.
        """
        ids, rows, begin = self.text.ids, self.text.rows, 0
        most = max(self.collector.most_rows, _SEGMENT)
        for start in range(0, self.places, most):
            place = torch.arange(start, min(start + most, self.places), device=self.place.device)
            # The row of a place is that of the token before it; the first segment includes the prompt.
            end = self.start + start + len(place) - 1
            logits = draft.read(torch.tensor([ids[begin:end]], device=place.device), rows=len(place))[0]
            begin = end
            target = rows[self.first + start :][: len(place)]
            row = torch.zeros_like(place)
            # The target's rows come first: `_record` reads what the sampler removed from those of the draft.
            target = self._sampler(target, partial(self._prefixes, place[: len(target)], row[: len(target)]))
            sampled = self._sampler(logits, partial(self._prefixes, place, row))
            yield place, logits, sampled, target

    def _prefixes(self, place: Tensor, row: Tensor, state: Tensor | None = None) -> list[list[int]]:
        """Return the tokens before each (place, row), rows all of one depth: the text, then the path of candidates."""
        path = torch.empty(len(row), 0, dtype=torch.int64, device=row.device)
        while bool(row.any()):  # rows of one depth: all paths reach row 0 at once
            parent = self.shape.parent[row]
            path = torch.cat([self.token[state, parent, self.shape.rank[row]].clamp_min(0)[:, None], path], 1)
            row = parent
        ids = self.text.ids
        paths = zip(place.tolist(), path.tolist(), strict=True)
        return [[*ids[: self.start + at], *tokens] for at, tokens in paths]

    def _read_branches(self, draft: CachedModel, target: CachedModel | None) -> None:
        """Read the candidates off the text and record what is proposed after them, in chunks of states."""
        shape, levels = self.shape, self.shape.topology.levels
        # Places after the last anchor are reached only by rounds that are already this deep.
        reach = shape.topology.deepest - (self.place + self.first - self.last).clamp_min(0)
        line = torch.arange(len(shape.topology), device=self.place.device)
        for level in levels[2:]:  # row -> its ancestor of depth 1
            line[level] = line[shape.parent[level]]
        # What follows the candidate on the text is recorded at the next place.
        off_text = shape.rank[line] != self.accepted[:, None]  # [U, N]
        wanted = off_text & shape.has_children & (shape.depth > 0) & (shape.depth < reach[:, None])
        widest = torch.stack([wanted[:, level].sum(1) for level in levels]).amax(0)
        states, prefix = widest.nonzero()[:, 0], draft.lengths[0]
        chunk = (widest[states].cumsum(0) - 1) // self.collector.most_rows  # of about `most_rows` rows each
        for number in chunk.unique():
            for model in (draft, target):
                if model is not None:
                    model.roll_back(prefix)  # keeps the text and drops the rows of the chunk before
            self._read_chunk(draft, target, states[chunk == number], wanted)

    def _read_chunk(self, draft: CachedModel, target: CachedModel | None, states: Tensor, wanted: Tensor) -> None:
        shape = self.shape
        row, index = wanted[states].T.nonzero(as_tuple=True)  # ordered by row and therefore by depth
        state, parent, rank = states[index], shape.parent[row], shape.rank[row]
        position = self.start + self.place[state] - 1  # of the last token of the text that each row sees
        # The columns of the text come first, then the rows of the chunk in the order in which they are read. Each sees its
        # prefix of the text, itself and its ancestors of the same state.
        text = torch.arange(draft.lengths[0], device=state.device) <= position[:, None]
        end = 0
        for depth, count in enumerate(torch.bincount(shape.depth[row]).tolist()):
            if not count:
                continue
            begin, end = end, end + count
            at, after = state[begin:end], row[begin:end]
            branch = (at[:, None] == state[:end]) & shape.sees[after[:, None], row[:end]]
            mask = torch.cat([text[begin:end], branch], 1)[None, None]
            # What follows `NO_TOKEN` has no meaning.
            tokens = self.token[at, parent[begin:end], rank[begin:end]].clamp_min(0)[None]
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
        """Record what is proposed after M prefixes.

        Args:
            logits: [R, V] of the draft, raw.
            states: its hidden states, the last R of them.
            sampled, target: [R, V] the processed ones of both models; None where the target has not read them.
            owner: [M] the row of logits of each prefix, ascending.
            state, row: [M] the prefixes.
            depth: of the candidates.
        """
        check_rows(logits, "draft")
        if self.collector.state_width:
            assert states is not None
            self.hidden[state, row] = stored(states[0, -len(logits) :])[owner]
        temperature = self.collector.temperature
        # Under block verification a row of logits may have many prefixes, with several float64 rows each.
        for part in torch.arange(len(owner), device=owner.device).split(self.collector.rows_at_once):
            begin, end = int(owner[part[0]]), int(owner[part[-1]]) + 1
            at, after, index = state[part], row[part], owner[part] - begin
            q, p = sampled[begin:end], None if target is None else target[begin:end]
            drawn = self._candidates(q, p, index, at, after, depth)
            self._keep(drawn, at, after)
            tokens = drawn.tokens.clamp_min(0)
            # Parent, rank, siblings and depth stay 0: rows and probabilities do not depend on them.
            ids = np.zeros((tokens.numel(), 6), dtype=np.int64)
            ids[:, 0], ids[:, 1] = np.repeat(index.cpu().numpy(), tokens.shape[1]), tokens.cpu().numpy().ravel()
            columns, needs = DrawnTokens(ids), self._columns.needs | PROBABILITY | SAMPLED
            if needs.noisy:
                untruncated = self._sampler.untruncated
                columns.lead = truncation_lead(None if untruncated is None else untruncated[begin:end], q, columns)
            shaped = q if self._sampler.reads_prefix and temperature > 0 else None
            summary = summarise(needs, logits[begin:end], columns, temperature, shaped, best=drawn.best)
            prefix, summarised = (at.cpu().numpy(), after.cpu().numpy()), ids[:: tokens.shape[1], 0]
            self.top[prefix], self.stats[prefix] = summary.top[summarised], summary.stats[summarised]
            if needs.noisy:
                self.best[prefix[0], prefix[1], : self._most] = summary.noisy
            self.numbers[prefix] = summary.numbers[:, [0, 1, 3]].reshape(*tokens.shape, 3)  # paths depend on the anchor

    def _keep(self, drawn: Candidates, state: Tensor, row: Tensor) -> None:
        """Keep candidates and acceptances after prefixes (state, row), [M] each."""
        self.token[state, row] = drawn.tokens
        on_text = row == 0
        self.accepted[state[on_text]] = drawn.accepted[on_text]
        if drawn.accept_chance is not None and drawn.next_chance is not None:
            self.accept_chance[state[on_text]] = drawn.accept_chance[on_text].to(self.accept_chance.dtype)
            self.next_chance[state[on_text]] = drawn.next_chance[on_text].to(self.next_chance.dtype)
        if drawn.weight is not None:  # a chain: row r is read after row r - 1
            self.weight[state, row + 1] = drawn.weight

    def _candidates(
        self, sampled: Tensor, target: Tensor | None, owner: Tensor, state: Tensor, row: Tensor, depth: int
    ) -> Candidates:
        """Return the candidates after M prefixes; arguments as of `_record`."""
        collector, place = self.collector, self.place[state]
        token = torch.where(row == 0, self.next_token[state], OFF_TEXT)
        if not collector.given_text:
            # A candidate of depth d after a place has the position d - 1 after the text's token there.
            noise = None if self._noise is None else self._noise.index_select(0, place + depth - 1)
            return best_candidates(match_scores(sampled, noise), token, self.shape.width, self._most)
        q = torch.softmax(sampled[owner].double(), -1)
        p = None if target is None else torch.softmax(target[owner].double(), -1)
        choices = self._choices(self.start + place, row)
        if collector.is_block:
            assert p is not None
            return block_candidates(q, p, token, self.weight[state, row], choices)
        with_replacement = collector.mode.name == "rejection_replace"
        return rejection_candidates(q, p, token, self.shape.width, with_replacement, choices)

    def trees(self, place: Tensor) -> dict[str, Tensor]:
        """Return the candidates of the rounds that begin at n places, as columns [n, nodes] in the order of the tree.

        A token is `NO_TOKEN`, and everything else 0, where a filter left fewer tokens than the tree has siblings. A node is
        labelled if its parent is on the text, which goes on, and under `rejection` no sibling was accepted before.
        """
        collector, tree, device = self.collector, self.collector.tree, place.device
        parent, rank = (torch.tensor(values, device=device) for values in (tree.parent, sibling_ranks(tree)))
        # The prefix (state, row) after which each node is drawn, and the one that it leads to.
        state, row, next_state, next_row = (place.new_zeros(len(place), len(tree)) for _ in range(4))
        next_state[:, 0] = self.begin[place]
        for level in map(torch.tensor, tree.levels[1:]):
            state[:, level], row[:, level] = at, after = next_state[:, parent[level]], next_row[:, parent[level]]
            # The accepted candidate on the text leads to the next place, any other one to its row of the shape.
            on_text = (after == 0) & (self.accepted[at] == rank[level])
            next_state[:, level] = torch.where(on_text, self.after[at], at)
            next_row[:, level] = torch.where(on_text, 0, self.shape.child[after, rank[level]])
        state, row, rank = state[:, 1:], row[:, 1:], rank[1:]
        token, is_labelled = self.token[state, row, rank], (row == 0) & (self.next_token[state] >= 0)
        exists = torch.nn.functional.pad(token != NO_TOKEN, (1, 0), value=True)
        for rows in tree.levels[2:]:
            exists[:, rows] &= exists[:, parent[rows]]  # what follows a token that does not exist has no meaning
        exists = exists[:, 1:]
        is_labelled &= exists
        features, probability = self._features(state.cpu().numpy(), row.cpu().numpy(), rank.cpu().numpy())
        columns = {
            "tokens": token.where(exists, NO_TOKEN),
            "draft_prob": (torch.from_numpy(probability).to(device) * exists).float(),
            # Also of siblings after an accepted one, which are not tried.
            "target_prob": (self.target_prob[state, rank] * is_labelled).float(),
            "overlap": (self.overlap[state] * is_labelled).float(),
            "accepted": is_labelled & (self.accepted[state] == rank),
        }
        if collector.given_text:
            is_labelled &= (self.accepted[state] < 0) | (rank <= self.accepted[state])
            columns["accept_chance"] = (self.accept_chance[state, rank] * is_labelled).float()
            columns["next_chance"] = (self.next_chance[state] * is_labelled).float()
        columns["observed"] = is_labelled
        values = torch.from_numpy(features).masked_fill(~exists.cpu()[..., None], 0.0)
        columns |= zip(collector.features, values.unbind(2), strict=True)
        if collector.state_width:
            columns[DRAFT_HIDDEN] = self.hidden[state, row].masked_fill(~exists[..., None], 0.0)
        return columns

    def _features(self, state: Array, row: Array, rank: Array) -> tuple[Array, Array]:
        """Return [n, nodes, F] features and [n, nodes] probabilities of the nodes of n trees; `rank` [nodes]."""
        tree, temperature = self.collector.tree, self.collector.temperature
        numbers = self.numbers[state, row, rank]  # [n, nodes, 3]
        # [n, 1 + nodes] log-probabilities of paths, the anchor first.
        path = np.concatenate([np.zeros((len(state), 1)), numbers[..., 0]], 1)
        for level in tree.levels[2:]:
            path[:, level] += path[:, [tree.parent[node] for node in level]]
        ids = np.zeros((*state.shape, 6), dtype=np.int64)
        ids[..., 0], ids[..., 3] = state * self.token.shape[1] + row, rank
        # Siblings in the tree: rows of the shape may have more, and noisy_margin is to the best token outside of the tree.
        ids[..., 4] = [len(tree.children[parent]) for parent in tree.parent[1:]]
        ids[..., 5] = tree.depth[1:]
        numbers = np.concatenate([numbers[..., :2], path[:, 1:, None], numbers[..., 2:]], -1).reshape(-1, 4)
        top, stats, best = (values.reshape(-1, values.shape[-1]) for values in (self.top, self.stats, self.best))
        summary = RowSummary(top, stats, best, numbers)
        features = self._columns(summary, DrawnTokens(ids.reshape(-1, 6)), temperature)
        return features.reshape(*state.shape, -1), np.exp(numbers[:, 1]).reshape(state.shape)


def sibling_ranks(tree: Topology) -> list[int]:
    """Return the rank of each row among its siblings; 0 for row 0."""
    return [0, *(tree.children[tree.parent[row]].index(row) for row in range(1, len(tree)))]


def closure(tree: Topology) -> Topology:
    """Return the smallest tree that contains, at its root, `tree` and the sub-tree below each of its nodes."""
    rank, paths = sibling_ranks(tree), set()
    for row in range(1, len(tree)):
        path: tuple[int, ...] = ()
        # Its paths from each of its ancestors: every suffix of its path of ranks.
        while row > 0:
            path, row = (rank[row], *path), tree.parent[row]
            paths.add(path)
    order = sorted(paths, key=lambda path: (len(path), path))
    index = {path: at for at, path in enumerate(order, 1)}
    return Topology([-1, *(index.get(path[:-1], 0) for path in order)])
