"""Rounds of a serving engine as rows of a trace: what its drafter drew, and what followed in the text.

An engine hands its drafter texts, not what was accepted. It trims drafts silently and commits tokens after a request's
end. So labels compare a draft with the tokens that follow it in the finished text. What the target thought (its
probabilities, the overlap) is not known and stays 0.
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
from ..live import Exploring
from ..schema import READS, TIMES
from ..work import Work

ANCHORS = ("anchor_token", "before_token")
"""ANCHOR features that need no row of the target's."""


def engine_features(temperature: float) -> tuple[str, ...]:
    """Return the features that an engine's drafter can record at each token: of sampled texts none that read noise."""
    return tuple(n for n in CHAIN_FEATURES if temperature == 0.0 or not n.startswith("noisy_"))


def explored_by(proposer: Proposer, rows: Array) -> Array:
    """Return [n] bool, whether the drafts of these rows go to full length whatever the policy says."""
    assert proposer.drafting is not None
    host = proposer.drafting.host
    if not isinstance(host.policy, Exploring):
        return np.zeros(len(rows), dtype=bool)
    explored: Array = host.policy.explores(host.state)[rows]
    return explored


@dataclass
class _Round:
    """A draft of a text, until the text is finished.

    Attributes:
        context: tokens of the text before it.
        before: the last two of them.
        tokens: [K] drawn; `features` [K, F]; `chance` [K], of the tokens drawn.
    """

    context: int
    before: tuple[int, int]
    tokens: Array
    features: Array
    chance: Array
    sent: EngineDraft
    explored: bool
    draft_s: float
    seconds: float = 0.0


@dataclass
class RecordedText:
    """A request and its rounds.

    Attributes:
        name: the engine's, where it is known.
        tokens: of the text as it was last seen, the prompt included.
        prompt: how many of them were there before the first one that the engine committed.
        rounds: in order.
        seen: number of the last step that drafted for it.
    """

    name: str | None
    tokens: list[int]
    prompt: int = 0
    rounds: list[_Round] = field(default_factory=list)
    seen: int = 0


