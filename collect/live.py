"""Collectors that run the loop: the live collector, exploration, and the dense collector for drafters without a draft model.

The live collector records the rounds of the running loop under any policy, verification and tree, with real timings.

The positions collector records a dense trace of any drafter. Under `match` the text does not depend on what is drafted, so a
run that verifies no candidate commits one token per round and drafts the whole tree at each position. The target's pass over
the text labels every node: a node on the text is accepted, and the target's row after it is that of the round at which the
text has reached it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..decode.drafters import find_drafter
from ..decode.drafters.spec import parse_spec
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
from ..decode.verify.modes import Match, find_mode, resolve_mode
from ..policies.arguments import check_limits
from ..policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..policies.counter_rng import mix
from ..policies.features import ANCHOR_FEATURES, DRAFT_HIDDEN, SAMPLED, TARGET_HIDDEN, Columns, check_hidden
from ..policies.host import validate_policy, with_costs
from ..policies.profile import Profile
from .dense import anchor_columns, node_features
from .schema import NO_TOKEN, READS, TIMES, PromptTask
from .shards import BATCH

Row = dict[str, Any]
"""The row of a round, by column."""

_SALT = 0x5EED
_SHARE = 1 << 24


@dataclass(frozen=True, slots=True)
class ExploringState:
    """State of `Exploring`.

    Attributes:
        inner: state of the inner policy.
        keys, number: [S] int64, keys of the streams and number of the round.
        called: [S] bool, whether the inner policy was called in this round; initially True.
    """

    inner: State
    keys: Array
    number: Array
    called: Array


class Exploring(StopPolicy):
    """Wraps a policy and keeps every branch to full depth in a share of the rounds, chosen by stream and round number.

    What the policy would not have drafted is then recorded too. Created by `exploring`.

    Args:
        inner: the policy.
        share: of the rounds, 0 to 1.
        depth: K, the full depth.
    """

    def __init__(self, inner: StopPolicy, share: float, depth: int) -> None:
        self.inner, self.share, self.name = inner.limited(depth), share, inner.name
        self.parts = (self.inner,)
        self.features, self.hidden = inner.features, inner.hidden
        self.sizes: Mapping[str, int] = getattr(inner, "sizes", {})  # checked before a run
        self.trims, self.carries, self.joint = inner.trims, inner.carries, inner.joint  # type: ignore[misc]
        self.reads_clock, self.reads_seconds = inner.reads_clock, inner.reads_seconds  # type: ignore[misc]
        # The inner policy is not called from its deepest depth on, nor in batches of some sizes. This one must be, to end the
        # rounds that do not explore.
        self.max_depth, self.first = depth, min(inner.first, self.inner.max_depth, *inner.unasked.values())

    def start(self, streams: int, keys: Array) -> State:
        """Return the state before the first round."""
        return ExploringState(self.inner.start(streams, keys), keys, np.zeros_like(keys), np.ones(streams, dtype=bool))

    def explores(self, state: State) -> Array:
        """Return [S] bool, whether the round is drafted to full depth."""
        # Keyed by stream and round alone: a shard that is collected again explores the same rounds.
        drawn: Array = mix(mix(state.keys ^ _SALT) + state.number) & (_SHARE - 1)
        return drawn < round(self.share * _SHARE)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Return the decisions of the policy, and all branches in rounds that explore."""
        inner, depth, length = state.inner, step.depth, self._fixed_length(step)
        alive = step.alive.copy()  # a plugin may write to its arguments
        if length is None and self.inner.first <= depth < self.inner.max_depth:
            kept, inner = self.inner.keep(step, inner)
        else:
            kept = np.full_like(step.alive, depth < (self.inner.max_depth if length is None else length))
        kept = alive & (kept | self.explores(state)[:, None])
        called = np.full(len(step.alive), length is None)
        return kept, ExploringState(inner, state.keys, state.number, called)

    def _fixed_length(self, step: DraftStep) -> int | None:
        """Return the length that the policy drafts without being called, by the number of streams in the batch."""
        together = step.batch[step.batch >= 0]
        return self.inner.unasked.get(int(np.count_nonzero(together == together[0]))) if len(together) else None

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Pass the outcome to the policy, and count the round."""
        inner = self.inner.observe(outcome, state.inner)
        return ExploringState(inner, state.keys, state.number + outcome.active, np.ones_like(state.called))


class SelectingExploring(Exploring):
    """`Exploring` for a policy that selects."""

    def select(self, tree: DraftTree, state: State) -> Array | None:
        """Return the selection of the policy, and everything drawn in rounds that explore or in which it was not called."""
        mask = self.inner.select(tree, state.inner) if state.called.any() else None
        return None if mask is None else mask | (self.explores(state)[:, None] & tree.drawn)


def exploring(policy: StopPolicy, share: float, depth: int) -> Exploring:
    """Return the policy, drafting to full depth in a share of its rounds."""
    validate_policy(policy)
    selects = type(policy).select is not StopPolicy.select
    return (SelectingExploring if selects else Exploring)(copy.copy(policy), share, depth)


class Recorder(Hook):
    """Turns rounds into rows of a trace.

    Args:
        tree: of the trace; rounds draft a part of it.
        features: names recorded at each drawn candidate.
        temperature: of the sampling.
        match: whether labels compare with the target's own tokens.
        widths: H of each hidden state that is recorded.
        policy: decides which rounds explore; None = none.

    Attributes:
        rows: by stream, those of its text so far.
    """

    def __init__(
        self, tree: Topology, features: Sequence[str], temperature: float, match: bool,
        widths: Mapping[str, int], policy: StopPolicy | None = None,
    ) -> None:  # fmt: skip
        self.tree, self.features, self.temperature, self.match = tree, tuple(features), temperature, match
        self._columns, self._widths = Columns(features), dict(widths)
        self._policy = policy if isinstance(policy, Exploring) else None
        self.rows: dict[int, list[Row]] = defaultdict(list)

    def on_round_end(self, round: RoundState) -> None:
        """Append the row of each stream's round."""
        first = 0
        for stream, sent in round.target_rows:
            sampled = round.target_sampled[first : first + len(sent)]
            first += len(sent)
            self.rows[stream].append(self.row(round, stream, sent, round.path(stream), sampled))

    def texts(
        self, speculator: Speculator, batch: Sequence[PromptTask]
    ) -> list[tuple[PromptTask, Generation, list[Row]]]:
        """Decode a batch of prompts and return each with its text and rows. Raises `PolicyFailure` if the policy failed."""
        self.rows.clear()
        rows: dict[int, list[Row]] = {}

        def end(number: int, text: Generation, stream: int) -> None:
            rows[number] = self.end(stream)

        texts = speculator.run([Request(one.tokens, one.key) for one in batch], on_end=end)
        if failure := next((text.failure for text in texts if text.failure is not None), None):
            raise failure
        return [(one, text, rows[number]) for number, (one, text) in enumerate(zip(batch, texts, strict=True))]

    def end(self, stream: int) -> list[Row]:
        """Return the rows of a stream, whose text has ended, and forget them."""
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
        # If siblings were drawn, a filter left no token for the others.
        parents = round.topology.parents[1:]
        row["tokens"][:count][~drawn & np.isin(parents, parents[drawn])] = NO_TOKEN
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
        row[READS] = record.backlog > 0 or not record.drafted
        state, explored = round.policy_state, False
        if self._policy is not None and isinstance(state, ExploringState):  # not the state of the fallback
            # The state after the round has the number of the next one.
            explored = bool(self._policy.explores(dataclasses.replace(state, number=state.number - 1))[stream])
        return row | {"accepted_length": int(row["accepted"].sum()), "explored": explored}

    def _label(self, row: Row, round: RoundState, stream: int, path: Sequence[int], text: Sequence[int]) -> None:
        """Label the candidates below the accepted path: whether the target accepts them."""
        start, chosen = round.records[stream].context, dict(pairwise(path))
        for at, parent in enumerate(path):
            for child in round.drawn_below(stream, parent):
                if self.match:  # the text decides, also about tokens that were not sent
                    if start + at < len(text):
                        row["observed"][child - 1] = True
                        row["accepted"][child - 1] = round.tokens[stream, child] == text[start + at]
                elif row["sent"][child - 1]:  # otherwise only candidates that were sent and tried have an outcome
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
            needs = self._columns.needs | SAMPLED
            drawn.lead = truncation_lead(scores.untruncated, scores.sampled, drawn) if needs.noisy else None
            summary = summarise(
                needs, scores.raw, drawn, self.temperature, scores.sampled, scores.scores, scores.best
            )  # fmt: skip
            path |= zip(rows, summary.path.tolist(), strict=True)
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
            # Under match p is void where labels are, as in dense traces; else it is recorded wherever the target has read.
            usable = row["observed"][nodes[known]] | (not self.match)
            tokens = torch.from_numpy(drawn.ids[known, 1]).to(p.device)
            chance = p.gather(-1, tokens[:, None])[:, 0].float().cpu().numpy()
            row["target_prob"][nodes[known]] = chance * usable
            row["overlap"][nodes[known]] = torch.minimum(p, q).sum(-1).float().cpu().numpy() * usable


