"""The contract between a stop policy and whoever runs it: the live loop with one stream, replay with thousands.

Shapes: S streams, B branches at this depth, F declared features, H hidden size, N tree nodes. A chain has B = 1.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .errors import PolicyFailure
from .plugin_code import contained, own

State = Any
"""What a policy remembers between calls. The caller owns it and hands it back; only the policy looks inside."""


@dataclass(frozen=True)
class DraftStep:
    """What is known right after the tokens of one depth were drawn, before they are fed to the draft.

    Attributes:
        depth: j, the same for all streams; 0 = before any draft forward (then B = 1).
        alive: [S, B] bool; the other rows hold zeros and are ignored.
        parent: [S, B] int64, the branch's parent among the branches of depth j - 1.
        features: [S, B, F] in the policy's order; at j = 0 only ANCHOR and HISTORY columns, the rest 0.
        vectors: declared hidden states by name, each [S, B, H].
    """

    depth: int
    alive: Tensor
    parent: Tensor
    features: Tensor
    vectors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftTree:
    """The nodes that a round may draft, by depth: `tokens` (-1 = none or hidden), `parent` (-1 = root), `depth`, and which
    are `drawn` and not trimmed; all [S, N]."""

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    drawn: Tensor


@dataclass(frozen=True)
class RoundOutcome:
    """What a finished round was worth. All tensors are [S].

    Attributes:
        active: streams that had a round; the other rows are void.
        drafted: tokens drawn.
        verified: tokens sent to the target, k.
        accepted: min(A, k).
        cut: the round met EOS or a length limit, so it says little about acceptance.
        seconds: modelled by the latency profile, live too; measured for a policy that `reads_clock`; 0 without a profile.
    """

    active: Tensor
    drafted: Tensor
    verified: Tensor
    accepted: Tensor
    cut: Tensor
    seconds: Tensor


class StopPolicy:
    """Decides after each draft step which branches to draft further; none = stop and verify.

    A policy is immutable: all that changes is in the state that the caller owns. Subclasses set the class attributes
    that differ from these defaults and implement `keep`.

    Attributes:
        features: names of the scalar features that `keep` reads (see `features.FEATURES`), in its order.
        vectors: names of the hidden-state vectors that it reads.
        trims: a branch that is not kept loses the token just drawn (else that token is still verified).
        carries: state passes from sequence to sequence.
        reads_clock: `observe` gets measured time, so runs are not reproducible.
        first: the first depth at which `keep` is asked; 1 for rules that draft at least one token, as published ones do.
        max_depth: no deeper draft is made; at that depth the policy is not asked any more.
        source: the folder that the policy was loaded from; None = none.
    """

    features: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    trims: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    reads_clock: ClassVar[bool] = False
    first: int = 1
    max_depth: int = 20
    name: str = "policy"
    source: Path | None = None

    def start(self, streams: int, key: Tensor) -> State:
        """Return the state of fresh sequences.

        Args:
            streams: S.
            key: [S] int64, a counter-based noise key per stream for randomised policies.
        """
        return None

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Return [S, B] bool, the branches to extend, and the new state."""
        raise TypeError(f"{type(self).__name__} does not implement keep()")

    keep_one: ClassVar[Callable[..., tuple[bool, State]] | None] = None
    """`keep` for one stream with one branch on the CPU, without tensors: (depth, F features as plain float32 numbers, state)
    -> (draft on, state). A policy with `vectors` is handed them as a fourth argument, float32 arrays [H] by name. Optional;
    it must decide as `keep` does. Its state is its own."""

    keep_few: ClassVar[Callable[..., tuple[list[bool], State]] | None] = None
    """`keep` for one stream with few branches on the CPU, without tensors: (depth, alive, parent, F columns, state), the
    former by branch, as is each column of features, -> (branches to extend, state). Optional; it must decide as `keep` does
    for one stream, and keep its state in the same form."""

    select_few: ClassVar[Callable[..., list[bool]] | None] = None
    """`select` for one stream on the CPU, without tensors: (parent, depth, drawn, state), the first three by node, -> the
    nodes to verify. Optional; it must select as `select` does."""

    forget: ClassVar[Callable[..., State] | None] = None
    """`observe` of a policy to which it does not matter how a round went, only that it is over: state -> state. Optional; it
    spares the loop the making of an outcome."""

    def select(self, tree: DraftTree, state: State) -> Tensor | None:
        """Return [S, N] bool, the nodes to verify (closed under parents), once after drafting; None = all."""
        return None

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state after a round."""
        return state

    @property
    def cost_name(self) -> str:
        """Under which a profile keeps the cost of a decision: the name without the value after the colon."""
        return self.name.partition(":")[0]

    def limited(self, depth: int) -> StopPolicy:
        """Return this policy, never drafting deeper than `depth`."""
        if self.max_depth <= depth:
            return self
        other = copy.copy(self)
        other.max_depth = depth
        return other


def checked_start(policy: StopPolicy, streams: int, key: Tensor) -> State:
    """Return the state of fresh sequences; what a plugin raises is a `PolicyFailure`."""
    with contained(policy, "start()"):
        return policy.start(streams, key)


def checked_observe(policy: StopPolicy, outcome: RoundOutcome, state: State) -> State:
    """Return the state after a round; what a plugin raises is a `PolicyFailure`."""
    with contained(policy, "observe()"):
        return policy.observe(outcome, state)


def checked_keep(policy: StopPolicy, step: DraftStep, state: State) -> tuple[Tensor, State]:
    """Ask the policy and hold it to the contract: a bool tensor of the shape of `step.alive`.

    Raises:
        PolicyFailure: a plugin raised an error; or the answer is not a pair, not a bool tensor, or one of another shape or
            on another device.
    """
    with contained(policy, "keep()"):
        answer = policy.keep(step, state)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise PolicyFailure(f"{policy.name}: keep() must return (mask, state), not {type(answer).__name__}")
        mask, state = answer
        _check_mask(mask, step.alive, f"{policy.name}: keep()")
        return mask & step.alive, state


def checked_select(policy: StopPolicy, tree: DraftTree, state: State) -> Tensor | None:
    """Ask the policy which nodes to verify and hold it to the contract: None, or a bool tensor of the shape of the tree.

    Raises:
        PolicyFailure: a plugin raised an error; or the answer is no bool tensor, or one of another shape or device.
    """
    with contained(policy, "select()"):
        mask = policy.select(tree, state)
        if mask is not None:
            _check_mask(mask, tree.drawn, f"{policy.name}: select()")
        return mask


def checked_short(policy: StopPolicy, method: str) -> Any:
    """Return `keep_one`, `keep_few`, `select_few` or `forget`, None where the policy has none; a plugin's is held to the
    contract as `checked_keep` does."""
    call = getattr(policy, method)
    if call is None or own(policy):
        return call

    doing = f"{method}()"

    def checked(*args: Any) -> Any:
        with contained(policy, doing):
            answer = call(*args)
            if method != "forget":
                _check_flags(policy, method, answer, args)
            return answer

    return checked


def _check_flags(policy: StopPolicy, method: str, answer: Any, args: tuple[Any, ...]) -> None:
    if method == "keep_one" and answer.__class__ is tuple and len(answer) == 2 and answer[0].__class__ is bool:
        return  # at once: the other decisions of this kind take a microsecond
    who = f"{policy.name}: {method}()"
    if method != "select_few":
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise PolicyFailure(f"{who} must return a pair with the state, not {type(answer).__name__}")
        answer, args = answer[0], args[1:]
    flags, count = ([answer], 1) if method == "keep_one" else (answer, len(args[0]))
    if not isinstance(flags, list) or len(flags) != count or not all(isinstance(f, (bool, np.bool_)) for f in flags):
        expected = "a bool" if method == "keep_one" else f"a list of {count} bools"
        raise PolicyFailure(f"{who} must return {expected}, not {reprlib.repr(answer)}")


def _check_mask(mask: Any, like: Tensor, who: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise PolicyFailure(f"{who} must return a bool tensor, not {kind}")
    if mask.shape != like.shape or mask.device != like.device:
        raise PolicyFailure(
            f"{who} must return shape {tuple(like.shape)} on {like.device}, not {tuple(mask.shape)} on {mask.device}"
        )
