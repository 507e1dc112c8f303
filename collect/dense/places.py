"""The places of a text and what the draft proposes after each: on the text, and where it leaves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...decode.models.cache import CachedModel
from ...decode.models.outputs import broken, check_rows, stored
from ...decode.summaries import summarise, truncation_lead
from ...decode.verify.sampler import Sampler
from ...policies.contract import Array
from ...policies.features import NOISY, PROBABILITY, SAMPLED, Columns, DrawnTokens
from .given_text import OFF_TEXT, Candidates
from .job import PRE_FEATURES, Anchors, Job
from .proposals import Asked

# Negative, as is all that is no token of the text; neither `OFF_TEXT` nor `NO_TOKEN`.
_AFTER_END = -3

_LARGE = 1e300
"""In the place of an infinite p / q: times nothing it is nothing."""


class Places:
    """The places of one text, `first` .. `end` generated tokens long, and what is drafted after each.

    Args:
        job: what is unrolled.
        anchors: of the text.
        first, last: of them.
        end: the last place that is looked at.

    A record belongs to (state, row of the shape) whose children it describes: row 0 is the text itself. A state is a place;
    under block verification a place with the weight that a round brings there, of which it has one for each.
    """

    def __init__(self, job: Job, anchors: Anchors, first: int, last: int, end: int) -> None:
        self.job, self.pair, self.temperature, self.shape = job, job.pair, job.temperature, job.shape
        self.names, self.text, self.prompt = job.features, anchors.text, anchors.prompt
        self.first, self.last, self.places = first, last, end - first + 1
        device = self.pair.device
        prompt = self.text[: self.prompt]
        processors = job.shaping.build(self.temperature, prompt, self.pair.eos, device)
        self.sampler = Sampler(processors, self.temperature)
        self.propose = job.proposer(anchors, first, self.places)
        # Something is proposed after these rows only, so only they have records.
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
        # One score more than siblings: noisy_margin is to the best token that is not drawn.
        self.most, self.pre_columns = min(self.width + 1, self.pair.vocabulary), Columns(PRE_FEATURES)
        self.post_columns = Columns(self.names[len(PRE_FEATURES) :])
        place = torch.arange(self.places, device=device)
        self._have(place, place, (place + 1).clamp_max(self.places - 1), torch.ones_like(place, dtype=torch.float64))

    def _have(self, begin: Tensor, place: Tensor, after: Tensor, weight: Tensor) -> None:
        """Take these states: at each place the one that a round begins with, and by state its place, the next and weight."""
        device, states = self.pair.device, len(place)
        self.begin, self.place, self.after = begin, place, after
        generated = torch.tensor([*self.text[self.prompt :], _AFTER_END], device=device)
        at = (place + self.first).clamp_max(len(generated) - 1)
        self.own = generated[at]  # [U], the text's token there; negative after its end
        size = (states, len(self.fed))
        self.token = torch.zeros(*size, self.width, dtype=torch.int64, device=device)  # [U, fed, W]
        self.kept = torch.full((states,), -1, device=device)  # the candidate that is on the text
        self.pre = np.zeros((*size, len(PRE_FEATURES)), dtype=np.float32)
        self.best = np.full((*size, max(self.most, 2)), -np.inf, dtype=np.float32)  # noisy scores in falling order
        # Log-probability at temperature 1, that in what is sampled from, and the lead over what a filter left out.
        self.numbers = np.zeros((*size, self.width, 3))
        self.hidden: Tensor | None = None
        if self.job.hidden:
            self.hidden = torch.zeros(*size, self.job.hidden, dtype=torch.float16, device=device)
        dtype = self.pair.logits_dtype
        self.overlap = torch.zeros(states, dtype=dtype, device=device)
        self.target_prob = torch.zeros(states, self.width, dtype=dtype, device=device)
        self.chance, self.some = torch.zeros_like(self.target_prob), torch.zeros_like(self.overlap)
        self.weight = torch.ones(*size, dtype=torch.float64, device=device)  # of the path that is fed
        self.weight[:, 0] = weight

    def read_text(self, model: CachedModel, target_rows: Tensor, most_rows: int) -> None:
        """Read the text with the draft and record what it proposes on it, beside the target's probabilities.

        Args:
            model: the draft; empty.
            target_rows: [L, V], the target's row that each generated token was drawn from.
            most_rows: that are looked at together, so that a long text takes no more memory than a short one.
        """
        # The weights, and with them the states, must be known before anything is recorded: the text is read twice.
        if self.job.given_text and self.job.verification == "block":
            self._split(model, target_rows, most_rows)
            model.roll_back(0)
        for place, logits, sampled, target in self._read(model, target_rows, most_rows):
            known = len(target)
            # States are numbered by place: those of the places at hand are a run.
            own = torch.arange(
                *torch.searchsorted(self.place, torch.stack([place[0], place[-1] + 1])).tolist(), device=place.device
            )
            owner = self.place[own] - place[0]
            # After the end of the text the target has no row; nothing is kept there, and the draft's fills its place.
            given = torch.cat([target, sampled[known:]]) if self.job.given_text else None
            self._record(logits, model.states, sampled, given, owner, own, torch.zeros_like(own), 1)
            own, owner = own[owner < known], owner[owner < known]
            p, q = (torch.softmax(rows[:known], -1) for rows in (target, sampled if self.temperature > 0 else logits))
            self.overlap[own] = torch.minimum(p, q).sum(-1)[owner]
            self.target_prob[own] = p[owner].gather(-1, self.token[own, 0].clamp_min(0))

    def _read(
        self, model: CachedModel, target_rows: Tensor, most_rows: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Read the text; yield places [n] of it, the draft's logits there [n, V], and the processed ones of both models.

        The target has those [m, V] of the first m places only, where the text ends.
        """
        begin = 0
        for start in range(0, self.places, most_rows):
            place = torch.arange(start, min(start + most_rows, self.places), device=self.pair.device)
            # The row of a place is that of the token before it; the first part reads the prompt as well.
            end = self.prompt + self.first + start + len(place) - 1
            ids = torch.tensor([self.text[begin:end]], device=self.pair.device)
            logits = model.read(ids, rows=len(place))[0]
            begin = end
            known = max(0, min(len(place), len(target_rows) - self.first - start))
            sampled = self.sampler(logits, partial(self._texts, place))
            # The target's rows go through the same sampler, and `_record` asks it for what it left out of the draft's.
            untruncated = self.sampler.untruncated
            target = self.sampler(target_rows[self.first + start :][:known], partial(self._texts, place[:known]))
            self.sampler.untruncated = untruncated
            yield place, logits, sampled, target

    def _split(self, model: CachedModel, target_rows: Tensor, most_rows: int) -> None:
        """Find the weights that rounds of block verification bring to each place, whose draws depend on them.

        Rounds whose weight was 1 at the same place go on alike, so there are few.
        """
        step = torch.ones(self.places, dtype=torch.float64, device=self.pair.device)
        for place, _, sampled, target in self._read(model, target_rows, most_rows):
            here = place[: len(target)]
            own = self.own[here].clamp_min(0)[:, None]
            p, q = (torch.softmax(rows[: len(here)].double(), -1).gather(-1, own)[:, 0] for rows in (target, sampled))
            # 0 / 0, a token that neither model would draw, leaves the weight as it is.
            step[here] = torch.where(self.own[here] >= 0, (p / q).nan_to_num(1.0).clamp_max(_LARGE), 1.0)
        states = split_weights(step.cpu().numpy(), self.shape.deepest, self.last - self.first + 1)
        begin, found, after, weight = (torch.from_numpy(values).to(self.pair.device) for values in states)
        self._have(begin, found, after, weight)

    def _texts(self, place: Tensor) -> list[list[int]]:
        """Return the tokens before each place."""
        return [self.text[: self.prompt + self.first + at] for at in place.tolist()]

    def _prefixes(self, state: Tensor, row: Tensor) -> list[list[int]]:
        """Return the tokens before each (state, row), rows all of one depth: the text up to the place, then the path."""
        path = torch.empty(len(row), 0, dtype=torch.int64, device=row.device)
        # Rows of one depth: all paths reach row 0 at once.
        while bool(row.any()):
            parent = self.parent[row]
            path = torch.cat([self.token[state, self.at[parent], self.rank[row]].clamp_min(0)[:, None], path], 1)
            row = parent
        start, place = self.prompt + self.first, self.place[state]
        return [[*self.text[: start + at], *tokens] for at, tokens in zip(place.tolist(), path.tolist(), strict=True)]

    def grow(self, model: CachedModel, target: CachedModel | None, most_rows: int) -> None:
        """Draft what leaves the text, in chunks of states.

        Args:
            model: the draft, which has read the text.
            target: the same, if its rows off the text are wanted.
            most_rows: of a forward.
        """
        prefix = model.length
        # After the last anchor a place is met only by rounds that are at least so many tokens deep already.
        reach = self.shape.deepest - (self.place + self.first - self.last).clamp_min(0)
        line = torch.arange(len(self.shape), device=self.own.device)
        for level in self.shape.levels[2:]:  # row -> its ancestor of depth 1
            line[level] = line[[self.shape.parent[row] for row in level]]
        # What follows the candidate on the text is drafted at the next place.
        off = self.rank[line] != self.kept[:, None]  # [U, rows of the shape]
        wanted = off & (self.at >= 0) & (self.depth > 0) & (self.depth < reach[:, None])
        widest = torch.stack([wanted[:, level].sum(1) for level in self.shape.levels]).amax(0)
        for states in _chunks(widest, most_rows):
            # The text stays in the cache; the rows of the chunk before go.
            for one in (model, target):
                if one is not None:
                    one.roll_back(prefix)
            self._grow_chunk(model, target, states, wanted)

    def _grow_chunk(self, model: CachedModel, target: CachedModel | None, states: Tensor, wanted: Tensor) -> None:
        row, index = wanted[states].T.nonzero(as_tuple=True)  # in the order of the rows, which is that of their depths
        state, fed, rank = states[index], self.at[self.parent[row]], self.rank[row]
        position = self.prompt + self.first + self.place[state] - 1  # of the last token of the text that each sees
        # After the columns of the text come the chunk's rows in the order in which they are fed. Each sees its own prefix of
        # the text, and of those rows itself and its ancestors: rows of the same state, in a chain all that there are.
        text = torch.arange(model.length, device=state.device) <= position[:, None]
        end = 0
        for depth, count in enumerate(torch.bincount(self.depth[row]).tolist()):
            if not count:
                continue
            begin, end = end, end + count
            at, after = state[begin:end], row[begin:end]
            own = at[:, None] == state[:end]
            if not self.is_chain:
                own &= self.sees[after[:, None], row[:end]]
            mask = torch.cat([text[begin:end], own], 1)[None, None]
            tokens = self.token[at, fed[begin:end], rank[begin:end]].clamp_min(0)  # after no token nothing is kept
            positions = (position[begin:end] + depth)[None]
            logits = model.read(tokens[None], 0, mask, positions)[0]
            prefixes = partial(self._prefixes, at, after)
            given = None
            if target is not None:
                rows = target.read(tokens[None], 0, mask, positions)[0]
                check_rows(rows)
                given = self.sampler(rows, prefixes)
            sampled = self.sampler(logits, prefixes)
            self._record(
                logits, model.states, sampled, given, torch.arange(count, device=at.device), at, after, depth + 1
            )

    def _record(
        self, logits: Tensor, states: Tensor | None, sampled: Tensor, target: Tensor | None, owner: Tensor,
        state: Tensor, row: Tensor, depth: int,
    ) -> None:  # fmt: skip
        """Note what is proposed after (state, row) [U], whose rows of logits [R, V] are `owner` [U].

        Args:
            logits: the draft's, raw.
            states: its hidden states, the last R of them.
            sampled, target: [R, V] the processed ones of both models; the target's where it has read them.
            owner, state, row: as said.
            depth: tokens of the candidates after the place.
        """
        own = torch.where(row == 0, self.own[state], OFF_TEXT)
        asked = Asked(
            sampled, target, owner, self.place[state], row, depth, own, self.weight[state, self.at[row]],
        )  # fmt: skip
        found, best = self.propose(asked, self.width, self.most)
        self._keep(found, state, row)
        tokens = found.tokens.clamp_min(0)
        # Parent, rank, siblings and depth stay 0: PRE columns and probabilities do not look at them.
        ids = np.zeros((tokens.numel(), 6), dtype=np.int64)
        ids[:, 0], ids[:, 1] = np.repeat(owner.cpu().numpy(), tokens.shape[1]), tokens.cpu().numpy().ravel()
        drawn = DrawnTokens(ids)
        needs = self.pre_columns.needs | PROBABILITY | SAMPLED
        if best is None:
            check_rows(logits, "draft")
        else:
            needs |= NOISY
            if self.sampler.untruncated is not None:
                drawn.lead = truncation_lead(self.sampler.untruncated, sampled, drawn)
        shaped = sampled if self.sampler.reads_prefix and self.temperature > 0 else None
        summary = summarise(needs, logits, drawn, self.temperature, shaped, best=best)
        if best is not None and not np.isfinite(summary.noisy[:, 0]).all():  # topk takes NaN for the largest
            raise broken("draft")
        at = (state.cpu().numpy(), self.at[row].cpu().numpy())
        if best is not None:
            self.best[at[0], at[1], : self.most] = summary.noisy
        self.pre[at] = self.pre_columns(
            summary, DrawnTokens(np.ascontiguousarray(ids[:: tokens.shape[1]])), self.temperature
        )
        # A path depends on the anchor: its log-probability is left to `gather`.
        self.numbers[at] = summary.numbers[:, [0, 1, 3]].reshape(*tokens.shape, 3)
        if self.hidden is not None:
            assert states is not None
            self.hidden[state, self.at[row]] = stored(states[0, -len(logits) :])[owner]

    def _keep(self, found: Candidates, state: Tensor, row: Tensor) -> None:
        """Note the candidates after (state, row) [U]: the tokens, which is on the text, and what is known of acceptance."""
        self.token[state, self.at[row]] = found.tokens
        on_text = row == 0
        self.kept[state[on_text]] = found.accepted[on_text]
        if not self.job.given_text:
            return
        self.chance[state[on_text]] = found.accept_chance[on_text].to(self.chance.dtype)
        self.some[state[on_text]] = found.next_chance[on_text].to(self.some.dtype)
        if found.weight is not None:  # a chain: row r is fed after row r - 1
            deeper = row + 1 < len(self.fed)
            self.weight[state[deeper], row[deeper] + 1] = found.weight[deeper, 0]