class LoopCollector:
    """Collects rows with a `Recorder` in a running loop.

    Attributes:
        features: names recorded at each candidate.
    """

    features: tuple[str, ...]
    _recorder: Recorder
    _speculator: Speculator

    def begin(self) -> None:
        """Begin a shard: what passes from text to text is reset, so that the rows of a shard depend on it alone."""
        self._speculator.reset()

    @property
    def carries(self) -> bool:
        """See `Speculator.carries`."""
        return self._speculator.carries


class LiveCollector(LoopCollector):
    """Runs the loop on prompts and records its rounds.

    Args:
        pair: target and draft.
        policy: any; its decisions are timed with its own features only.
        settings: temperature, limits, verification, tree.
        explore: share of the rounds that are drafted to full depth whatever the policy decides.
        hidden: hidden states to record (`features.hidden_states`).
        batch: number of texts that are decoded side by side.
        profile: see `Speculator`.

    Attributes:
        mode: the verification.
    """

    def __init__(
        self, pair: Pair, policy: StopPolicy, settings: Settings, explore: float = 0.0, hidden: Sequence[str] = (),
        batch: int = 1, profile: Profile | None = None,
    ) -> None:  # fmt: skip
        check_limits(explore=explore)
        settings, policy = settings.for_pair(pair), with_costs(policy, profile)
        warn_if_unmeasured(profile, [policy], settings, pair.drafter)
        tree, temperature = settings.topology, settings.temperature
        self.mode = find_mode(resolve_mode(settings.verification, policy, tree, temperature), temperature)
        self.features = node_features(tree, self.mode.name)
        drafter = find_drafter(pair.drafter, pair)
        widths = hidden_widths(pair, check_hidden(hidden), drafter)
        policy = exploring(policy, explore, tree.deepest) if explore else policy
        self._recorder = Recorder(tree, self.features, temperature, self.mode.name == Match.name, widths, policy)
        self._speculator = Speculator(
            pair, policy, settings, profile, drafter=drafter, hooks=[self._recorder], hidden=tuple(widths), batch=batch
        )

    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text. Raises `PolicyFailure` if the policy failed."""
        return [
            one.columns(len(rows), len(text.tokens)) | {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            for one, text, rows in self._recorder.texts(self._speculator, batch)
            if rows
        ]


class _DraftsOnly(StopPolicy):
    """Drafts the whole tree and sends nothing to the target."""

    name = "drafts-only"

    def __init__(self, depth: int) -> None:
        self.max_depth = depth

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
        """Keep the round, and record the earlier one whose tree the target has now passed."""
        for at, (stream, _) in enumerate(round.target_rows):  # one row per stream, as nothing is sent
            waiting = self._waiting[stream]
            waiting.append((round, round.target_sampled[at : at + 1]))
            if len(waiting) > self.tree.deepest:
                self._record_first(stream, waiting)

    def end(self, stream: int) -> list[Row]:
        """Return the rows of a stream, whose text has ended, and forget them."""
        waiting = self._waiting.pop(stream, [])
        while waiting:
            self._record_first(stream, waiting)
        return super().end(stream)

    def _record_first(self, stream: int, waiting: list[tuple[RoundState, Tensor]]) -> None:
        """Record the first waiting round as if its candidates on the text had been sent and accepted."""
        round = waiting[0][0]
        text = round.texts[stream]
        assert text is not None
        path = [0]
        for token in text.tokens[round.records[stream].context :]:
            children = round.drawn_below(stream, path[-1])
            child = next((row for row in children if round.tokens[stream, row] == token), None)
            if child is None or len(path) == len(waiting):
                break
            path.append(child)
        # A round commits one token. So the target's row after the k-th token of the path is that of the round k later.
        sampled = torch.cat([scores for _, scores in waiting[: len(path)]])
        self.rows[stream].append(self.row(round, stream, path, path, sampled))
        del waiting[0]


class PositionsCollector(LoopCollector):
    """Collects a dense trace with the drafter of a pair.

    Args:
        pair: target with its drafter.
        settings: temperature, limit, tree; the verification is `match`.
        hidden: hidden states to record (`features.hidden_states`).
        memory_bytes: budget for the scores of rounds that wait, which limits the texts that are decoded side by side.

    Attributes:
        batch: number of texts that are decoded side by side.
    """

    def __init__(self, pair: Pair, settings: Settings, hidden: Sequence[str] = (), memory_bytes: int = 1 << 28) -> None:
        tree, drafter = settings.topology, find_drafter(pair.drafter, pair)
        widths = hidden_widths(pair, check_hidden(hidden), drafter)
        self.features, self._limit, self._eos = node_features(tree), settings.max_new_tokens, pair.eos
        self._depth, self._hidden = tree.deepest, tuple(widths)
        self._in_turn = (READS,) if len(parse_spec(pair.drafter)) > 1 else ()
        self._recorder = _PositionsRecorder(tree, self.features, settings.temperature, True, widths)
        drawn = 1
        if settings.temperature > 0:  # also the scores with noise; with filters those before and after them
            drawn = 4 if settings.sampling.to_dict() else 2
        # A text keeps K + 1 rounds: rows of the nodes with children, and the raw and processed row of the target.
        rows = (tree.deepest + 1) * (sum(map(bool, tree.children)) * drawn + 2)
        text_bytes = rows * pair.vocabulary * torch.finfo(pair.logits_dtype).bits // 8
        # A drafter that drafts from earlier texts needs them in their order, one after the other.
        self.batch = 1 if drafter.carries else max(1, min(BATCH, memory_bytes // text_bytes))
        # K + 1 tokens past the limit, so that the tree of no anchor before the limit is cut by it.
        longer = replace(settings, max_new_tokens=self._limit + self._depth + 1)
        self._speculator = Speculator(
            pair, _DraftsOnly(tree.deepest), longer, drafter=drafter, hooks=[self._recorder], hidden=tuple(widths),
            batch=self.batch,
        )  # fmt: skip

    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text."""
        names = (
            *self.features, *ANCHOR_FEATURES, *self._hidden, "draft_prob", "target_prob", "overlap", "accepted",
            "observed", "accepted_length", "anchor", *self._in_turn,
        )  # fmt: skip
        chunks: list[Mapping[str, Any]] = []
        for one, text, every_row in self._recorder.texts(self._speculator, batch):
            length = min(len(text.tokens), self._limit)
            rows = [row for row in every_row if row["anchor"] < length]
            if not rows:
                continue
            columns = one.columns(len(rows), length) | {name: np.stack([row[name] for row in rows]) for name in names}
            tokens, drawn = (np.stack([row[name] for row in rows]) for name in ("tokens", "drawn"))
            # Everything is drafted: nodes without a token were filtered out, or EOS ended the branch.
            columns["tokens"] = np.where(drawn, tokens, NO_TOKEN)
            ended = text.tokens[-1] in self._eos
            columns["cut"] = (columns["anchor"] + self._depth > len(text.tokens)) & ended
            chunks.append(columns)
        return chunks
