"""The places of a text and what the draft proposes behind each: on the text, and where it leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..decode.models.cache import CachedModel, backend_mask
from ..decode.models.finite import broken
from ..decode.models.hidden import stored
from ..decode.models.pair import Pair
from ..decode.summaries import lead_over_truncated, summarise
from ..decode.topology import Topology
from ..decode.verify.noise import gumbel, match_scores
from ..decode.verify.sampling import UNCHANGED, Sampler, Shaping
from ..policies.features import CHAIN_FEATURES, FEATURES, TREE_FEATURES, Columns, Drawn, Kind, Need
from .schema import NO_TOKEN

PRE_FEATURES = tuple(name for name in TREE_FEATURES if FEATURES[name].kind is Kind.PRE)
assert TREE_FEATURES[: len(PRE_FEATURES)] == CHAIN_FEATURES[: len(PRE_FEATURES)] == PRE_FEATURES
"""Names of what belongs to a row, whatever is drawn from it; they come first at every node."""

BYTES_PER_SCORE = 48
"""Peak bytes per row and token of vocabulary while features are computed (logits, noise, scores, softmax)."""

_AFTER_END = -3


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
class Job:
    """What is unrolled.

    Attributes:
        pair: whose draft.
        shape: drafted behind each place.
        features: recorded at each node.
        temperature: of the sampling.
        memory_bytes: budget for rows as wide as the vocabulary.
        shaping: what else changes the distribution that is sampled from.
        hidden: H of the draft's hidden states, to keep them as well; 0 = not.
    """

    pair: Pair
    shape: Topology
    features: tuple[str, ...]
    temperature: float
    memory_bytes: int
    shaping: Shaping = UNCHANGED
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
        generated = torch.tensor([*anchors.text[anchors.prompt :], _AFTER_END], device=device)
        self.own = generated[place.clamp_max(len(generated) - 1)]  # [P], the text's token there; negative after its end
        processors = job.shaping.build(self.temperature, self.prompt, self.pair.eos, device)
        self.sampler = Sampler(processors, self.temperature)
        self.fed = [row for row in range(len(self.shape)) if self.shape.children[row]]
        self.width = max(len(below) for below in self.shape.children)
        self.is_chain, self.sees = self.shape.is_chain, self.shape.sees.to(device)
        self.parent, self.depth = (torch.tensor(of, device=device) for of in (self.shape.parent, self.shape.depth))
        self.at = torch.full((len(self.shape),), -1, device=device)  # row of the shape -> index among the fed ones
        self.at[self.fed] = torch.arange(len(self.fed), device=device)
        self.child = torch.full((len(self.shape), self.width), 0, device=device)
        self.rank = torch.zeros(len(self.shape), dtype=torch.int64, device=device)  # among the children of the parent
        for row, below in enumerate(self.shape.children):
            self.child[row, : len(below)] = torch.tensor(below, device=device, dtype=torch.int64)
            self.rank[list(below)] = torch.arange(len(below), device=device)
        size, most = (self.count, len(self.fed)), min(self.width + 1, self.pair.vocabulary)
        self.most, self.pre_columns = most, Columns(PRE_FEATURES)
        self.post_columns = Columns(self.names[len(PRE_FEATURES) :])
        self.token = torch.zeros(*size, self.width, dtype=torch.int64, device=device)
        self.pre = np.zeros((*size, len(PRE_FEATURES)), dtype=np.float32)
        self.best = np.full((*size, max(most, 2)), -np.inf, dtype=np.float32)  # noisy scores in falling order
        # Log-probability at temperature 1, that in what is sampled from, and the lead over what a filter left out.
        self.numbers = np.zeros((*size, self.width, 3))
        self.hidden = torch.zeros(*size, job.hidden, dtype=torch.float16, device=device) if job.hidden else None
        self.key, self.noise = anchors.key, None
        places = self.count + self.shape.deepest
        fits = places * self.pair.vocabulary * BYTES_PER_SCORE <= job.memory_bytes
        if self.temperature > 0 and (fits or anchors.noise is not None):
            none = torch.empty(0, self.pair.vocabulary, dtype=dtype, device=device)
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
        device, dtype = self.pair.device, self.pair.logits_dtype
        self.overlap = torch.zeros(self.count, dtype=dtype, device=device)
        self.target_prob = torch.zeros(self.count, self.width, dtype=dtype, device=device)
        begin = 0
        for start in range(0, self.count, most_rows):
            place = torch.arange(start, min(start + most_rows, self.count), device=self.pair.device)
            end = self.prompt + self.first + start + len(place) - 1
            ids = torch.tensor([self.text[begin:end]], device=self.pair.device)
            logits = model.read(ids, rows=len(place))[0]
            begin = end
            sampled = self._record(logits, model.states, place, torch.zeros_like(place), 1)
            known = max(0, min(len(place), len(target_rows) - self.first - start))
            here = place[:known]
            target = self.sampler(target_rows[self.first + start :][:known], partial(self._prefixes, here, 0 * here))
            p, q = (torch.softmax(rows, -1) for rows in (target, (logits if sampled is None else sampled)[:known]))
            self.overlap[here] = torch.minimum(p, q).sum(-1)
            self.target_prob[here] = p.gather(-1, self.token[here, 0].clamp_min(0))

    def _prefixes(self, place: Tensor, row: Tensor) -> list[list[int]]:
        """Return the tokens before each (place, row), whose rows are all of one depth: the text up to the place, the path."""
        path = torch.empty(len(row), 0, dtype=torch.int64, device=row.device)
        while bool(row.any()):
            above = self.parent[row]
            path = torch.cat([self.token[place, self.at[above], self.rank[row]].clamp_min(0)[:, None], path], 1)
            row = above
        start = self.prompt + self.first
        return [[*self.text[: start + at], *tokens] for at, tokens in zip(place.tolist(), path.tolist(), strict=True)]

    def grow(self, model: CachedModel, most_rows: int) -> None:
        """Draft what leaves the text, in chunks of places."""
        prefix = model.length
        reach = self.shape.deepest - (
            torch.arange(self.count, device=self.own.device) + self.first - self.last
        ).clamp_min(0)
        line = torch.arange(len(self.shape), device=self.own.device)
        for level in self.shape.levels[2:]:  # row -> its ancestor of depth 1
            line[level] = line[[self.shape.parent[row] for row in level]]
        off = self.token[:, 0][:, self.rank[line]] != self.own[:, None]  # [P, rows of the shape]
        wanted = off & (self.at >= 0) & (self.depth > 0) & (self.depth < reach[:, None])
        widest = torch.stack([wanted[:, level].sum(1) for level in self.shape.levels]).amax(0)
        for places in _chunks(widest, most_rows):
            model.roll_back(prefix)
            self._grow_chunk(model, places, wanted)

    def _grow_chunk(self, model: CachedModel, places: Tensor, wanted: Tensor) -> None:
        row, index = wanted[places].T.nonzero(as_tuple=True)  # in the order of the rows, which is that of their depths
        place, fed, rank = places[index], self.at[self.parent[row]], self.rank[row]
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
            mask = backend_mask(torch.cat([text[begin:end], own], 1)[None, None], self.pair.draft_model)
            tokens = self.token[at, fed[begin:end], rank[begin:end]].clamp_min(0)  # after no token nothing is kept
            logits = model.read(tokens[None], 0, mask, (position[begin:end] + depth)[None])[0]
            self._record(logits, model.states, at, behind, depth + 1)

    def _record(self, logits: Tensor, states: Tensor | None, place: Tensor, row: Tensor, depth: int) -> Tensor | None:
        """Note what is proposed below (place, row), tokens of depth `depth` behind the place, and the last of the states.

        Returns:
            [R, V] what is sampled from; None at temperature 0.
        """
        sampled = self.sampler(logits, partial(self._prefixes, place, row))
        noise = self._noise_behind(place + depth - 1) if self.temperature > 0 else None
        best, tokens = match_scores(sampled, noise).topk(self.most, -1)
        tokens = tokens[:, : self.width]
        ids = np.zeros((tokens.numel(), 6), dtype=np.int64)
        ids[:, 0], ids[:, 1] = np.repeat(np.arange(len(tokens)), tokens.shape[1]), tokens.cpu().numpy().ravel()
        plan = self.pre_columns.plan | (Need.PROBABILITY | Need.SAMPLED | Need.NOISE)
        drawn = Drawn(ids)
        if self.sampler.untruncated is not None:
            drawn.lead = lead_over_truncated(self.sampler.untruncated, sampled, drawn)
        shaped = sampled if self.sampler.reads_prefix and self.temperature > 0 else None
        summary = summarise(plan, logits, drawn, self.temperature, shaped, best=best)
        if not np.isfinite(summary.best[:, 0]).all():  # topk takes NaN for the largest
            raise broken("draft")
        spot = (place, self.at[row])
        at = (place.cpu().numpy(), self.at[row].cpu().numpy())
        self.token[spot] = tokens.where(best[:, : tokens.shape[1]] > -torch.inf, NO_TOKEN)
        self.best[at[0], at[1], : self.most] = summary.best
        each = Drawn(np.ascontiguousarray(ids[:: tokens.shape[1]]))
        self.pre[at] = self.pre_columns(summary, each, self.temperature)
        self.numbers[at] = summary.numbers[:, [0, 1, 3]].reshape(*tokens.shape, 3)
        if self.hidden is not None:
            assert states is not None
            self.hidden[spot] = stored(states[0, -len(logits) :])
        return sampled if self.temperature > 0 else None


def _chunks(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Deal the places that have any rows to chunks of about `most` rows each."""
    places = rows.nonzero()[:, 0]
    if not len(places):
        return []
    number = (rows[places].cumsum(0) - 1) // most
    return [places[number == chunk] for chunk in number.unique()]
