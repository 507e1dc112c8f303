"""One text of a batch while it is decoded: what is committed, and the candidates of its round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import StoppingCriteria

from .candidates import Candidates
from .models.cache import ReadPrompt
from .topology import Topology
from .verify.base import Turn
from .verify.noise import Choices, Source
from .verify.sampling import Sampler, Shaping, require_token


@dataclass(frozen=True)
class Request:
    """A prompt to be decoded.

    Attributes:
        prompt: token ids, at least one.
        key: of the stream (`noise.stream_key`); without effect at temperature 0.
        padding: tokens that stood left of the prompt: logits processors and stopping criteria see them, models do not.
        shaping: of this text; None = that of the settings.
        read: the prompt as the target has read it by itself (`hf.prefill`); None = the loop reads the token ids.
    """

    prompt: Sequence[int]
    key: int = 0
    padding: Sequence[int] = ()
    shaping: Shaping | None = None
    read: ReadPrompt | None = None

    @property
    def excess(self) -> tuple[int, int]:
        """How many slots, and positions, the prompt takes in excess of its number of tokens; at least 0."""
        if self.read is None:
            return 0, 0
        shift = self.read.slots - len(self.prompt)
        return max(shift, 0), max(shift + int(self.read.offset.max()), 0)


@dataclass(slots=True)
class Anchor:
    """What the target said where the roots of a round were drawn: kept as it came, since most policies do not read it.

    Attributes:
        rows: [R, V] raw logits of the call.
        at: which of them is the anchor's.
        hidden: [1, H] its last hidden state there, for drafters and policies that read it.
    """

    rows: Tensor
    at: int
    hidden: Tensor | None

    @property
    def row(self) -> Tensor:
        """[1, V]."""
        return self.rows[self.at : self.at + 1]


@dataclass
class Text:
    """One sequence while it is decoded.

    Attributes:
        tokens: committed, prompt included.
        prompt: its length.
        source: of its random numbers.
        sampler: of its logits.
        roots: tokens that the next round starts from: the last committed one, or alternatives for the one to come.
        anchor: what they were drawn from.
        round: of the next choices; 0 while the prompt is read.
        shift: slots of the target's cache that the prompt fills, minus its tokens.
    """

    tokens: list[int]
    prompt: int
    source: Source
    sampler: Sampler
    roots: list[int]
    anchor: Anchor
    round: int = 0
    ended: bool = False
    shift: int = 0

    @property
    def generated(self) -> int:
        """Tokens committed after the prompt."""
        return len(self.tokens) - self.prompt

    def choices(self, position: int, greedy: bool) -> Choices:
        """Return the random choices of the next round, whose roots stand at `position`."""
        choices = Choices(self.source, self.round, position, greedy)
        self.round += 1
        return choices

    def extend(
        self, new: Sequence[int], limit: int, eos: Collection[int], stops: Sequence[StoppingCriteria] = ()
    ) -> int:
        """Commit tokens one by one until the text ends: EOS, a stopping criterion, the limit. Return their number.

        Args:
            new: tokens.
            limit: of the tokens generated.
            eos: ids that end the text.
            stops: transformers' criteria, asked after each token, as plain decoding does.
        """
        before = len(self.tokens)
        for token in new:
            self.tokens.append(token)
            self.ended = self.generated >= limit or token in eos or (bool(stops) and self._stops(stops))
            if self.ended:
                break
        return len(self.tokens) - before

    def _stops(self, stops: Sequence[StoppingCriteria]) -> bool:
        ids = torch.tensor([[*self.sampler.padding, *self.tokens]], device=self.anchor.rows.device)
        return any(bool(torch.as_tensor(stop(ids, None)).all()) for stop in stops)


@dataclass(slots=True)
class Stream:
    """A text and its round.

    Attributes:
        number: of the stream, its row in the caches.
        text: that is decoded.
        base: tokens before the round's roots.
        choices: the round's random ones.
        found: its candidates.
        latest: places of the deepest level, and those of them that end their branch.
        before: what its roots were drawn from: `commit` sets the text's for the next round.
        sent, path: places that the target read, and those that it accepted.
        first: which of the rows that the target gave for the round is that of the first place sent.
    """

    number: int
    text: Text
    base: int
    choices: Choices
    found: Candidates
    latest: list[int]
    before: Anchor
    ended: set[int] = field(default_factory=set)
    sent: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    first: int = 0

    @staticmethod
    def begin(
        number: int, text: Text, topology: Topology, deferred: bool, greedy: bool, eos: Collection[int]
    ) -> Stream:
        """Return a text at the beginning of a round.

        Args:
            number, text: see above.
            topology: of the round.
            deferred: whether the roots are alternatives for the token to come (`Verification.deferred`).
            greedy: temperature 0.
            eos: ids that end the text: what is drawn so is not drafted from.
        """
        # A single root is the last token of the text; alternatives stand after the text.
        base = len(text.tokens) - (not deferred)
        found = Candidates.at(text.roots, topology)
        going = [place for place, root in enumerate(text.roots) if root not in eos]
        return Stream(number, text, base, text.choices(base, greedy), found, going, text.anchor)

    @property
    def slot(self) -> int:
        """Slots of the target's cache before the round's roots."""
        return self.base + self.text.shift

    def turn(self, places: Sequence[int]) -> Turn:
        """Return this stream's share of a call for `places`."""
        return Turn(self.found, places, self.choices)

    def prefixes(self, places: Sequence[int]) -> list[list[int] | None]:
        """Return the text up to and with each place; None where it has ended there, and nothing is drawn after it."""
        known = self.text.tokens[: self.base]
        return [None if place in self.ended else [*known, *self.found.tokens_to(place)] for place in places]

    def select(self, rows: Sequence[bool] | None) -> None:
        """Send the candidates at these rows of the topology, roots included; None = all."""
        found = self.found
        self.sent = list(range(len(found.rows)))
        if rows is not None:
            self.sent = [place for place in self.sent if rows[found.rows[place]]]

    @property
    def sends_path(self) -> bool:
        """Whether what is sent is a single path."""
        # Closed under parents and in order of depth: so few places are the last one and its ancestors, nothing else.
        return len(self.sent) == self.found.depth[self.sent[-1]] + 1


