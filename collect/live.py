"""The live collector: records the rounds of the running loop under any policy, verification and tree, with real timings."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..decode.drafters import Drafter, find_drafters
from ..decode.hooks import Hook
from ..decode.loop import Request, Speculator
from ..decode.models.outputs import check_rows, hidden_widths, stored
from ..decode.models.pair import Pair
from ..decode.records import Generation
from ..decode.round_state import RoundState
from ..decode.settings import Settings
from ..decode.summaries import summarise, truncation_lead
from ..decode.topology import Topology, with_drafters
from ..decode.verify.conditions import warn_if_unmeasured
from ..decode.verify.modes import Match, find_mode, resolve_mode
from ..policies.arguments import check_limits
from ..policies.contract import StopPolicy
from ..policies.features import (
    ANCHOR_FEATURES,
    DRAFT_HIDDEN,
    SAMPLED,
    SIGNALS,
    TARGET_HIDDEN,
    Columns,
    base_features,
    check_hidden,
)
from ..policies.host import with_costs
from ..policies.profile import Profile
from .dense import anchor_columns, node_features
from .exploring import Exploring, ExploringState, exploring
from .schema import NO_TOKEN, TIMES, PromptTask

Row = dict[str, Any]
"""The row of a round, by column."""


class Recorder(Hook):
    """Turns rounds into rows of a trace.

    Args:
        tree: of the trace; rounds draft a part of it.
        features: names recorded at each drawn candidate.
        temperature: of the sampling.
        match: whether labels compare with the target's own tokens.
        widths: H of each hidden state that is recorded.
        policy: of the rounds; None = unknown.

    Attributes:
        signals: names of the ROUTE features that are recorded: those that the policy reads.
        rows: by stream, those of its text so far.
    """

    def __init__(
        self, tree: Topology, features: Sequence[str], temperature: float, match: bool,
        widths: Mapping[str, int], policy: StopPolicy | None = None,
    ) -> None:  # fmt: skip
        self.tree, self.features, self.temperature, self.match = tree, tuple(features), temperature, match
        self._columns, self._widths = Columns(features), dict(widths)
        self._policy = policy if isinstance(policy, Exploring) else None
        self.signals = tuple(name for name in base_features(policy.features if policy else ()) if name in SIGNALS)
        self.rows: dict[int, list[Row]] = defaultdict(list)

    def on_round_end(self, round: RoundState) -> None:
        """Append the row of each stream's round."""
        parts = round.target_sampled.split([len(sent) for _, sent in round.target_rows])
        for (stream, sent), sampled in zip(round.target_rows, parts, strict=True):
            self.rows[stream].append(self.row(round, stream, sent, round.path(stream), sampled))

    def end(self, stream: int) -> list[Row]:
        """Return the rows of a stream after the end of its text, and forget them."""
        return self.rows.pop(stream, [])

    def row(self, round: RoundState, stream: int, sent: Sequence[int], path: Sequence[int], sampled: Tensor) -> Row:
        """Return the row of a round.

        Args:
            round: finished.
            stream: of the round.
            sent: rows of the topology that the target has read, the anchor first.
            path: the accepted ones of these.
            sampled: [len(sent), V] processed scores of the target.
        """
        record, anchor, text, nodes = round.records[stream], round.anchors[stream], round.texts[stream], self.tree.nodes
        assert anchor is not None and text is not None
        names = (*self.features, "draft_prob", "target_prob", "overlap")
        row: Row = {name: np.zeros(nodes, dtype=np.float32) for name in names}
        row |= {name: np.zeros(nodes, dtype=bool) for name in ("accepted", "observed", "drawn", "sent")}
        row["tokens"] = np.zeros(nodes, dtype=np.int32)
        drawn, count = round.drawn[stream, 1:], round.topology.nodes  # the first nodes of the trace's tree
        row["drawn"][:count] = drawn
        row["tokens"][:count] = np.where(drawn, round.tokens[stream, 1:], 0)
        parents, owner = round.topology.parents[1:], round.topology.drafter_of[1:]
        has_been_fed = round.fed[stream, parents] & ((parents > 0) | round.drafting[stream, owner])
        row["tokens"][:count][~drawn & has_been_fed] = NO_TOKEN  # the drafter or a filter left none
        row["sent"][[at - 1 for at in sent[1:]]] = True
        if DRAFT_HIDDEN in self._widths:
            row[DRAFT_HIDDEN] = np.zeros((nodes, self._widths[DRAFT_HIDDEN]), dtype=np.float16)
        if TARGET_HIDDEN in self._widths:
            assert anchor.hidden is not None
            row[TARGET_HIDDEN] = stored(anchor.hidden[0]).cpu().numpy()
        self._label(row, round, stream, path, text.tokens)
        self._measure(row, round, stream, sent, sampled)
        before, last = text.tokens[record.context - 2 : record.context]  # the anchor is the last committed token
        row |= zip(ANCHOR_FEATURES, anchor_columns(anchor.row, [last], [before])[0].tolist(), strict=True)
        row |= {name: getattr(record, name) for name in ("anchor", "cut", "committed", "decisions", "backlog", *TIMES)}
        none = np.zeros(self.tree.drafters, dtype=np.float32)  # the policy was not called
        values = {
            n: none if round.signals is None else round.signals[stream, :, SIGNALS.index(n)] for n in self.signals
        }
        row |= values
        state, explored = round.policy_state, False
        if self._policy is not None and isinstance(state, ExploringState):  # not the state of the fallback
            # The state after the round has the number of the next one.
            explored = bool(self._policy.explores(dataclasses.replace(state, number=state.number - 1))[stream])
        deepest = int((row["accepted"] * self.tree.depths[1:]).max(initial=0))
        return row | {"accepted_length": deepest, "explored": explored}

    def _label(self, row: Row, round: RoundState, stream: int, path: Sequence[int], text: Sequence[int]) -> None:
        """Label the candidates below the accepted path: whether the target accepts them.

        Under match, `path` may have the rows of several paths that are on the text.
        """
        start, chosen = round.records[stream].context, dict(pairwise(path))
        for parent in path:
            at = start + self.tree.depth[parent]
            for child in round.drawn_below(stream, parent):
                if self.match:  # the text decides, also about tokens that were not sent
                    if at < len(text):
                        row["observed"][child - 1] = True
                        row["accepted"][child - 1] = round.tokens[stream, child] == text[at]
                elif row["sent"][child - 1]:  # otherwise only candidates that were sent and tried have an outcome
                    row["accepted"][child - 1] = child == chosen.get(parent)
                    row["observed"][child - 1] = child <= chosen.get(parent, child)  # later siblings are not tried

    def _measure(self, row: Row, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> None:
        """Fill in features and probabilities of the drawn candidates."""
        index, parent = {at: i for i, at in enumerate(sent)}, round.topology.parent
        path: dict[int, float] = {}
        for level in chain.from_iterable(round.levels):
            scores = level.part(stream)
            if scores is None or not any(scores.counts):
                continue
            check_rows(scores.raw, "draft")
            drawn, _, rows = round.drawn_tokens(scores)
            drawn.parent_path = np.array([path.get(parent[at], 0.0) for at in rows])  # 0 below the anchor
            needs = self._columns.needs | SAMPLED
            drawn.lead = truncation_lead(scores.untruncated, scores.sampled, drawn) if needs.noisy else None
            summary = summarise(needs, scores.raw, drawn, self.temperature, scores.sampled, scores.scores, scores.best)
            path |= zip(rows, summary.path.tolist(), strict=True)
            nodes = np.array(rows) - 1
            for name, values in zip(self.features, self._columns(summary, drawn, self.temperature).T, strict=True):
                row[name][nodes] = values
            row["draft_prob"][nodes] = np.exp(summary.numbers[:, 1])
            ids = torch.from_numpy(drawn.ids).to(scores.raw.device)
            owner, tokens = ids[:, 0], ids[:, 1]
            if DRAFT_HIDDEN in self._widths:
                assert scores.states is not None
                row[DRAFT_HIDDEN][nodes] = stored(scores.states[owner]).cpu().numpy()
            read = [i for i, at in enumerate(rows) if parent[at] in index]  # the target has read what they follow
            if not read:
                continue
            p = torch.softmax(sampled[[index[parent[rows[i]]] for i in read]], -1)
            weights = scores.raw / (self.temperature or 1.0) if scores.sampled is None else scores.sampled
            q = torch.softmax(weights[owner[read]], -1)
            nodes = nodes[read]
            # As in dense traces, p has no meaning under match where there is no label.
            usable = row["observed"][nodes] | (not self.match)
            chance = p.gather(-1, tokens[read].to(p.device)[:, None])[:, 0].float().cpu().numpy()
            row["target_prob"][nodes] = chance * usable
            row["overlap"][nodes] = torch.minimum(p, q).sum(-1).float().cpu().numpy() * usable


class LiveCollector:
    """Runs the loop on prompts and records its rounds.

    Args:
        pair: target and draft.
        policy: any; its decisions are timed with its own features only.
        settings: temperature, limits, verification, tree.
        explore: share of the rounds that are drafted to full depth whatever the policy decides.
        hidden: hidden states to record (`features.hidden_states`).
        batch: number of texts that are decoded side by side.
        profile: see `Speculator`.
        drafters: those of the pair, if they were loaded already.

    Attributes:
        mode: the verification.
        features: names recorded at each candidate.
    """

    recorder: type[Recorder] = Recorder

    def __init__(
        self, pair: Pair, policy: StopPolicy, settings: Settings, explore: float = 0.0, hidden: Sequence[str] = (),
        batch: int = 1, profile: Profile | None = None, drafters: Sequence[Drafter] = (),
    ) -> None:  # fmt: skip
        check_limits(explore=explore)
        settings, policy = settings.for_pair(pair), with_costs(policy, profile)
        warn_if_unmeasured(profile, [policy], settings, pair.drafter)
        drafters = drafters or find_drafters(pair.drafter, pair)
        tree, temperature = settings.topology, settings.temperature
        tree = with_drafters(tree, len(drafters)) if policy.routes else tree
        self.mode = find_mode(resolve_mode(settings.verification, policy, tree, temperature), temperature)
        self.features = node_features(tree, self.mode.name)
        self.widths = hidden_widths(pair, check_hidden(hidden), drafters[0])
        policy = exploring(policy, explore, tree.deepest) if explore else policy
        match = self.mode.name == Match.name
        self._recorder = self.recorder(tree, self.features, temperature, match, self.widths, policy)
        self.signals = self._recorder.signals
        self._speculator = Speculator(
            pair,
            policy,
            settings,
            profile,
            drafters=drafters,
            hooks=[self._recorder],
            hidden=tuple(self.widths),
            batch=batch,
        )

    def begin(self) -> None:
        """Begin a shard: what passes from text to text is reset, so that the rows of a shard depend on it alone."""
        self._speculator.reset()

    @property
    def carries(self) -> bool:
        """See `Speculator.carries`."""
        return self._speculator.carries

    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text. Raises `PolicyFailure` if the policy failed."""
        return [
            one.columns(len(rows), len(text.tokens)) | {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            for one, text, rows in self.texts(batch)
            if rows
        ]

    def texts(self, batch: Sequence[PromptTask]) -> list[tuple[PromptTask, Generation, list[Row]]]:
        """Decode a batch of prompts and return each with its text and rows. Raises `PolicyFailure` if the policy failed."""
        self._recorder.rows.clear()
        rows: dict[int, list[Row]] = {}

        def end(number: int, text: Generation, stream: int) -> None:
            rows[number] = self._recorder.end(stream)

        texts = self._speculator.run([Request(one.tokens, one.key) for one in batch], on_end=end)
        if failure := next((text.failure for text in texts if text.failure is not None), None):
            raise failure
        return [(one, text, rows[number]) for number, (one, text) in enumerate(zip(batch, texts, strict=True))]
