"""The dense collector of any drafter: runs the loop so that it drafts the whole tree at each position and verifies nothing.

Under `match` the text does not depend on what is drafted, so a run that verifies no candidate commits one token per round.
The target's pass over the text labels every node: a node on the text is accepted, and the target's row after it is that of
the round at which the text has reached it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..decode.drafters import find_drafters
from ..decode.models.pair import Pair
from ..decode.round_state import RoundState
from ..decode.settings import Settings
from ..decode.verify.modes import Match
from ..policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from ..policies.features import ANCHOR_FEATURES, SIGNALS
from .live import LiveCollector, Recorder, Row
from .schema import NO_TOKEN, PromptTask
from .shards import BATCH


class _DraftsOnly(StopPolicy):
    """Drafts the whole tree with every drafter, and sends nothing to the target."""

    name, routes = "drafts-only", True

    def __init__(self, depth: int, features: Sequence[str]) -> None:
        self.max_depth, self.first, self.features = depth, 0, tuple(features)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Extend every branch."""
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        """Select nothing."""
        return np.zeros_like(tree.drawn)


class _PositionsRecorder(Recorder):
    """Keeps each round until the text has passed its tree, and then records the candidates on the text as accepted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: dict[int, list[tuple[RoundState, Tensor]]] = defaultdict(list)

    def on_round_end(self, round: RoundState) -> None:
        """Keep the round, and record the earlier one if the target has now passed its tree."""
        for at, (stream, _) in enumerate(round.target_rows):  # one row per stream, as nothing is sent
            waiting = self._waiting[stream]
            waiting.append((round, round.target_sampled[at : at + 1]))
            if len(waiting) > self.tree.deepest:
                self._record_first(stream, waiting)

    def end(self, stream: int) -> list[Row]:
        """Return the rows of a stream after the end of its text, and forget them."""
        waiting = self._waiting.pop(stream, [])
        while waiting:
            self._record_first(stream, waiting)
        return super().end(stream)

    def _record_first(self, stream: int, waiting: list[tuple[RoundState, Tensor]]) -> None:
        """Record the first waiting round as if its candidates on the text had been sent and accepted."""
        round = waiting[0][0]
        text = round.texts[stream]
        assert text is not None
        path, level = [0], [0]  # the candidates on the text; one path for each drafter
        for token in text.tokens[round.records[stream].context :][: len(waiting) - 1]:
            children = [child for row in level for child in round.drawn_below(stream, row)]
            level = [child for child in children if round.tokens[stream, child] == token]
            path += level
        # A round commits one token. So the target's row after the k-th token of a path is that of the round k later.
        sampled = torch.cat([waiting[self.tree.depth[row]][1] for row in path])
        self.rows[stream].append(self.row(round, stream, path, path, sampled))
        del waiting[0]


class PositionsCollector(LiveCollector):
    """Collects a dense trace with the drafter of a pair.

    Args:
        pair: target with its drafters.
        settings: temperature, limit, tree; the verification is `match`.
        hidden: hidden states to record (`features.hidden_states`).
        memory_bytes: budget for the scores of rounds that wait, which limits the texts that are decoded side by side.

    Attributes:
        batch: number of texts that are decoded side by side.
    """

    recorder = _PositionsRecorder

    def __init__(self, pair: Pair, settings: Settings, hidden: Sequence[str] = (), memory_bytes: int = 1 << 28) -> None:
        tree, drafters = settings.topology, find_drafters(pair.drafter, pair)
        self._limit, self._eos, self._depth = settings.max_new_tokens, pair.eos, tree.deepest
        drawn = 1
        if settings.temperature > 0:  # also the scores with noise; with filters those before and after them
            drawn = 4 if settings.sampling.to_dict() else 2
        # A text keeps K + 1 rounds: rows of the nodes with children, and the raw and processed row of the target.
        rows = (tree.deepest + 1) * (sum(map(bool, tree.children)) * drawn + 2)
        text_bytes = rows * pair.vocabulary * torch.finfo(pair.logits_dtype).bits // 8
        # A drafter that drafts from earlier texts needs them in their order, one after the other.
        carries = any(drafter.carries for drafter in drafters)
        self.batch = 1 if carries else max(1, min(BATCH, memory_bytes // text_bytes))
        # K + 1 tokens past the limit, so that the tree of no anchor before the limit is cut by it.
        longer = replace(settings, max_new_tokens=self._limit + self._depth + 1, verification=Match.name)
        policy = _DraftsOnly(tree.deepest, SIGNALS if any(drafter.has_signals for drafter in drafters) else ())
        super().__init__(pair, policy, longer, hidden=hidden, batch=self.batch, drafters=drafters)
        self._names = (
            *self.features, *ANCHOR_FEATURES, *self.widths, "draft_prob", "target_prob", "overlap", "accepted", "observed",
            "accepted_length", "anchor", *self.signals,
        )  # fmt: skip

    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text."""
        chunks: list[Mapping[str, Any]] = []
        for one, text, all_rows in self.texts(batch):
            length = min(len(text.tokens), self._limit)
            rows = [row for row in all_rows if row["anchor"] < length]
            if not rows:
                continue
            columns = one.columns(len(rows), length)
            columns |= {name: np.stack([row[name] for row in rows]) for name in self._names}
            tokens, drawn = (np.stack([row[name] for row in rows]) for name in ("tokens", "drawn"))
            # Everything is drafted: nodes without a token were filtered out, or EOS ended the branch.
            columns["tokens"] = np.where(drawn, tokens, NO_TOKEN)
            ended = text.tokens[-1] in self._eos
            columns["cut"] = (columns["anchor"] + self._depth > len(text.tokens)) & ended
            chunks.append(columns)
        return chunks