def split_weights(step: Array, depth: int, anchors: int) -> tuple[Array, Array, Array, Array]:
    """Return the states of block verification on a text: the weights that the rounds of any anchor bring to each place.

    Args:
        step: [P] p / q of the text's token at each place.
        depth: K; a round that begins at place a comes to the places a .. a + K - 1, with weight 1 to the first.
        anchors: of the places, the first ones.

    Returns:
        [P] the state of weight 1 at each place; [U] place of each state, [U] the state that follows it on the text, [U] its
        weight.
    """
    places = len(step)
    weight = np.ones((places, depth))  # by place and tokens of the round before it
    state = np.zeros((places, depth), dtype=np.int64)
    found: list[Array] = []
    count = 0
    for at in range(places):
        if at:
            # w_i = min(1, w_{i-1} p / q), p and q of the text's token (block verification, arXiv 2403.10444).
            weight[at, 1:] = np.minimum(1.0, weight[at - 1, :-1] * step[at - 1])
        lanes = slice(max(0, at + 1 - anchors), at + 1)  # rounds from anchors that there are
        # Equal bit for bit: weights that were cut to 1 at the same place are multiplied by the same steps from there on.
        mine, where = np.unique(weight[at, lanes], return_inverse=True)
        state[at, lanes] = count + where
        found.append(mine)
        count += len(mine)
    place, after = np.repeat(np.arange(places), [len(mine) for mine in found]), np.arange(count)
    # Rounds of one state go on to one state. Those that have come to depth K end: their state is followed by itself.
    for at in range(places - 1):
        lanes = slice(max(0, at + 1 - anchors), min(at + 1, depth - 1))
        after[state[at, lanes]] = state[at + 1, lanes.start + 1 : lanes.stop + 1]
    return state[:, 0].copy(), place, after, np.concatenate(found)


def _chunks(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Deal the places that have any rows to chunks of about `most` rows each."""
    places = rows.nonzero()[:, 0]
    if not len(places):
        return []
    number = (rows[places].cumsum(0) - 1) // most
    return [places[number == chunk] for chunk in number.unique()]
