"""The places of a text and what the draft proposes behind each: on the text, and where it leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..decode.cache import CachedModel, backend_mask
from ..decode.noise import gumbel
from ..decode.pair import Pair
from ..decode.topology import Topology
from ..policies.features import compute
from ..policies.vectors import stored
from .wide import PRE_FEATURES, LevelNodes, WideRows

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
    """

    text: list[int]
    prompt: int
    anchor: Tensor
    key: int


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
            self.noise = self._noise_at(torch.arange(places, device=device))

    def _noise_at(self, place: Tensor) -> Tensor:
        """Return [., V], the noise of the tokens at these places."""
        at = self.prompt + self.first + place
        return gumbel(self.key, at, self.pair.vocabulary, self.pair.logits_dtype)

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
        depth = torch.tensor(self.shape.depth, device=self.own.device)
        line = torch.arange(len(self.shape), device=self.own.device)
        for level in self.shape.levels[2:]:  # row -> its ancestor of depth 1
            line[level] = line[[self.shape.parent[row] for row in level]]
        rank = torch.tensor([0, *(self.shape.children[0].index(int(row)) if int(row) else 0 for row in line[1:])])
        off = self.token[:, 0][:, rank.to(line.device)] != self.own[:, None]  # [P, rows of the shape]
        wanted = off & (self.at >= 0) & (depth > 0) & (depth < reach[:, None])
        widest = torch.stack([wanted[:, level].sum(1) for level in self.shape.levels]).amax(0)
        for places in _chunks(widest, most_rows):
            model.roll_back(prefix)
            self._grow_chunk(model, places, wanted)

    def _grow_chunk(self, model: CachedModel, places: Tensor, wanted: Tensor) -> None:
        prefix = model.length
        sees = self.shape.sees.to(places.device)
        parent = torch.tensor(self.shape.parent, device=places.device)
        position = self.prompt + self.first + places - 1  # of the last token of the text that each sees
        slot_place, slot_row = places.new_zeros(0), places.new_zeros(0)
        columns = torch.arange(prefix, device=places.device)
        for depth in range(1, self.shape.deepest):
            level = torch.tensor(self.shape.levels[depth], device=places.device)
            index, row = wanted[places][:, level].nonzero(as_tuple=True)
            if not len(index):
                return
            row = level[row]
            place, above = places[index], parent[row]
            rank = (self.child[above] == row[:, None]).int().argmax(1)
            tokens = self.token[place, self.at[above], rank]
            slot_place, slot_row = torch.cat([slot_place, place]), torch.cat([slot_row, row])
            own = (place[:, None] == slot_place) & sees[row[:, None], slot_row]
            mask = torch.cat([columns <= position[index][:, None], own], 1)
            at = position[index] + depth
            logits = model.read(tokens[None], 0, backend_mask(mask[None, None], self.pair.draft), at[None])[0]
            self._record(logits, model.states, place, row, depth + 1)

    def _record(self, logits: Tensor, states: Tensor | None, place: Tensor, row: Tensor, depth: int) -> None:
        """Note what is proposed below (place, row), tokens of depth `depth` behind the place, and the last of the states."""
        rows = WideRows(logits, self.temperature)
        sampled = None
        if self.temperature == 0:
            scores = logits
        else:
            sampled = torch.log_softmax(logits / self.temperature, -1)
            at = place + depth - 1
            if self.noise is not None:
                scores = sampled + self.noise[at]
            else:
                at, where = at.unique(return_inverse=True)
                scores = sampled + self._noise_at(at)[where]
        top = scores.topk(self.top.shape[-1], -1)
        rows.tokens = top.indices[:, : self.width]
        spot = (place, self.at[row])
        self.token[spot], self.top[spot], self.pre[spot] = rows.tokens, top.values, compute(PRE_FEATURES, rows)
        if self.hidden is not None:
            assert states is not None
            self.hidden[spot] = stored(states[0, -len(logits) :])
        self.logprob[spot] = rows.drawn_logprob
        self.prob[spot] = rows.of_drawn(sampled).exp() if sampled is not None else rows.drawn_logprob.exp()

    def gather(self, start: Tensor, tree: Topology) -> Unrolled:
        """Return the trees of the anchors at the places `start` [n]: each follows the text as far as it can."""
        place, row = start[:, None], torch.zeros_like(start)[:, None]  # [n, B] of the level above
        logprob = self.prob.new_zeros(len(start), 1)
        levels = []
        hidden = None if self.hidden is None else self.hidden.new_empty(len(start), tree.nodes, self.hidden.shape[-1])
        for depth in range(1, tree.deepest + 1):
            level = tree.levels[depth]
            above = [tree.parent[at] for at in level]
            back = [at - tree.levels[depth - 1][0] for at in above]
            rank = torch.tensor(
                [tree.children[up].index(at) for at, up in zip(level, above, strict=True)], device=start.device
            )
            width = torch.tensor([len(tree.children[up]) for up in above], device=start.device)
            place, row, logprob = place[:, back], row[:, back], logprob[:, back]
            fed = self.at[row]
            token, own = self.token[place, fed, rank], self.own[place]
            known = (row == 0) & (own >= 0)
            match = known & (token == own)
            prob, top = self.prob[place, fed, rank], self.top[place, fed]
            logprob = logprob + self.logprob[place, fed, rank]
            left_out = width.clamp_max(top.shape[-1] - 1)
            at = torch.stack([torch.zeros_like(rank), rank, left_out], 1).expand(len(start), -1, -1)
            post = LevelNodes(prob, logprob, top.gather(-1, at), depth, rank)
            features = torch.cat([self.pre[place, fed], post.features(self.names[len(PRE_FEATURES) :])], -1)
            p, overlap = self.target_prob[place, rank] * known, self.overlap[place] * known
            levels.append((token, features, prob, p, overlap, known, match))
            if hidden is not None and self.hidden is not None:
                hidden[:, level[0] - 1 : level[-1]] = self.hidden[place, fed]
            place = torch.where(match, (place + 1).clamp_max(self.count - 1), place)
            row = torch.where(match, 0, self.child[row, rank])
        made = Unrolled(*(torch.cat(values, 1) for values in zip(*levels, strict=True)))
        return made if hidden is None else replace(made, hidden=hidden)


def _chunks(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Deal the places that have any rows to chunks of about `most` rows each."""
    places = rows.nonzero()[:, 0]
    if not len(places):
        return []
    number = (rows[places].cumsum(0) - 1) // most
    return [places[number == chunk] for chunk in number.unique()]
