"""Where the streams of a replay are: their text, their anchor, what the draft has read, what the policy remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...policies.checking import check_policy
from ...policies.contract import DraftStep, RoundOutcome, State, StopPolicy, checked_observe, checked_start
from ...policies.errors import TraceError
from ...policies.features import Layout
from ...policies.features.hidden_states import check_sizes
from ...policies.features.history import History
from ...policies.latency.profile import Profile
from .arrays import TraceArrays

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Drafted:
    """What the streams drafted in a round; all [R].

    Attributes:
        drafted, verified: int64, tokens drawn, and sent to the target.
        accepted: int64, min(A, k).
        read: int64, accepted tokens that the draft has read.
        decisions: int64, times the policy was asked.
        capped: bool, a limit or EOS ended drafting.
        fed: [R, K] int64, tokens read at each draft step, of trees; None for chains.
    """

    drafted: Array
    verified: Array
    accepted: Array
    read: Array
    decisions: Array
    capped: Array
    fed: Array | None = None


class Walk:
    """R streams, each with a queue of texts that it decodes one after the other.

    The trace is tensors, replay works on views of them as arrays: what it does between two decisions is many small steps.

    Args:
        arrays: a trace.
        policy: asked.
        profile: prices rounds.
        queues: [R, Q] int64 sequences; with more than one in a queue the policy's state passes from text to text.
    """

    def __init__(self, arrays: TraceArrays, policy: StopPolicy, profile: Profile, queues: Array) -> None:
        self.arrays, self.policy, self.profile, self.queues = arrays, policy, profile, queues
        self.layout = Layout(policy.features)
        anchors, nodes = arrays.tensors(policy.features)
        self._anchor_columns, self._node_columns = anchors.numpy(), nodes.numpy()
        self._hidden = {name: arrays.vector(name) for name in policy.hidden}
        self.accepted, self.tokens, self.ends = arrays.accepted.numpy(), arrays.tokens.numpy(), arrays.ends.numpy()
        self._first_anchor, self._offset = arrays.first_anchor.numpy(), arrays.offset.numpy()
        self._prompt, self._text = arrays.prompt_tokens.numpy(), arrays.text_tokens.numpy()
        self.price = profile.decision(policy.cost_name)
        self.turn = np.zeros(len(queues), dtype=np.int64)
        self.sequence = queues[:, 0]
        self.state: State = checked_start(policy, len(queues), arrays.keys.numpy()[self.sequence])
        self.history = History.start(len(queues))
        self.anchor = self._first_anchor[self.sequence]
        self.backlog = self.context()
        self.active = np.ones(len(queues), dtype=bool)
        self._skip_finished()

    def context(self) -> Array:
        """Return [R], the tokens committed, the prompts' included."""
        out: Array = self._prompt[self.sequence] + self.anchor
        return out

    def _skip_finished(self) -> None:
        """Go on to the next text where one has ended."""
        while True:
            ended = self.active & (self.anchor >= self._text[self.sequence])
            if not ended.any():
                return
            self.turn = self.turn + ended
            self.active = self.turn < self.queues.shape[1]
            at = np.minimum(self.turn, self.queues.shape[1] - 1)
            self.sequence = np.take_along_axis(self.queues, at[:, None], 1)[:, 0]
            begins = ended & self.active
            if begins.any():
                fresh = History.start(len(self.queues))
                self.history = History(
                    np.where(begins[:, None], fresh.record, self.history.record),
                    np.where(begins, fresh.weight, self.history.weight),
                )
                self.anchor = np.where(begins, self._first_anchor[self.sequence], self.anchor)
                self.backlog = np.where(begins, self.context(), self.backlog)

    @cached_property
    def first_end(self) -> Array:
        """[N] of chains, the depth of the first node that drew EOS; beyond the tree where none did."""
        rows, nodes = self.ends.shape
        if not self.arrays.header.eos or not nodes:
            return np.full(rows, nodes + 1)
        out: Array = np.where(self.ends.any(1), self.ends.argmax(1) + 1, nodes + 1)
        return out

    def base(self, row: Array) -> Array:
        """Return [R, F] float32, the ANCHOR and HISTORY columns of the rounds at these rows, the rest 0."""
        return self.layout.base(self._anchor_columns[row], self.history.values(self.layout.history))

    def step(
        self, row: Array, base: Array, depth: int, alive: Array, nodes: Array | None, parent: Array | None = None
    ) -> DraftStep:
        """Return what the policy is shown.

        Args:
            row: [R] of the anchors.
            base: [R, F] of `base`.
            depth: j.
            alive: [R, B] bool.
            nodes: [B] of the branches; None at depth 0.
            parent: [B] among the branches of the depth before; None = all of the first one.
        """
        stream, branch = alive.nonzero()
        seen = base[stream]
        if nodes is not None and self.layout.node:
            seen[:, self.layout.node_at] = self._node_columns[row[stream], nodes[branch]]
        features = np.zeros((*alive.shape, base.shape[1]), dtype=np.float32)
        features[stream, branch] = seen
        above = np.zeros(alive.shape, dtype=np.int64)
        if parent is not None:
            above += parent
        hidden = {name: self._states(name, row, nodes, stream, branch, alive.shape) for name in self._hidden}
        return DraftStep(depth, alive.copy(), above, features, hidden, np.arange(len(row)))

    def _states(
        self, name: str, row: Array, nodes: Array | None, stream: Array, branch: Array, shape: tuple[int, ...]
    ) -> Array:
        """Return [R, B, H] float32, a hidden state of these branches of these streams; 0 of all others."""
        recorded = self._hidden[name]
        full = np.zeros((*shape, recorded.width), dtype=np.float32)
        if nodes is not None or not recorded.of_nodes:
            at = None if nodes is None else torch.from_numpy(nodes[branch])
            full[stream, branch] = recorded.at(torch.from_numpy(row[stream]), at).float().numpy()
        return full

    def rows(self) -> Array:
        """Return [R], the row of each stream's anchor; any row for finished ones.

        Raises:
            TraceError: the trace has no round there: it was recorded under a policy that did not visit it.
        """
        row = self.arrays.find(self.sequence, self.anchor)
        missing = self.active & (row < 0)
        if missing.any():
            at = int(missing.argmax())
            name = self.arrays.prompt_ids[int(self.sequence[at])]
            raise TraceError(
                f"{self.policy.name} comes to anchor {int(self.anchor[at])} of {name!r}, where the trace has no round "
                f"({self._origin()}); collect dense traces to replay any policy"
            )
        return np.where(self.active, row, self._offset[self.sequence])

    def _origin(self) -> str:
        header = self.arrays.header
        return f"it was recorded under {header.policy}" if header.policy else f"its texts are {header.texts}"

    def allowed(self) -> Array:
        """Return [R], the depth at which the length limit ends drafting."""
        return self.arrays.header.max_new_tokens - self.anchor - 1

    def advance(self, made: Drafted) -> tuple[Array, Array, Array]:
        """Commit a round and move on.

        Returns:
            [R', 6] int64 of the streams that were active, one line each: sequence, anchor, drafted, verified, accepted,
            committed; [R'] seconds; and [R', 4] the history when the round began.
        """
        active, sequence = self.active, self.sequence
        left = self._text[sequence] - self.anchor
        accepted = made.accepted * active
        committed = np.minimum(accepted + 1, left) * active
        seconds = active * self.profile.round_seconds(
            self.context(), made.drafted, made.verified, self.backlog, made.decisions, self.price, made.fed
        )
        cut = (made.capped | (committed >= left)) & active
        before = self.history.values()[active]
        self.history = self.history.after(accepted, made.verified, active & ~cut)
        self.observe(RoundOutcome(active, made.drafted, made.verified, accepted, cut, seconds))
        line = np.stack([sequence, self.anchor, made.drafted, made.verified, accepted, committed], 1)[active]
        # The draft has read what was fed of the accepted path; what was rejected is forgotten.
        backlog = committed + np.where(made.drafted > 0, -made.read, self.backlog)
        self.backlog = np.where(active, backlog, self.backlog)
        self.anchor = self.anchor + committed
        self._skip_finished()
        return line, seconds[active], before

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell the policy of a round."""
        self.state = checked_observe(self.policy, outcome, self.state)


def check_replayable(arrays: TraceArrays, policy: StopPolicy, profile: Profile) -> None:
    """Refuse a policy that the trace or the profile cannot answer.

    Raises:
        TraceError: the message says what is missing.
        PolicyError: it is not what a policy must be, or reads hidden states of another size than the trace's.
    """
    check_policy(policy)
    header = arrays.header
    if header.verification != "match":
        raise TraceError(
            f"the trace was recorded under {header.verification}, where the text depends on the policy; "
            "replay needs match traces, or ask for single rounds (`evaluate_rounds`)"
        )
    if header.mix:
        raise TraceError("the trace mixes draft samples into the text (--mix): it can be trained on, not replayed")
    if policy.max_depth > arrays.depth:
        raise TraceError(
            f"{policy.name} drafts up to {policy.max_depth} tokens, but the trace was recorded to depth {arrays.depth}; "
            f"limit the policy (max_depth={arrays.depth}) or collect with --depth {policy.max_depth}"
        )
    if arrays.tree.is_chain and profile.max_depth < policy.max_depth:
        raise TraceError(
            f"{policy.name} drafts up to {policy.max_depth} tokens, but the profile ends at {profile.max_depth}"
        )
    if policy.reads_clock:
        raise TraceError(f"{policy.name} reads the clock, which no trace holds; measure it live (`specstop bench`)")
    if missing := [name for name in policy.hidden if name not in arrays.vectors]:
        models = ",".join(name.removesuffix("_hidden") for name in missing)
        raise TraceError(
            f"{policy.name} reads hidden states ({', '.join(missing)}), which the trace was recorded without; "
            f"collect it with --hidden {models}"
        )
    check_sizes(policy, header.vectors)


def orders(sequences: int, count: int, seed: int) -> Array:
    """Return [count, S]: the order of the trace, then shuffled ones."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = [torch.randperm(sequences, generator=generator).numpy() for _ in range(count - 1)]
    return np.stack([np.arange(sequences), *shuffled])


def concatenated(parts: Sequence[Array], width: int, dtype: Any) -> Array:
    """Return the parts below each other; [0, width] for none."""
    return np.concatenate([np.zeros((0, width), dtype=dtype), *parts])
