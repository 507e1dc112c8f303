"""Records the rounds of an engine's requests as rows of a live trace.

An engine passes texts to its drafter, not what was accepted. It trims drafts silently and commits tokens after a request's
end. So labels compare a draft with the tokens that follow it in the finished text. What depends on the target's logits
(probabilities, the overlap) is not known and stays 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ...decode.engines.drafting import EngineDraft
from ...decode.engines.vllm import Proposer
from ...decode.summaries import summarise
from ...policies.contract import Array
from ...policies.features import CHAIN_FEATURES, SAMPLED, Columns, DrawnTokens
from ..exploring import Exploring
from ..schema import READS, TIMES, PromptTask

ANCHORS = ("anchor_token", "before_token")
"""ANCHOR features that need no row of the target's."""


def engine_features(temperature: float) -> tuple[str, ...]:
    """Return the features that an engine's drafter can record at each token; for sampled texts none that read noise."""
    return tuple(name for name in CHAIN_FEATURES if temperature == 0.0 or not name.startswith("noisy_"))


def engine_header(temperature: float, policy: str, explore: float) -> dict[str, Any]:
    """Return the fields of the header that describe rounds in an engine: how they are drafted, labelled and recorded."""
    mode = "match" if temperature == 0.0 else "point"
    return {
        "collector": "live", "policy": policy, "explore": explore, "verification": mode, "label": mode,
        "features": engine_features(temperature), "anchor_features": ANCHORS,
    }  # fmt: skip


def explored_by(proposer: Proposer, rows: Array) -> Array:
    """Return [n] bool, whether the drafts of these rows have full length whatever the policy decides."""
    assert proposer.drafting is not None
    host = proposer.drafting.host
    if not isinstance(host.policy, Exploring):
        return np.zeros(len(rows), dtype=bool)
    explored: Array = host.policy.explores(host.state)[rows]
    return explored


@dataclass
class _Round:
    """A draft after `context` tokens of a text, the last two of which are `before`; [K] tokens, features and q of each."""

    context: int
    before: tuple[int, int]
    tokens: Array
    features: Array
    draft_prob: Array
    sent: EngineDraft
    explored: bool
    draft_s: float
    seconds: float = 0.0


@dataclass
class RecordedText:
    """A request and its rounds.

    Attributes:
        name: the engine's, if it is known.
        tokens: latest text, including the prompt.
        prompt: number of tokens before the first one that the engine committed.
        rounds: in order.
    """

    name: str | None
    tokens: list[int]
    prompt: int = 0
    rounds: list[_Round] = field(default_factory=list)


