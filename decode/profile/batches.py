"""What rounds of a batch cost: texts decoded side by side through the loop itself, driven by a script.

A draft step costs by the streams that draft, a verification by the streams and the tokens of all of them. In each scripted
round some of the streams draft, all of these equally deep, so that each step of it is one of so many streams; which ones it
is goes around.

A verification takes the longer, the longer the rounds before it took, as caches keep less of the target (`carry_over`).
So rounds come in the order of what they cost, up and down, each among its like, as a policy that drafts so much meets it.
In shuffled order a batch of four took 9% longer for one draft a text than under a policy that drafts one throughout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ...policies.contract import Array, DraftStep, State
from ...policies.fixed import FixedLength
from ...policies.latency.estimate import (
    BATCH_DRAFTS,
    BATCH_FIRST,
    BATCH_OUTSIDE,
    BATCH_PLAIN,
    BATCH_PLAIN_OUTSIDE,
    BATCH_VERIFY,
    CONTEXTS,
)
from ...policies.latency.measurements import Key
from ..loop import Request, Speculator
from ..models.pair import Pair
from ..records import Generation, Round
from ..settings import Settings
from .script import Script, card_at, streams_of_script

LENGTHS = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32)
"""Depths that rounds of a batch are drafted to, as far as the profile goes, and its last one."""

SETTLING = 4
"""Rounds after the prompts whose verifications are not timed: reading these empties the caches, and the first one took half
as long again as the tenth."""


class BatchScript(Script):
    """Has some streams draft, all equally deep, up and down an ordered deck, each card twice, whatever the texts are.

    Keys and numbers of rounds are the same for all streams that began together.
    """

    def __init__(self, streams: int, depth: int) -> None:
        self.max_depth, self._streams = depth, streams
        self.name = f"batch-script:{streams}"
        # 1, 2, 4, ... streams and all of them: between these costs are taken to be linear.
        some = sorted({*(2**k for k in range((streams - 1).bit_length())), streams})
        lengths = range(1, depth + 1) if streams == 1 else sorted({*(n for n in LENGTHS if n < depth), depth})
        # (streams that draft, how deep), by the tokens drafted in all
        self.deck = sorted([(0, 0), *((r, length) for r in some for length in lengths)], key=lambda c: (c[0] * c[1], c))

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep up to the length on the card, in the streams whose turn it is."""
        lengths = np.zeros(len(step.alive), dtype=np.int64)
        for stream, (key, number) in enumerate(streams_of_script(state)):
            some, length = self.deck[card_at(len(self.deck), key, number)]
            lengths[stream] = length * ((stream - number) % self._streams < some)  # moves on by a stream each round
        return step.alive & (step.depth < lengths)[:, None], state


class BatchRun:
    """Texts that are decoded side by side to time the parts of their rounds, scripted and plain.

    Args:
        pair: on its device.
        streams: side by side.
        settings: as of the texts decoded alone.
    """

    def __init__(self, pair: Pair, streams: int, settings: Settings) -> None:
        self.streams = streams
        self._script = Speculator(pair, BatchScript(streams, settings.max_depth), settings, batch=streams)
        self._plain = Speculator(pair, FixedLength(0), settings, batch=streams)

    def play(
        self, number: int, texts: Sequence[Sequence[list[int]]]
    ) -> tuple[dict[Key, list[float]], list[list[float]]]:
        """Decode all texts of each context and return the timings, and the mean context of each round by side.

        Args:
            number: of the repetition.
            texts: by context, as many prompts as streams.
        """
        timed: dict[Key, list[float]] = defaultdict(list)
        contexts: list[list[float]] = []
        for side, prompts in zip(CONTEXTS, texts, strict=True):
            requests = [Request(prompt, number) for prompt in prompts]
            rounds, plain = whole_rounds(self._script.run(requests)), whole_rounds(self._plain.run(requests))
            for at, parts in enumerate(rounds):
                _add_round(timed, side, parts, settled=at >= _settling(rounds))
            for parts in plain[_settling(plain) :]:
                timed[Key(BATCH_PLAIN, side, (self.streams,))].append(sum(r.verify_s for r in parts))
                timed[Key(BATCH_PLAIN_OUTSIDE, side, (self.streams,))].append(sum(r.outside_s for r in parts))
            contexts.append([sum(r.context for r in parts) / len(parts) for parts in rounds])
        return timed, contexts


def whole_rounds(texts: Sequence[Generation]) -> list[list[Round]]:
    """Return the rounds of texts that began together, as long as none of them has ended."""
    rounds = [list(parts) for parts in zip(*(text.rounds for text in texts), strict=False)]  # to the shortest
    return [parts for parts in rounds if not any(r.cut for r in parts)]


def _settling(rounds: Sequence[object]) -> int:
    """Return how many rounds are too early for their verification to be timed; of few rounds a quarter."""
    return min(SETTLING, len(rounds) // 4)


def _add_round(timed: dict[Key, list[float]], side: str, parts: Sequence[Round], settled: bool) -> None:
    """Add the timings of one round; each stream's record bears its share of them."""
    streams, sent = len(parts), len(parts) + sum(r.verified for r in parts)
    if settled:
        timed[Key(BATCH_VERIFY, side, (streams, sent))].append(sum(r.verify_s for r in parts))
    timed[Key(BATCH_OUTSIDE, side, (streams, sent - streams))].append(sum(r.outside_s for r in parts))
    drafting = [r for r in parts if r.drafted]
    if drafting:
        # A draft that begins a text reads it in a call of its own: with others beside it several calls are timed as one.
        if len(drafting) == 1 or not any(r.backlog == r.context for r in drafting):
            read = sum(max(r.backlog, 1) for r in drafting)
            timed[Key(BATCH_FIRST, side, (len(drafting), read))].append(sum(r.first_draft_s for r in parts))
        # Steps are timed together, and tell the price of so many streams only if all went equally deep.
        if (steps := drafting[0].drafted - 1) and all(r.drafted == drafting[0].drafted for r in drafting):
            timed[Key(BATCH_DRAFTS, side, (len(drafting), steps))].append(sum(r.draft_s for r in parts))
