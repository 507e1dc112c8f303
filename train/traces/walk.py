"""Where the streams of a replay are: their text, their anchor, what the draft has read, what the policy remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.checking import check_policy
from ...policies.contract import RoundOutcome, State, StopPolicy, checked_observe, checked_start
from ...policies.costs import Profile
from ...policies.errors import TraceError
from ...policies.features import Layout
from ...policies.history import History
from ...policies.vectors import check_sizes
from .data import TraceArrays

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Drafted:
    """What the streams drafted in a round; all [R].

    Attributes:
        drafted, verified: tokens drawn, and sent to the target.
        accepted: min(A, k).
        read: accepted tokens that the draft has read.
        decisions: times the policy was asked.
        capped: a limit or EOS ended drafting.
        fed: [R, K] tokens read at each draft step, of trees; None for chains.
    """

    drafted: Tensor
    verified: Tensor
    accepted: Tensor
    read: Tensor
    decisions: Tensor
    capped: Tensor
    fed: Tensor | None = None


class Walk:
    """R streams, each with a queue of texts that it decodes one after the other.

    Args:
        arrays: a trace.
        policy: asked.
        profile: prices rounds.
        queues: [R, Q] sequences; with more than one in a queue the policy's state passes from text to text.
    """

    def __init__(self, arrays: TraceArrays, policy: StopPolicy, profile: Profile, queues: Tensor) -> None:
        self.arrays, self.policy, self.profile, self.queues = arrays, policy, profile, queues
        self.layout = Layout(policy.features)
        anchors, nodes = arrays.tensors(policy.features)
        self.anchor_columns, self.node_columns = anchors.numpy(), nodes.numpy()
        self._vectors = {name: arrays.vector(name) for name in policy.vectors}
        self.price = profile.decision(policy.cost_name)
        self.turn = torch.zeros(len(queues), dtype=torch.int64)
        self.sequence = queues[:, 0]
        self.state: State = checked_start(policy, len(queues), arrays.keys[self.sequence])
        self.history = History.start(len(queues))
        self.anchor = arrays.first_anchor[self.sequence]
        self.backlog = arrays.prompt_tokens[self.sequence] + self.anchor
        self.active = torch.ones(len(queues), dtype=torch.bool)
        self._skip_finished()

    def _skip_finished(self) -> None:
        """Go on to the next text where one has ended."""
        arrays = self.arrays
        while True:
            ended = self.active & (self.anchor >= arrays.text_tokens[self.sequence])
            if not bool(ended.any()):
                return
            self.turn = self.turn + ended
            self.active = self.turn < self.queues.shape[1]
            at = self.turn.clamp_max(self.queues.shape[1] - 1)
            self.sequence = self.queues.gather(1, at[:, None])[:, 0]
            begins = ended & self.active
            fresh = History.start(len(self.queues))
            self.history = History(
                torch.where(begins[:, None], fresh.record, self.history.record),
                torch.where(begins, fresh.weight, self.history.weight),
            )
            self.anchor = torch.where(begins, arrays.first_anchor[self.sequence], self.anchor)
            self.backlog = torch.where(begins, arrays.prompt_tokens[self.sequence] + self.anchor, self.backlog)

    @cached_property
    def first_end(self) -> Tensor:
        """[N] of chains, the depth of the first node that drew EOS; beyond the tree where none did."""
        ends = self.arrays.ends
        if not self.arrays.header.eos or not ends.shape[1]:
            return torch.full((len(ends),), ends.shape[1] + 1)
        return torch.where(ends.any(1), ends.int().argmax(1) + 1, ends.shape[1] + 1)

    def base(self, row: Tensor) -> Array:
        """Return [R, F] float32, the ANCHOR and HISTORY columns of the rounds at these rows, the rest 0."""
        past = self.history.values(self.layout.history).numpy()
        return self.layout.base(self.anchor_columns[row.numpy()], past)

    def vectors(self, row: Tensor, nodes: Tensor | None, alive: Tensor) -> dict[str, Tensor]:
        """Return the hidden states that the policy reads, each [R, B, H]; 0 where a branch is not alive.

        Args:
            row: [R] of the anchors.
            nodes: [B] of the branches; None at depth 0.
            alive: [R, B].
        """
        out = {}
        for name, recorded in self._vectors.items():
            full = torch.zeros(*alive.shape, recorded.width)
            if nodes is not None or not recorded.of_nodes:
                stream, branch = alive.nonzero(as_tuple=True)
                full[stream, branch] = recorded.at(row[stream], None if nodes is None else nodes[branch]).float()
            out[name] = full
        return out

    def rows(self) -> Tensor:
        """Return [R], the row of each stream's anchor; any row for finished ones.

        Raises:
            TraceError: the trace has no round there: it was recorded under a policy that did not come by.
        """
        row = self.arrays.find(self.sequence, self.anchor)
        missing = self.active & (row < 0)
        if bool(missing.any()):
            at = int(missing.nonzero()[0, 0])
            name = self.arrays.prompt_ids[int(self.sequence[at])]
            raise TraceError(
                f"{self.policy.name} comes to anchor {int(self.anchor[at])} of {name!r}, where the trace has no round "
                f"({self._origin()}); collect dense traces to replay any policy"
            )
        return torch.where(self.active, row, self.arrays.offset[self.sequence])

    def _origin(self) -> str:
        header = self.arrays.header
        return f"it was recorded under {header.policy}" if header.policy else f"its texts are {header.texts}"

    def allowed(self) -> Tensor:
        """Return [R], the depth at which the length limit ends drafting."""
        return self.arrays.header.max_new_tokens - self.anchor - 1

    def advance(self, row: Tensor, made: Drafted) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Commit a round and move on; return [R] committed and seconds, [R', 5] the log and [R', 4] the history of those
        that were active: sequence, anchor, drafted, verified, accepted."""
        arrays, active = self.arrays, self.active
        text = arrays.text_tokens[self.sequence]
        accepted = made.accepted * active
        committed = torch.minimum(accepted + 1, text - self.anchor) * active
        context = arrays.prompt_tokens[self.sequence] + self.anchor
        seconds = self.profile.round_seconds(
            context, made.drafted, made.verified, self.backlog, made.decisions, self.price, made.fed
        )
        seconds = seconds * active
        ends = self.anchor + committed >= text
        cut = (made.capped | ends) & active
        before = self.history.values()[active]
        self.history = self.history.after(accepted, made.verified, active & ~cut)
        told = RoundOutcome(active, made.drafted, made.verified, accepted, cut, seconds)
        copies = {
            name: values.clone() for name, values in vars(told).items()
        }  # a plugin may write into what it is told
        self.state = checked_observe(self.policy, RoundOutcome(**copies), self.state)
        log = torch.stack([self.sequence, self.anchor, made.drafted, made.verified, accepted], 1)[active]
        # The draft has read what was fed of the accepted path; what was rejected is forgotten.
        backlog = committed + torch.where(made.drafted > 0, -made.read, self.backlog)
        self.backlog = torch.where(active, backlog, self.backlog)
        self.anchor = self.anchor + committed
        self._skip_finished()
        return committed, seconds, log, before


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
    if missing := [name for name in policy.vectors if name not in arrays.vectors]:
        models = ",".join(name.removesuffix("_hidden") for name in missing)
        raise TraceError(
            f"{policy.name} reads hidden states ({', '.join(missing)}), which the trace was recorded without; "
            f"collect it with --hidden {models}"
        )
    check_sizes(policy, header.vectors)


def orders(sequences: int, count: int, seed: int) -> Tensor:
    """Return [count, S]: the order of the trace, then shuffled ones."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = [torch.randperm(sequences, generator=generator) for _ in range(count - 1)]
    return torch.stack([torch.arange(sequences), *shuffled])


def concatenated(parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    """Return the parts below each other; [0, width] for none."""
    return torch.cat([torch.zeros(0, width, dtype=dtype), *parts])