class RoundRecorder:
    """Takes note of the drafts of all requests; see `decode.engines.drafting.EngineObserver`.

    Args:
        rows: requests that are drafted for at once.
        depth: K.
        temperature: of the sampling.
        explored: returns [n] bool for rows, whether their drafts of this step explore.
        keep: whether a text is recorded, by the number of texts before it.
    """

    def __init__(
        self,
        rows: int,
        depth: int,
        temperature: float,
        explored: Callable[[Array], Array],
        keep: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self.depth, self.temperature, self._explored, self._keep = depth, temperature, explored, keep
        self._columns = Columns(engine_features(temperature))
        self._plan = self._columns.needs | SAMPLED
        self._here: list[RecordedText | None] = [None] * rows
        self._ended: list[RecordedText] = []
        count = len(self._columns.names)
        self._tokens = np.zeros((rows, depth), dtype=np.int32)
        self._features = np.zeros((rows, depth, count), dtype=np.float32)
        self._chance, self._path = np.zeros((rows, depth), dtype=np.float32), np.zeros(rows)
        self._begun = self._step = 0

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """See `EngineObserver.on_begin`."""
        if (ended := self._here[row]) is not None:
            self._ended.append(ended)
        kept = self._keep(self._begun)
        # A text begins with the token that reading its prompt committed: all but the last one are the prompt.
        self._here[row] = RecordedText(name, text.tolist(), len(text) - 1, seen=self._step) if kept else None
        self._begun += 1

    def on_draft_step(self, depth: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """See `EngineObserver.on_draft_step`."""
        if depth == 1:
            self._tokens[rows], self._features[rows], self._chance[rows], self._path[rows] = 0, 0.0, 0.0, 0.0
        own = DrawnTokens(drawn.ids, self._path[rows])
        # Engines draft greedily: at temperature 0 the noisy features are those of the bare logits; above it there are none.
        summary = summarise(self._plan, logits, own, self.temperature, scores=logits)
        self._path[rows] = summary.path
        self._tokens[rows, depth - 1] = drawn.ids[:, 1]
        self._features[rows, depth - 1] = self._columns(summary, own, self.temperature)
        self._chance[rows, depth - 1] = np.exp(summary.numbers[:, 1])

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        self._step += 1
        explored = self._explored(np.array([sent.row for sent in drafts], dtype=np.int64))
        for sent, full in zip(drafts, explored.tolist(), strict=True):
            text = self._here[sent.row]
            if text is not None:
                text.seen = self._step
                row, before = sent.row, (text.tokens[-1], text.tokens[-2])
                drawn = (self._tokens[row], self._features[row], self._chance[row])
                # `level` clears only rows that draft: of one that drew nothing they hold an earlier draft.
                tokens, features, chance = (
                    values.copy() if sent.drafted else np.zeros_like(values) for values in drawn
                )
                text.rounds.append(_Round(sent.context, before, tokens, features, chance, sent, full, draft_s))

    def on_outcomes(self, drafts: Sequence[EngineDraft], step_s: Sequence[float]) -> None:
        """See `EngineObserver.on_outcomes`."""
        for one, seconds in zip(drafts, step_s, strict=True):
            text = self._here[one.row]
            if text is not None:
                del text.tokens[one.context :]
                text.tokens += one.new
                if text.rounds and text.rounds[-1].sent is one:
                    text.rounds[-1].seconds = seconds

    def take(self) -> list[RecordedText]:
        """Return the texts that have ended, and those still here as far as they are; the recorder forgets them all."""
        found = self._ended + [text for text in self._here if text is not None]
        self._ended, self._here = [], [None] * len(self._here)
        return found

    def take_ended(self, idle: int) -> list[RecordedText]:
        """Return the texts that have ended: others took their places, or more than `idle` steps have drafted without them.

        One of the latter may yet come back, after long preemption: then it goes on as another text.
        """
        found, self._ended = self._ended, []
        for row, text in enumerate(self._here):
            if text is not None and text.rounds and self._step - text.seen > idle:
                found.append(text)
                # A draft whose outcome is not known yet stays with the request.
                waiting = [one for one in text.rounds[-1:] if one.context == len(text.tokens)]
                self._here[row] = RecordedText(text.name, list(text.tokens), len(text.tokens) - 1, waiting, self._step)
        return found

    def rows(
        self,
        parts: Sequence[RecordedText],
        work: Work,
        generated: Sequence[int],
    ) -> Mapping[str, Any] | None:
        """Return the rows of a text, one a round; None where it had none.

        Args:
            parts: recorded of it: a request that was preempted for long may have come back as another text.
            work: the prompt.
            generated: all that was generated, as the engine gave it out.
        """
        whole, before = [*work.tokens, *generated], len(work.tokens)
        rounds = [one for part in parts for one in part.rounds if one.context < len(whole)]  # not past the end
        rounds.sort(key=lambda one: one.context)
        if not rounds:
            return None
        ends = [one.context for one in rounds[1:]] + [len(whole)]
        node, count = np.arange(self.depth), len(rounds)
        drafted, sent = (np.array(n) for n in zip(*((r.sent.drafted, len(r.sent.tokens)) for r in rounds), strict=True))
        tokens = np.stack([one.tokens for one in rounds])
        follows = np.full(tokens.shape, -1, dtype=np.int64)
        for at, one in enumerate(rounds):
            after = whole[one.context : one.context + self.depth]
            follows[at, : len(after)] = after
        drawn = node < drafted[:, None]
        accepted = ((tokens == follows) & drawn).cumprod(1).astype(bool)
        labelled = drawn & (follows >= 0) & (node <= accepted.sum(1, keepdims=True))
        zeros, features = np.zeros(tokens.shape, dtype=np.float32), np.stack([one.features for one in rounds])
        columns = work.columns(count, len(generated)) | {
            "anchor": np.array([one.context - before for one in rounds]),
            "tokens": tokens,
            "draft_prob": np.stack([one.chance for one in rounds]),
            "target_prob": zeros,
            "overlap": zeros,
            "accepted": accepted,
            "labelled": labelled,
            "accepted_length": accepted.sum(1),
            "cut": np.array([end == len(whole) or one.sent.hit_limit for one, end in zip(rounds, ends, strict=True)]),
            "drawn": drawn,
            "sent": node < sent[:, None],
            "explored": np.array([one.explored for one in rounds]),
            "committed": np.array([end - one.context for one, end in zip(rounds, ends, strict=True)]),
            "decisions": np.array([one.sent.decisions for one in rounds]),
            "backlog": np.array([one.sent.backlog for one in rounds]),
            READS: np.ones(count, dtype=bool),  # an engine's drafter does not tell
        }
        columns |= dict(zip(ANCHORS, np.array([one.before for one in rounds], dtype=np.float32).T, strict=True))
        columns |= {name: features[:, :, at] for at, name in enumerate(self._columns.names)}
        draft_s, seconds = (np.array(v) for v in zip(*((r.draft_s, r.seconds) for r in rounds), strict=True))
        spent = (np.zeros(count), draft_s, np.maximum(seconds - draft_s, 0.0), np.zeros(count), seconds)
        return columns | dict(zip(TIMES, spent, strict=True))