def sampled_rows(
    streams: Sequence[Stream], places: Sequence[Sequence[int]], raw: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return processed scores [R, V] of rows after places, and what they were before tokens were left out.

    Each stream's own processors see its own prefixes.
    """
    if len(streams) == 1:
        own, some, sampler = streams[0], places[0], streams[0].text.sampler
        return sampler(raw, lambda: own.prefixes(some)), sampler.untruncated
    if not any(own.text.sampler.reads_prefix for own in streams):
        return streams[0].text.sampler(raw, list), None  # the temperature alone, which all have in common
    out, before = [], []
    for own, some, rows in zip(streams, places, raw.split([len(some) for some in places]), strict=True):
        sampler = own.text.sampler
        out.append(sampler(rows, lambda own=own, some=some: own.prefixes(some)))  # type: ignore[misc]
        before.append(sampler.untruncated)
    if all(kept is None for kept in before):
        return torch.cat(out), None
    return torch.cat(out), torch.cat([rows if kept is None else kept for rows, kept in zip(out, before, strict=True)])


def without_dead_ends(
    streams: Sequence[Stream], raw: Tensor, sampled: Tensor
) -> tuple[Tensor, Callable[[Stream, int], None]]:
    """Return scores [R, V] with the raw ones in rows that no token is left in, and what refuses such a row once it is used.

    A candidate may lead to one under a grammar, which matters only if it is accepted.
    """
    if not any(own.text.sampler.constrained for own in streams):
        return sampled, lambda own, place: None
    usable = torch.where(sampled.amax(-1, keepdim=True) > -torch.inf, sampled, raw)
    return usable, lambda own, place: require_token(sampled[own.first + own.sent.index(place)])
