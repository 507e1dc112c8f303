"""The places of a text and what the draft proposes behind each: on the text, and where it leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode.cache import CachedModel, backend_mask
from ..decode.finite import broken
from ..decode.noise import gumbel
from ..decode.pair import Pair
from ..decode.topology import Topology
from ..policies.features import compute
from ..policies.vectors import stored
from .wide import PRE_FEATURES, TreeNodes, WideRows

BYTES_PER_SCORE = 48
"""Peak bytes per row and token of vocabulary while features are computed (logits, noise, scores, softmax)."""


@dataclass(frozen=True)
class Anchors:
    """The anchors of one text: `anchor` tokens of it are committed when the round starts.

    Attributes:
        text: prompt and generated ids.
        prompt: length of the prompt.
        anchor: [n] int64, rising, from 1 on.
        key: of the stream.
        noise: [L, V] that the generated tokens were drawn with, where it is at hand.
    """

    text: list[int]
    prompt: int
    anchor: Tensor
    key: int
    noise: Tensor | None = None


@dataclass(frozen=True)
class Unrolled:
    """The candidates of n anchors, N nodes each in the order of the topology.

    Attributes:
        tokens: [n, N].
        features: [n, N, F] float32 in the order of `Unroller.features`.
        draft_prob, target_prob: [n, N], q and p of the token in the sampled distributions (T = 0: at temperature 1).
        overlap: [n, N], sum over tokens of min(p, q).
        labelled: [n, N] bool, the parent is on the text and the text goes on; elsewhere p and overlap are 0.
        accepted: [n, N] bool, the node is on the text.
        hidden: [n, N, H] float16, the draft's hidden states, if asked for.
    """

    tokens: Tensor
    features: Tensor
    draft_prob: Tensor
    target_prob: Tensor
    overlap: Tensor
    labelled: Tensor
    accepted: Tensor
    hidden: Tensor | None = None


@dataclass(frozen=True)
class Job:
    """What is unrolled.

    Attributes:
        pair: whose draft.
        shape: drafted behind each place.
        features: recorded at each node.
        temperature: of the sampling.
        memory_bytes: budget for rows as wide as the vocabulary.
        hidden: H of the draft's hidden states, to keep them as well; 0 = not.
    """

    pair: Pair
    shape: Topology
    features: tuple[str, ...]
    temperature: float
    memory_bytes: int
    hidden: int = 0


class Places:
    """The places of one text, `first` .. `end` generated tokens long, and what is drafted behind each.

    Args:
        job: what is unrolled.
        anchors: of the text.
        first, last: of them.
        end: the last place that is looked at.

    A record belongs to (place, row of the shape) whose children it describes: row 0 is the text itself.
    """

    def __init__(self, job: Job, anchors: Anchors, first: int, last: int, end: int) -> None:
        self.pair, self.temperature, self.shape = job.pair, job.temperature, job.shape
        self.names, self.text, self.prompt = job.features, anchors.text, anchors.prompt
        self.first, self.count = first, end - first + 1
        device, dtype = self.pair.device, self.pair.logits_dtype
        self.last = last
        place = torch.arange(first, end + 1, device=device)
        generated = torch.tensor([*anchors.text[anchors.prompt :], -1], device=device)
        self.own = generated[place.clamp_max(len(generated) - 1)]  # [P], the text's token there; -1 behind its end
        self.fed = [row for row in range(len(self.shape)) if self.shape.children[row]]
        self.width = max(len(below) for below in self.shape.children)
        self.is_chain, self.sees = self.shape.is_chain, self.shape.sees.to(device)
        self.parent, self.depth = (torch.tensor(of, device=device) for of in (self.shape.parent, self.shape.depth))
        self.at = torch.full((len(self.shape),), -1, device=device)  # row of the shape -> index among the fed ones
        self.at[self.fed] = torch.arange(len(self.fed), device=device)
        self.child = torch.full((len(self.shape), self.width), 0, device=device)
        for row, below in enumerate(self.shape.children):
            self.child[row, : len(below)] = torch.tensor(below, device=device, dtype=torch.int64)
        size, most = (self.count, len(self.fed)), min(self.width + 1, self.pair.vocabulary)
        self.token = torch.zeros(*size, self.width, dtype=torch.int64, device=device)
        self.pre = torch.zeros(*size, len(PRE_FEATURES), device=device)
        self.top = torch.zeros(*size, most, dtype=dtype, device=device)
        self.prob, self.logprob = (torch.zeros(*size, self.width, dtype=dtype, device=device) for _ in range(2))
        self.hidden = torch.zeros(*size, job.hidden, dtype=torch.float16, device=device) if job.hidden else None
        self.key, self.noise = anchors.key, None
        places = self.count + self.shape.deepest
        if self.temperature > 0 and places * self.pair.vocabulary * BYTES_PER_SCORE <= job.memory_bytes:
            none = self.prob.new_empty(0, self.pair.vocabulary)
            known = none if anchors.noise is None else anchors.noise[first:][:places]
            self.noise = torch.cat([known, self._noise_at(torch.arange(len(known), places, device=device))])

    def _noise_at(self, place: Tensor) -> Tensor:
        """Return [., V], the noise of the tokens at these places."""
        at = self.prompt + self.first + place
        return gumbel(self.key, at, self.pair.vocabulary, self.pair.logits_dtype)

    def _noise_behind(self, place: Tensor) -> Tensor:
        """Return [., V], the noise at these places, many of them equal."""
        if self.noise is not None:
            return self.noise.index_select(0, place)
        place, where = place.unique(return_inverse=True)
        return self._noise_at(place)[where]

    def read_text(self, model: CachedModel, target_rows: Tensor, most_rows: int) -> None:
        """Read the text with the draft and record what it proposes on it, beside the target's probabilities.

        Args:
            model: the draft; empty.
            target_rows: [L, V], the target's row that each generated token was drawn from.
            most_rows: that are looked at together, so that a long text takes no more memory than a short one.
        """
        self.overlap = self.prob.new_zeros(self.count)
        self.target_prob = torch.zeros_like(self.prob[:, 0])
        begin = 0
        for start in range(0, self.count, most_rows):
            place = torch.arange(start, min(start + most_rows, self.count), device=self.pair.device)
            end = self.prompt + self.first + start + len(place) - 1
            ids = torch.tensor([self.text[begin:end]], device=self.pair.device)
            logits = model.read(ids, rows=len(place))[0]
            begin = end
            self._record(logits, model.states, place, torch.zeros_like(place), 1)
            known = max(0, min(len(place), len(target_rows) - self.first - start))
            p, q = (self._sampled(rows[:known]) for rows in (target_rows[self.first + start :], logits))
            here = place[:known]
            self.overlap[here] = torch.minimum(p, q).sum(-1)
            self.target_prob[here] = p.gather(-1, self.token[here, 0])

    def _sampled(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits / (self.temperature or 1.0), -1)

    def grow(self, model: CachedModel, most_rows: int) -> None:
        """Draft what leaves the text, in chunks of places."""
        prefix = model.length
        reach = self.shape.deepest - (
            torch.arange(self.count, device=self.own.device) + self.first - self.last
        ).clamp_min(0)
        line = torch.arange(len(self.shape), device=self.own.device)
        for level in self.shape.levels[2:]:  # row -> its ancestor of depth 1
            line[level] = line[[self.shape.parent[row] for row in level]]
        rank = torch.tensor([0, *(self.shape.children[0].index(int(row)) if int(row) else 0 for row in line[1:])])
        off = self.token[:, 0][:, rank.to(line.device)] != self.own[:, None]  # [P, rows of the shape]
        wanted = off & (self.at >= 0) & (self.depth > 0) & (self.depth < reach[:, None])
        widest = torch.stack([wanted[:, level].sum(1) for level in self.shape.levels]).amax(0)
        for places in _chunks(widest, most_rows):
            model.roll_back(prefix)
            self._grow_chunk(model, places, wanted)

    def _grow_chunk(self, model: CachedModel, places: Tensor, wanted: Tensor) -> None:
        row, index = wanted[places].T.nonzero(as_tuple=True)  # in the order of the rows, which is that of their depths
        place, above = places[index], self.parent[row]
        fed, rank = self.at[above], (self.child[above] == row[:, None]).int().argmax(1)
        position = self.prompt + self.first + place - 1  # of the last token of the text that each sees
        text = torch.arange(model.length, device=place.device) <= position[:, None]
        end = 0
        for depth, count in enumerate(torch.bincount(self.depth[row]).tolist()):
            if not count:
                continue
            begin, end = end, end + count
            at, behind = place[begin:end], row[begin:end]
            own = at[:, None] == place[:end]
            if not self.is_chain:
                own &= self.sees[behind[:, None], row[:end]]
            mask = backend_mask(torch.cat([text[begin:end], own], 1)[None, None], self.pair.draft)
            tokens = self.token[at, fed[begin:end], rank[begin:end]]
            logits = model.read(tokens[None], 0, mask, (position[begin:end] + depth)[None])[0]
            self._record(logits, model.states, at, behind, depth + 1)

    def _record(self, logits: Tensor, states: Tensor | None, place: Tensor, row: Tensor, depth: int) -> None:
        """Note what is proposed below (place, row), tokens of depth `depth` behind the place, and the last of the states."""
        rows = WideRows(logits, self.temperature)
        sampled, most = None, self.top.shape[-1]
        if self.temperature == 0 and most <= rows.ranked[0].shape[-1]:
            best, tokens = (side[:, :most] for side in rows.ranked)
        elif self.temperature == 0:
            best, tokens = logits.topk(most, -1)
        else:
            sampled = torch.log_softmax(logits / self.temperature, -1)
            best, tokens = (sampled + self._noise_behind(place + depth - 1)).topk(most, -1)
        rows.tokens = tokens[:, : self.width]
        spot = (place, self.at[row])
        self.token[spot], self.top[spot], self.pre[spot] = rows.tokens, best, compute(PRE_FEATURES, rows)
        if self.hidden is not None:
            assert states is not None
            self.hidden[spot] = stored(states[0, -len(logits) :])
        self.logprob[spot] = rows.drawn_logprob
        self.prob[spot] = rows.of_drawn(sampled).exp() if sampled is not None else rows.drawn_logprob.exp()

    def gather(self, start: Tensor, tree: Topology) -> Unrolled:
        """Return the trees of the anchors at the places `start` [n]: each follows the text as far as it can."""
        parent = torch.tensor(tree.parent, device=start.device)
        rank = torch.tensor([0, *(tree.children[tree.parent[row]].index(row) for row in range(1, len(tree)))])
        rank = rank.to(start.device)
        place, row = (start.new_zeros(len(start), len(tree)) for _ in range(2))  # of what each node is drawn behind
        next_place, next_row = (start.new_zeros(len(start), len(tree)) for _ in range(2))
        next_place[:, 0] = start
        for level in map(torch.tensor, tree.levels[1:]):
            above = parent[level]
            place[:, level], row[:, level] = here, behind = next_place[:, above], next_row[:, above]
            on_text = (behind == 0) & (self.token[here, self.at[behind], rank[level]] == self.own[here])
            next_place[:, level] = torch.where(on_text, (here + 1).clamp_max(self.count - 1), here)
            next_row[:, level] = torch.where(on_text, 0, self.child[behind, rank[level]])
        place, row, rank = place[:, 1:], row[:, 1:], rank[1:]
        fed, own = self.at[row], self.own[place]
        token, known = self.token[place, fed, rank], (row == 0) & (own >= 0)
        logprob = torch.cat([self.prob.new_zeros(len(start), 1), self.logprob[place, fed, rank]], 1)
        for level in map(torch.tensor, tree.levels[2:]):
            logprob[:, level] += logprob[:, parent[level]]
        prob, top = self.prob[place, fed, rank], self.top[place, fed]
        width = torch.tensor([len(tree.children[up]) for up in tree.parent[1:]], device=start.device)
        other = (rank == 0).long()  # the best one but the node itself
        at = torch.stack([rank, other, width.clamp_max(top.shape[-1] - 1)], 1)
        depth = torch.tensor(tree.depth[1:], device=start.device)
        post = TreeNodes(prob, logprob[:, 1:], top.gather(-1, at.expand(len(start), -1, -1)), depth, rank)
        features = torch.cat([self.pre[place, fed], post.features(self.names[len(PRE_FEATURES) :])], -1)
        if not bool(features.isfinite().all()):
            raise broken("draft")
        p, overlap = self.target_prob[place, rank] * known, self.overlap[place] * known
        hidden = None if self.hidden is None else self.hidden[place, fed]
        return Unrolled(token, features, prob, p, overlap, known, known & (token == own), hidden)


def _chunks(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Deal the places that have any rows to chunks of about `most` rows each."""
    places = rows.nonzero()[:, 0]
    if not len(places):
        return []
    number = (rows[places].cumsum(0) - 1) // most
    return [places[number == chunk] for chunk in number.unique()]
