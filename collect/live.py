"""The live collector: what the running loop meets, under any policy, verification and tree, with real timings."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..decode.drafters import find_drafter
from ..decode.hooks import Hook
from ..decode.loop import Request, Speculator
from ..decode.models.outputs import check_rows, hidden_widths, stored
from ..decode.models.pair import Pair
from ..decode.records import Generation
from ..decode.round_state import RoundState
from ..decode.settings import Settings
from ..decode.summaries import summarise, truncation_lead
from ..decode.topology import Topology
from ..decode.verify.conditions import warn_if_unmeasured
from ..decode.verify.modes import find_mode, resolve_mode
from ..policies.arguments import check_limits
from ..policies.contract import State, StopPolicy
from ..policies.features import ANCHOR_FEATURES, DRAFT_HIDDEN, SAMPLED, TARGET_HIDDEN, Columns, check_hidden
from ..policies.host import with_costs
from ..policies.profile import Profile
from .dense.collector import anchor_columns
from .dense.unroll import node_features
from .explore import Exploring, ExploringState, exploring
from .schema import NO_TOKEN, READS, TIMES, PromptTask

Row = dict[str, Any]


class Recorder(Hook):
    """Turns rounds into rows of a trace.

    Args:
        tree: of the trace; rounds draft a part of it.
        features: names to record at each drawn candidate.
        temperature: of the sampling.
        match: whether labels are comparisons with the target's own tokens.
        widths: H of each hidden state to record.
        policy: which rounds explore; None = none does.

    Attributes:
        rows: by stream, those of its text so far.
    """

    def __init__(
        self,
        tree: Topology,
        features: Sequence[str],
        temperature: float,
        match: bool,
        widths: Mapping[str, int] | None = None,
        policy: Exploring | None = None,
    ) -> None:
        self.tree, self.features, self.temperature, self.match = tree, tuple(features), temperature, match
        self._columns, self._widths, self._policy = Columns(features), dict(widths or {}), policy
        self.rows: dict[int, list[Row]] = defaultdict(list)

    def on_round_end(self, round: RoundState) -> None:
        """Append the row of each stream's round."""
        for stream, sent in round.target_rows:
            first = sum(len(own) for other, own in round.target_rows if other < stream)
            sampled = round.target_sampled[first : first + len(sent)]
            self.rows[stream].append(self.row(round, stream, sent, round.path(stream), sampled))

    def row(self, round: RoundState, stream: int, sent: Sequence[int], path: Sequence[int], sampled: Tensor) -> Row:
        """Return the row of a round.

        Args:
            round: finished.
            stream: of the round.
            sent: rows of the topology that the target has read, the anchor first.
            path: of them, those that were accepted.
            sampled: [len(sent), V] processed scores of the target.
        """
        record, anchor, text, nodes = round.records[stream], round.anchors[stream], round.texts[stream], self.tree.nodes
        assert anchor is not None and text is not None
        row: Row = {
            name: np.zeros(nodes, dtype=np.float32) for name in (*self.features, "draft_prob", "target_prob", "overlap")
        }
        row |= {name: np.zeros(nodes, dtype=bool) for name in ("accepted", "observed", "drawn", "sent")}
        row["tokens"] = np.zeros(nodes, dtype=np.int32)
        last = len(round.topology)  # of the trace's rows the first ones
        drawn = round.drawn[stream, 1:]
        row["drawn"][: last - 1] = drawn
        row["tokens"][: last - 1] = np.where(drawn, round.tokens[stream, 1:], 0)
        # Where siblings were drawn, a filter has left no token for the others.
        parents = round.topology.parents[1:]
        row["tokens"][: last - 1][~drawn & np.isin(parents, parents[drawn])] = NO_TOKEN
        row["sent"][[at - 1 for at in sent[1:]]] = True
        if DRAFT_HIDDEN in self._widths:
            row[DRAFT_HIDDEN] = np.zeros((nodes, self._widths[DRAFT_HIDDEN]), dtype=np.float16)
        if TARGET_HIDDEN in self._widths:
            assert anchor.hidden is not None
            row[TARGET_HIDDEN] = stored(anchor.hidden[0]).cpu().numpy()
        self._label(row, round, stream, path, text.tokens)
        self._measure(row, round, stream, sent, sampled)
        tokens = text.tokens[record.context - 2 : record.context]  # the anchor is the last committed token
        values = anchor_columns(anchor.row, tokens[1:], tokens[:1], [0])[0]
        row |= dict(zip(ANCHOR_FEATURES, values.tolist(), strict=True))
        row |= {name: getattr(record, name) for name in ("anchor", "cut", "committed", "decisions", "backlog", *TIMES)}
        row[READS] = record.backlog > 0 or not record.drafted
        row |= {"accepted_length": int(row["accepted"].sum()), "explored": self._explored(round.policy_state, stream)}
        return row

    def _explored(self, state: State, stream: int) -> bool:
        # The state after the round counts the next one; that of a fallback is of another type.
        if self._policy is None or not isinstance(state, ExploringState):
            return False
        return bool(self._policy.explores(dataclasses.replace(state, number=state.number - 1))[stream])

    def _label(self, row: Row, round: RoundState, stream: int, path: Sequence[int], text: Sequence[int]) -> None:
        """Label the candidates below the accepted path: whether the target accepts them."""
        start, chosen = round.records[stream].context, dict(pairwise(path))
        for at, parent in enumerate(path):
            for child in round.drawn_below(stream, parent):
                if self.match:  # the text tells, also of tokens that were not sent
                    if start + at < len(text):
                        row["observed"][child - 1] = True
                        row["accepted"][child - 1] = round.tokens[stream, child] == text[start + at]
                elif row["sent"][child - 1]:  # else only candidates that were sent and tried have an outcome
                    row["accepted"][child - 1] = child == chosen.get(parent)
                    row["observed"][child - 1] = child <= chosen.get(parent, child)  # later siblings are not tried

    def _measure(self, row: Row, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> None:
        """Fill in features and probabilities of the drawn candidates."""
        index, parent = {at: i for i, at in enumerate(sent)}, round.topology.parent
        path: dict[int, float] = {}
        for level in round.levels:
            scores = None if level is None else level.part(stream)
            if scores is None or not any(scores.counts):
                continue
            check_rows(scores.raw, "draft")
            drawn, _, rows = round.drawn_tokens(scores)
            drawn.parent_path = np.array([path.get(parent[at], 0.0) for at in rows])  # 0 below the anchor
            drawn.lead = (
                truncation_lead(scores.untruncated, scores.sampled, drawn) if self._columns.needs.noisy else None
            )
            summary = summarise(
                self._columns.needs | SAMPLED, scores.raw, drawn, self.temperature, scores.sampled,
                scores.scores, scores.best,
            )  # fmt: skip
            path |= dict(zip(rows, summary.path.tolist(), strict=True))
            nodes = np.array(rows) - 1
            for name, values in zip(self.features, self._columns(summary, drawn, self.temperature).T, strict=True):
                row[name][nodes] = values
            row["draft_prob"][nodes] = np.exp(summary.numbers[:, 1])
            owner = torch.from_numpy(drawn.ids[:, 0]).to(scores.raw.device)
            if DRAFT_HIDDEN in self._widths:
                assert scores.states is not None
                row[DRAFT_HIDDEN][nodes] = stored(scores.states[owner]).cpu().numpy()
            known = [i for i, at in enumerate(rows) if parent[at] in index]
            if not known:
                continue
            p = torch.softmax(sampled[[index[parent[rows[i]]] for i in known]], -1)
            weights = scores.raw / (self.temperature or 1.0) if scores.sampled is None else scores.sampled
            q = torch.softmax(weights[owner[known]], -1)
            # Under match p is void where labels are, as in dense traces; else it is kept of all that the target has read.
            usable = row["observed"][nodes[known]] | (not self.match)
            tokens = torch.from_numpy(drawn.ids[known, 1]).to(p.device)
            chance = p.gather(-1, tokens[:, None])[:, 0].float().cpu().numpy()
            row["target_prob"][nodes[known]] = chance * usable
            row["overlap"][nodes[known]] = torch.minimum(p, q).sum(-1).float().cpu().numpy() * usable


class LiveCollector:
    """Runs the loop on prompts and records its rounds.

    Args:
        pair: target and draft.
        policy: any; its decisions are timed with its own features only.
        settings: temperature, limits, verification, tree.
        explore: share of the rounds that are drafted to full depth whatever the policy says.
        hidden: hidden states to record (`features.hidden_states`).
        batch: texts that are decoded side by side.
        profile: see `Speculator`.
    """

    def __init__(
        self,
        pair: Pair,
        policy: StopPolicy,
        settings: Settings,
        explore: float = 0.0,
        hidden: Sequence[str] = (),
        batch: int = 1,
        profile: Profile | None = None,
    ) -> None:
        check_limits(explore=explore)
        settings = settings.for_pair(pair)
        policy = with_costs(policy, profile)
        warn_if_unmeasured(profile, [policy], settings, pair.drafter)
        self.tree = settings.topology
        runs = exploring(policy, explore, self.tree.deepest) if explore else policy
        name = resolve_mode(settings.verification, policy, self.tree, settings.temperature)
        mode = find_mode(name, settings.temperature)
        self.features = node_features(self.tree, mode.name)
        self.label, self.verification = mode.label, mode.name
        drafter = find_drafter(pair.drafter, pair)
        widths = hidden_widths(pair, check_hidden(hidden), drafter)
        self._recorder = Recorder(
            self.tree, self.features, settings.temperature, mode.name == "match", widths,
            runs if isinstance(runs, Exploring) else None,
        )  # fmt: skip
        self._speculator = Speculator(
            pair, runs, settings, profile, drafter=drafter, hooks=[self._recorder], hidden=tuple(widths), batch=batch
        )

    def begin(self) -> None:
        """Begin a shard: what passes from text to text starts anew, so that a shard's rows depend on it alone."""
        self._speculator.reset()

    @property
    def carries(self) -> bool:
        """See `Speculator.carries`."""
        return self._speculator.carries

    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text.

        Args:
            batch: the prompts.

        Raises:
            PolicyFailure: the policy failed.
        """
        recorder, made = self._recorder, {}
        recorder.rows.clear()

        def end(number: int, text: Generation, stream: int) -> None:
            made[number] = recorder.rows.pop(stream, [])

        requests = [Request(one.tokens, one.key) for one in batch]
        texts = self._speculator.run(requests, on_end=end)
        if failure := next((text.failure for text in texts if text.failure is not None), None):
            raise failure
        chunks: list[Mapping[str, Any]] = []
        for number, one in enumerate(batch):
            if rows := made[number]:
                columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
                chunks.append(one.columns(len(rows), len(texts[number].tokens)) | columns)
        return chunks
