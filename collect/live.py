"""The live collector: what the running loop meets, under any policy, verification and tree, with real timings."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..decode.candidates import Candidates
from ..decode.drafters import find_drafter
from ..decode.loop import Request, Speculator
from ..decode.models.finite import check_rows
from ..decode.models.hidden import hidden_widths, stored
from ..decode.models.pair import Pair
from ..decode.observer import Seen
from ..decode.policy.reader import Logits
from ..decode.policy.summaries import summarise
from ..decode.records import Generation
from ..decode.settings import Settings
from ..decode.topology import Topology
from ..decode.verify.modes import find_mode, resolve_mode
from ..decode.verify.trained_for import tell_if_unmeasured
from ..policies.contract import State, StopPolicy
from ..policies.features import ANCHOR_FEATURES, Columns, Drawn, Need
from ..policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN, check_hidden
from ..policies.limits import check_limits
from ..policies.profile import Profile
from ..policies.validation import with_costs
from .dense.collector import anchor_columns
from .dense.unroll import node_features
from .explore import Exploring, ExploringState, exploring
from .schema import NO_TOKEN, READS, TIMES
from .work import Work

Row = dict[str, Any]


class Recorder:
    """Turns the rounds that it observes into rows of a trace.

    Args:
        tree: of the trace; rounds draft a part of it.
        features: names to record at each drawn node.
        temperature: of the sampling.
        match: whether labels are comparisons with the target's own tokens.
        deferred: whether the roots of a round are the tree's first level, as `Verification.deferred` says.
        widths: H of each hidden state to record.
        policy: which rounds explore; None = none does.
    """

    def __init__(
        self,
        tree: Topology,
        features: Sequence[str],
        temperature: float,
        match: bool,
        deferred: bool = False,
        widths: Mapping[str, int] | None = None,
        policy: Exploring | None = None,
    ) -> None:
        self.tree, self.features, self.temperature = tree, tuple(features), temperature
        self._columns = Columns(features)
        self._widths, self._policy = dict(widths or {}), policy
        # Row of the topology that is node 0: row 0 is the anchor, unless the roots themselves are candidates.
        self.match, self._first = match, 0 if deferred else 1
        self.rows: dict[int, list[Row]] = defaultdict(list)
        self._levels: dict[int, list[tuple[list[int], Logits]]] = defaultdict(list)

    def level(self, stream: int, found: Candidates, places: Sequence[int], logits: Logits) -> None:
        """Keep the logits; see `Observer.level`."""
        self._levels[stream].append((list(places), logits))

    def round(self, seen: Seen) -> None:
        """Append the row of a round to those of its stream; see `Observer.round`."""
        levels = self._levels.pop(seen.stream, [])
        found, record, nodes = seen.found, seen.record, self.tree.nodes
        row: Row = {name: np.zeros(nodes, dtype=np.float32) for name in (*self.features, "draft_prob", "target_prob")}
        row |= {"overlap": np.zeros(nodes, dtype=np.float32), "tokens": np.zeros(nodes, dtype=np.int32)}
        row |= {name: np.zeros(nodes, dtype=bool) for name in ("accepted", "labelled", "drawn", "sent")}
        node = [at - self._first for at in found.rows]
        drawn = [place for place, at in enumerate(node) if at >= 0 and (found.depth[place] > 0 or self._first == 0)]
        sent = set(seen.sent)
        row["tokens"][[node[p] for p in drawn]] = [found.tokens[p] for p in drawn]
        row["drawn"][[node[p] for p in drawn]] = True
        row["tokens"][self._missing(found, node)] = NO_TOKEN
        row["sent"][[node[p] for p in drawn if p in sent]] = True
        if DRAFT_HIDDEN in self._widths:
            row[DRAFT_HIDDEN] = np.zeros((nodes, self._widths[DRAFT_HIDDEN]), dtype=np.float16)
        if TARGET_HIDDEN in self._widths:
            assert seen.anchor_hidden is not None
            row[TARGET_HIDDEN] = stored(seen.anchor_hidden[0]).cpu().numpy()
        self._label(row, seen, node, drawn)
        self._measure(row, seen, node, levels)
        # The anchor is the last committed token; deferred roots stand after it.
        before = seen.text.tokens[record.context - (1 if self._first == 0 else 2)]
        anchor = anchor_columns(seen.anchor_row, found.tokens[:1], [before], [0])[0]
        row |= dict(zip(ANCHOR_FEATURES, anchor.tolist(), strict=True))
        row |= {name: getattr(record, name) for name in ("anchor", "cut", "committed", "decisions", "backlog", *TIMES)}
        row[READS] = record.backlog > 0 or not record.drafted
        row |= {"accepted_length": int(row["accepted"].sum()), "explored": self._explored(seen.state)}
        self.rows[seen.stream].append(row)

    def _explored(self, state: State) -> bool:
        """Whether the round explored: the policy's state at its end is that of the next one."""
        # The state has taken this round in and counts the next one; a fallback's is another.
        if self._policy is None or not isinstance(state, ExploringState):
            return False
        return bool(self._policy.explores(dataclasses.replace(state, number=state.number - 1)))

    def _missing(self, found: Candidates, node: Sequence[int]) -> list[int]:
        """Return the nodes below those that were fed for which a filter has left no token."""
        fed = {at for at, below in zip(found.rows, found.children, strict=True) if below}
        missing = set(range(found.topology.roots, len(found.topology))).difference(found.rows)
        return [row - self._first for row in missing if found.topology.parent[row] in fed]

    def _label(self, row: Row, seen: Seen, node: Sequence[int], drawn: Sequence[int]) -> None:
        """Say of the nodes below the accepted path whether the target accepts them."""
        found, path, start = seen.found, seen.path, seen.record.context
        text = seen.text.tokens
        after = {place: at for at, place in enumerate(path)}
        for place in drawn:
            parent = found.parent[place]
            if parent not in after:
                continue
            if self.match:  # the text says it, also of tokens that were not sent
                at = start + after[parent]  # of the text's token after `parent`
                if at < len(text):
                    row["labelled"][node[place]] = True
                    row["accepted"][node[place]] = found.tokens[place] == text[at]
            elif row["sent"][node[place]]:  # else it is known of what was sent and tried alone
                chosen = path[after[parent] + 1] if after[parent] + 1 < len(path) else None
                row["accepted"][node[place]] = place == chosen
                row["labelled"][node[place]] = chosen is None or place <= chosen  # later siblings are not tried

    def _measure(self, row: Row, seen: Seen, node: Sequence[int], levels: Sequence[tuple[list[int], Logits]]) -> None:
        """Fill in features and probabilities of the drawn nodes."""
        found, sent = seen.found, {place: at for at, place in enumerate(seen.sent)}
        path: dict[int, float] = {}
        for places, logits in levels:
            check_rows(logits.raw, "draft")
            drawn = Drawn.of(logits.tokens)
            drawn.parent_path = np.array([path.get(found.parent[place], 0.0) for place in places])  # 0 at roots
            drawn.lead = logits.lead(drawn) if self._columns.plan.noisy else None
            summary = summarise(
                self._columns.plan | (Need.PATH | Need.SAMPLED), logits.raw, drawn, self.temperature, logits.sampled,
                logits.scores, logits.best,
            )  # fmt: skip
            path |= dict(zip(places, summary.path.tolist(), strict=True))
            at = [node[place] for place in places]
            for name, values in zip(self.features, self._columns(summary, drawn, self.temperature).T, strict=True):
                row[name][at] = values
            row["draft_prob"][at] = np.exp(summary.numbers[:, 1])
            owner = torch.from_numpy(drawn.ids[:, 0]).to(logits.raw.device)
            if DRAFT_HIDDEN in self._widths:
                assert logits.states is not None
                row[DRAFT_HIDDEN][at] = stored(logits.states[owner]).cpu().numpy()
            known = [i for i, place in enumerate(places) if found.parent[place] in sent]
            if not known:
                continue
            p = torch.softmax(seen.sampled[[sent[found.parent[places[i]]] for i in known]], -1)
            weights = logits.raw / (self.temperature or 1.0) if logits.sampled is None else logits.sampled
            q = torch.softmax(weights[owner[known]], -1)
            here = [at[i] for i in known]
            # Under match p is void where labels are, as in dense traces; else it is kept of all that the target has read.
            usable = row["labelled"][here] | (not self.match)
            tokens = torch.from_numpy(drawn.ids[known, 1]).to(p.device)
            chance = p.gather(-1, tokens[:, None])[:, 0].float().cpu().numpy()
            row["target_prob"][here] = chance * usable
            row["overlap"][here] = torch.minimum(p, q).sum(-1).float().cpu().numpy() * usable


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
        tell_if_unmeasured(profile, [policy], settings, pair.drafter)
        self.tree = settings.topology
        runs = exploring(policy, explore, self.tree.deepest) if explore else policy
        name = resolve_mode(settings.verification, policy, self.tree, settings.temperature)
        mode = find_mode(name, settings.temperature)
        self.features = node_features(self.tree, mode.name)
        self.label, self.verification = mode.label, mode.name
        drafter = find_drafter(pair.drafter, pair)
        widths = hidden_widths(pair, check_hidden(hidden), drafter)
        self._recorder = Recorder(
            self.tree, self.features, settings.temperature, mode.name == "match", mode.deferred, widths,
            runs if isinstance(runs, Exploring) else None,
        )  # fmt: skip
        self._speculator = Speculator(
            pair, runs, settings, profile, drafter=drafter, observer=self._recorder, hidden=tuple(widths), batch=batch
        )

    def begin(self) -> None:
        """Begin a shard: what passes from text to text starts anew, so that a shard's rows depend on it alone."""
        self._speculator.renew()

    @property
    def carries(self) -> bool:
        """See `Speculator.carries`."""
        return self._speculator.carries

    def rows(self, batch: Sequence[Work]) -> list[Mapping[str, Any]]:
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
            raise failure.as_error("rounds of another policy are not recorded under its name")
        chunks: list[Mapping[str, Any]] = []
        for number, one in enumerate(batch):
            if rows := made[number]:
                columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
                chunks.append(one.columns(len(rows), len(texts[number].tokens)) | columns)
        return chunks