class RoundRecorder:
    """Records the drafts of all requests; see `decode.engines.drafting.EngineObserver`.

    Args:
        rows: maximum number of requests with drafts.
        depth: K.
        temperature: of the sampling.
        explored: returns [n] bool for rows, whether their drafts of this step explore.
    """

    def __init__(self, rows: int, depth: int, temperature: float, explored: Callable[[Array], Array]) -> None:
        self.depth, self.temperature, self._explored = depth, temperature, explored
        self._columns = Columns(engine_features(temperature))
        self._texts: list[RecordedText | None] = [None] * rows
        self._ended: list[RecordedText] = []
        self._tokens, self._path = np.zeros((rows, depth), dtype=np.int32), np.zeros(rows)
        self._features = np.zeros((rows, depth, len(self._columns.names)), dtype=np.float32)
        self._draft_prob = np.zeros((rows, depth), dtype=np.float32)

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """See `EngineObserver.on_begin`."""
        if (ended := self._texts[row]) is not None:
            self._ended.append(ended)
        # A text begins with the token that reading its prompt committed: all but the last one are the prompt.
        self._texts[row] = RecordedText(name, text.tolist(), len(text) - 1)

    def on_draft_step(self, depth: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """See `EngineObserver.on_draft_step`."""
        if depth == 1:
            for values in (self._tokens, self._features, self._draft_prob, self._path):
                values[rows] = 0
        drawn = DrawnTokens(drawn.ids, self._path[rows])
        # Engines draft greedily: at temperature 0 the noisy features are those of the logits; above it there are none.
        summary = summarise(self._columns.needs | SAMPLED, logits, drawn, self.temperature, scores=logits)
        self._path[rows] = summary.path
        self._tokens[rows, depth - 1] = drawn.ids[:, 1]
        self._features[rows, depth - 1] = self._columns(summary, drawn, self.temperature)
        self._draft_prob[rows, depth - 1] = np.exp(summary.numbers[:, 1])

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        explored = self._explored(np.array([draft.row for draft in drafts], dtype=np.int64))
        for draft, full in zip(drafts, explored.tolist(), strict=True):
            text = self._texts[draft.row]
            if text is None:
                continue
            before = text.tokens[-1], text.tokens[-2]
            # The arrays of a row without a new draft hold an earlier one.
            tokens, features, draft_prob = (
                values[draft.row].copy() if draft.drafted else np.zeros_like(values[draft.row])
                for values in (self._tokens, self._features, self._draft_prob)
            )
            text.rounds.append(_Round(draft.context, before, tokens, features, draft_prob, draft, full, draft_s))

    def on_outcomes(self, drafts: Sequence[EngineDraft], step_s: Sequence[float]) -> None:
        """See `EngineObserver.on_outcomes`."""
        for draft, seconds in zip(drafts, step_s, strict=True):
            text = self._texts[draft.row]
            if text is not None:
                text.tokens[draft.context :] = draft.new
                if text.rounds and text.rounds[-1].sent is draft:
                    text.rounds[-1].seconds = seconds

    def take(self) -> list[RecordedText]:
        """Return and forget all texts, also those that have not ended."""
        texts = self._ended + [text for text in self._texts if text is not None]
        self._ended, self._texts = [], [None] * len(self._texts)
        return texts

    def rows(
        self, parts: Sequence[RecordedText], task: PromptTask, generated: Sequence[int]
    ) -> Mapping[str, Any] | None:
        """Return the rows of a text, one per round; None without rounds.

        Args:
            parts: its records: a request may continue as another text after preemption.
            task: the prompt.
            generated: everything that the engine returned for it.
        """
        tokens = [*task.tokens, *generated]
        rounds = [one for part in parts for one in part.rounds if one.context < len(tokens)]
        rounds.sort(key=lambda one: one.context)
        if not rounds:
            return None

        def column(value: Callable[[_Round], Any], dtype: Any = None) -> Array:
            return np.array([value(one) for one in rounds], dtype=dtype)

        context, ids = column(lambda one: one.context), column(lambda one: one.tokens)
        end, node, count = np.append(context[1:], len(tokens)), np.arange(self.depth), len(rounds)
        follows = np.array([*tokens, *[-1] * self.depth])[context[:, None] + node]  # [rounds, K], -1 after the end
        drawn = node < column(lambda one: one.sent.drafted)[:, None]
        accepted = ((ids == follows) & drawn).cumprod(1).astype(bool)
        features, zeros = column(lambda one: one.features), np.zeros(ids.shape, dtype=np.float32)
        draft_s, seconds = column(lambda one: one.draft_s), column(lambda one: one.seconds)
        spent = (np.zeros(count), draft_s, np.maximum(seconds - draft_s, 0.0), np.zeros(count), seconds)
        return task.columns(count, len(generated)) | {
            "anchor": context - len(task.tokens),
            "tokens": ids,
            "draft_prob": column(lambda one: one.draft_prob),
            "target_prob": zeros,
            "overlap": zeros,
            "accepted": accepted,
            "observed": drawn & (follows >= 0) & (node <= accepted.sum(1, keepdims=True)),
            "accepted_length": accepted.sum(1),
            "cut": (end == len(tokens)) | column(lambda one: one.sent.hit_limit),
            "drawn": drawn,
            "sent": node < column(lambda one: len(one.sent.tokens))[:, None],
            "explored": column(lambda one: one.explored),
            "committed": end - context,
            "decisions": column(lambda one: one.sent.decisions),
            "backlog": column(lambda one: one.sent.backlog),
            READS: np.ones(count, dtype=bool),  # an engine does not say which drafter drafted
            **dict(zip(ANCHORS, column(lambda one: one.before, np.float32).T, strict=True)),
            **{name: features[:, :, at] for at, name in enumerate(self._columns.names)},
            **dict(zip(TIMES, spent, strict=True)),
        }
