"""The dense collector for any drafter: at every position of the target's text the loop drafts and sends nothing.

Under `match` the text does not depend on what is drafted, so a run that verifies no candidate commits one token a round and
drafts the whole tree at each. The target's pass over the text, which it takes anyway, labels every node: a node on the text
is accepted, and the target's row after it is that of the round in which the text has got there.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...decode.drafters import find_drafter
from ...decode.drafters.spec import parse_spec
from ...decode.loop import Request, Speculator
from ...decode.models.outputs import hidden_widths
from ...decode.models.pair import Pair
from ...decode.records import Generation
from ...decode.round_state import RoundState
from ...decode.settings import Settings
from ...policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from ...policies.features import ANCHOR_FEATURES, check_hidden
from ..live import Recorder, Row
from ..schema import NO_TOKEN, READS, PromptTask
from ..shards import BATCH
from .unroll import node_features


class _DraftsOnly(StopPolicy):
    """Drafts as far as the tree goes and sends nothing to the target."""

    name = "drafts-only"

    def __init__(self, depth: int) -> None:
        self.max_depth = depth

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Go on with every branch."""
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        """Select nothing."""
        return np.zeros_like(tree.drawn)


class _Positions(Recorder):
    """A recorder that waits with each round until its text has gone past its tree; of several texts side by side."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._waiting: dict[int, list[tuple[RoundState, Tensor]]] = defaultdict(list)

    def on_round_end(self, round: RoundState) -> None:
        """Keep the round, and record the earlier one whose tree the target has now read past."""
        for at, (stream, _) in enumerate(round.target_rows):  # of each stream one row, as nothing is sent
            waiting = self._waiting[stream]
            waiting.append((round, round.target_sampled[at : at + 1]))
            if len(waiting) > self.tree.deepest:
                self._record(stream, waiting)

    def end(self, stream: int) -> list[Row]:
        """Return the rows of a text that has ended."""
        waiting = self._waiting.pop(stream, [])
        while waiting:
            self._record(stream, waiting)
        return self.rows.pop(stream, [])

    def _record(self, stream: int, waiting: list[tuple[RoundState, Tensor]]) -> None:
        """Record the first round that waits as if its candidates on the text had been sent and accepted."""
        round = waiting[0][0]
        text = round.texts[stream]
        assert text is not None
        path = _on_text(round, stream, text.tokens[round.records[stream].context :], len(waiting))
        # A round commits one token. So the target's row after the k-th token of the path is that of the round k later,
        # whose anchor that token is.
        sampled = torch.cat([scores for _, scores in waiting[: len(path)]])
        self.rows[stream].append(self.row(round, stream, path, path, sampled))
        del waiting[0]


def _on_text(round: RoundState, stream: int, text: Sequence[int], most: int) -> list[int]:
    """Return the rows that the text goes through, `most` at most: the anchor, then candidates equal to its tokens."""
    path = [0]
    for token in text:
        children = round.drawn_below(stream, path[-1])
        below = next((row for row in children if round.tokens[stream, row] == token), None)
        if below is None or len(path) == most:
            break
        path.append(below)
    return path


def _waiting_bytes(pair: Pair, settings: Settings) -> int:
    """Return the bytes of the scores that a text holds while its rounds wait."""
    tree, drawn = settings.topology, 1
    if settings.temperature > 0:  # with noise; with filters also what they are added to, before and after
        drawn = 4 if settings.shaping.to_dict() else 2
    rows = sum(map(bool, tree.children)) * drawn + 2  # the target's own row, and the processed one
    return (tree.deepest + 1) * rows * pair.vocabulary * torch.finfo(pair.logits_dtype).bits // 8


class PositionsCollector:
    """Makes the rows of a dense trace with the pair's drafter.

    Args:
        pair: whose drafter it is.
        settings: temperature, limit, tree.
        hidden: hidden states to record (`features.hidden_states`).
        memory_bytes: budget for the scores of rounds that wait: as many texts are decoded side by side as it holds.

    Attributes:
        batch: texts that are decoded side by side.
    """

    def __init__(self, pair: Pair, settings: Settings, hidden: Sequence[str] = (), memory_bytes: int = 1 << 28) -> None:
        tree = settings.topology
        drafter = find_drafter(pair.drafter, pair)
        widths = hidden_widths(pair, check_hidden(hidden), drafter)
        self.features, self._limit, self._eos = node_features(tree), settings.max_new_tokens, pair.eos
        self._depth, self._hidden = tree.deepest, tuple(widths)
        self._in_turn = (READS,) if len(parse_spec(pair.drafter)) > 1 else ()
        self._recorder = _Positions(tree, self.features, settings.temperature, True, widths)
        # Past the limit by more than K tokens, so that the tree of no anchor before the limit is cut by it.
        longer = dataclasses.replace(settings, max_new_tokens=self._limit + self._depth + 1)
        # One that drafts from earlier texts finds them in their order only when they are decoded one after the other.
        self.batch = 1 if drafter.carries else max(1, min(BATCH, memory_bytes // _waiting_bytes(pair, settings)))
        self._speculator = Speculator(
            pair, _DraftsOnly(tree.deepest), longer, drafter=drafter, hooks=[self._recorder], hidden=tuple(widths),
            batch=self.batch,
        )  # fmt: skip

    def begin(self) -> None:
        """Begin a shard: a drafter that keeps texts starts anew, so that a shard's rows depend on it alone."""
        self._speculator.reset()

    @property
    def carries(self) -> bool:
        """See `Speculator.carries`."""
        return self._speculator.carries

    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text; see `collector.dense_rows`."""
        made: dict[int, list[Row]] = {}

        def end(number: int, text: Generation, stream: int) -> None:
            made[number] = self._recorder.end(stream)

        texts = self._speculator.run([Request(one.tokens, one.key) for one in batch], on_end=end)
        chunks = []
        for number, one in enumerate(batch):
            last = min(len(texts[number].tokens), self._limit)
            rows = [row for row in made[number] if row["anchor"] < last]
            if rows:
                chunks.append(self._columns(one, rows, texts[number], last))
        return chunks

    def _columns(self, one: PromptTask, rows: Sequence[Row], text: Generation, last: int) -> Mapping[str, Any]:
        names = (
            *self.features, *ANCHOR_FEATURES, *self._hidden, "draft_prob", "target_prob", "overlap", "accepted",
            "observed", "accepted_length", "anchor", *self._in_turn,
        )  # fmt: skip
        columns = one.columns(len(rows), last) | {key: np.stack([row[key] for row in rows]) for key in names}
        tokens, drawn = (np.stack([row[key] for row in rows]) for key in ("tokens", "drawn"))
        # All is to be drafted: where nothing was drawn there is no token to draw, or EOS has ended the branch.
        columns["tokens"] = np.where(drawn, tokens, NO_TOKEN)
        ended = text.tokens[-1] in self._eos
        columns["cut"] = (columns["anchor"] + self._depth > len(text.tokens)) & ended
        return columns
