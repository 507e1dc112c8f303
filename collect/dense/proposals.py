"""What is proposed at the places of a text: under the shared noise, by the draft alone, or drawn given the text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from ...decode.models.pair import Pair
from ...decode.verify.noise import best_scores, gumbel, in_order, match_scores
from ..schema import NO_TOKEN
from .given_text import NOTHING_LEFT, Candidates, DrawsAt, KeyedDraws, block_candidates, draw_key, rejection_candidates


@dataclass(frozen=True)
class Asked:
    """U prefixes after which candidates are wanted, whose rows are R.

    Attributes:
        sampled: [R, V] the draft's scores, processed.
        target: [R, V] the target's, processed; None where it has not read them.
        owner: [U] the row of each, rising.
        place: [U] of the text, 0 = the first that is looked at.
        node: [U] row of the shape that they come after; 0 = the text itself.
        depth: of the candidates.
        own: [U] the text's token there, `OFF_TEXT` off it.
        weight: [U] float64 of the path, of block verification.
    """

    sampled: Tensor
    target: Tensor | None
    owner: Tensor
    place: Tensor
    node: Tensor
    depth: int
    own: Tensor
    weight: Tensor


class Proposer(Protocol):
    """Draws the candidates at the places of one text.

    Attributes:
        exact_off_text: wants the target's rows at candidates off the text.
    """

    exact_off_text: bool

    def __call__(self, asked: Asked, width: int, most: int) -> tuple[Candidates, Tensor | None]:
        """Return `width` candidates after each prefix, and the `most` best scores [U, most] where noise was added."""


class BestScores:
    """The best scores, under the shared noise or without any: what `match` proposes, and a draft that is greedy.

    Args:
        pair: of the vocabulary.
        key: of the stream; None = no noise.
        start: absolute position of the first place.
        places: whose noise is kept; 0 = it is made again whenever it is asked for.
        noise: [L, V] that the first places' tokens were drawn with, where it is at hand.
    """

    exact_off_text = False

    def __init__(self, pair: Pair, key: int | None, start: int, places: int, noise: Tensor | None) -> None:
        self._pair, self._key, self._start = pair, key, start
        self._noise: Tensor | None = None
        if key is not None and places:
            none = torch.empty(0, pair.vocabulary, dtype=pair.logits_dtype, device=pair.device)
            # The text's tokens bring their own noise; places after its end, and what is drafted from there, want more.
            known = none if noise is None else noise[:places]
            self._noise = torch.cat([known, self._noise_at(torch.arange(len(known), places, device=pair.device))])

    def __call__(self, asked: Asked, width: int, most: int) -> tuple[Candidates, Tensor | None]:
        """See `Proposer`."""
        # A candidate of depth d after place a stands d - 1 positions after the text's own token there.
        scores = match_scores(asked.sampled, self._after(asked.place + asked.depth - 1))
        best, tokens, tied = best_scores(scores, most)
        if bool(tied.any()):
            tokens[tied] = in_order(scores[tied], most)
        # Under the shared noise acceptance is a fact: there are no chances to record.
        tokens, void = tokens[:, :width], torch.zeros(0, device=scores.device)
        hit = (tokens == asked.own[:, None]) & (asked.own >= 0)[:, None]
        kept = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
        return Candidates(tokens.where(best[:, :width] > -torch.inf, NO_TOKEN), kept, void, void), best

    def _noise_at(self, place: Tensor) -> Tensor:
        assert self._key is not None
        return gumbel(self._key, self._start + place, self._pair.vocabulary, self._pair.logits_dtype)

    def _after(self, place: Tensor) -> Tensor | None:
        """Return [., V], the noise at these places, many of them equal."""
        if self._key is None:
            return None
        if self._noise is not None:
            return self._noise.index_select(0, place)
        place, where = place.unique(return_inverse=True)
        return self._noise_at(place)[where]


class GivenText:
    """Candidates drawn given the text, as `rejection`, `rejection_replace` or `block` verification would have had them.

    Args:
        verification: of these.
        draws: the random choices.
        start: absolute position of the first place.
        rows: whose probabilities are held together.
        exact_off_text: of `block`; else candidates off the text are drawn from q.
    """

    def __init__(self, verification: str, draws: DrawsAt, start: int, rows: int, exact_off_text: bool = True) -> None:
        self._block, self._replacement = verification == "block", verification == "rejection_replace"
        self.exact_off_text = self._block and exact_off_text
        self._draws, self._start, self._rows = draws, start, rows

    def __call__(self, asked: Asked, width: int, most: int) -> tuple[Candidates, Tensor | None]:
        """See `Proposer`."""
        parts = [self._part(asked, part, width) for part in torch.arange(len(asked.owner)).split(self._rows)]
        joined = {
            field.name: torch.cat([getattr(part, field.name) for part in parts])
            for field in fields(Candidates)
            if getattr(parts[0], field.name) is not None
        }
        tokens = joined.pop("tokens")
        return Candidates(tokens.where(tokens != NOTHING_LEFT, NO_TOKEN), **joined), None

    def _part(self, asked: Asked, part: Tensor, width: int) -> Candidates:
        owner, own, node = asked.owner[part], asked.own[part], asked.node[part]
        # Under block verification several prefixes, of different weights, share a row.
        q = torch.softmax(asked.sampled[owner].double(), -1)
        p = None if asked.target is None else torch.softmax(asked.target[owner].double(), -1)
        draws = self._draws(self._start + asked.place[part], node)
        if self._block:
            return block_candidates(q, p, own, asked.weight[part], draws)
        return rejection_candidates(q, p, own, width, self._replacement, draws)


def keyed_draws(key: int, draw: int) -> DrawsAt:
    """Return the choices of a stream in the draw of that number."""
    made = draw_key(key, draw)
    return lambda position, node: KeyedDraws(made, position, node)
