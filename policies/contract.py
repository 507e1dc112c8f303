"""The contract between a stop policy and whoever runs it: the live loop with one stream, replay with thousands.

Everything is a numpy array. Shapes: S streams, B branches at this depth, F declared features, H hidden size, N tree nodes. A
chain has B = 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from .typing import Array as Array

if TYPE_CHECKING:
    from .profile import Profile

State = Any
"""What a policy remembers between calls: None, an array, or nested tuples or dataclasses of arrays, whose first axis is S.
The caller owns it and hands it back; only the policy looks inside."""


@dataclass(slots=True)  # not frozen: one is made for each decision, and that took as long as some rules do
class DraftStep:
    """What is known right after the tokens of one depth were drawn, before they are fed to the draft.

    All arrays are C-contiguous, as compiled code wants them; a policy that shows another one a part sees to that.

    Attributes:
        depth: j, the same for all streams; 0 = before any draft forward (then B = 1).
        alive: [S, B] bool; the other rows hold zeros and are ignored.
        parent: [S, B] int64, the branch's parent among the branches of depth j - 1.
        features: [S, B, F] float32 in the policy's order; at j = 0 only ANCHOR and HISTORY columns, the rest 0.
        hidden: declared hidden states by name, each [S, B, H] float32.
        batch: [S] int64, which streams share a verification; streams that are verified alone all differ, those without a
            round have -1.
    """

    depth: int
    alive: Array
    parent: Array
    features: Array
    hidden: Mapping[str, Array]
    batch: Array


@dataclass(frozen=True)
class DraftTree:
    """The nodes that a round may draft, by depth: `tokens` (-1 = none or hidden), `parent` (-1 = root) and `depth`, int64,
    and which are `drawn` and not trimmed, bool; all [S, N].

    Where the tokens must not matter they are hidden, and `select` is asked level by level: right after a level was drawn,
    before `keep` is shown it, and the answer counts for that level alone.
    """

    tokens: Array
    parent: Array
    depth: Array
    drawn: Array

    @property
    def by_level(self) -> bool:
        """Whether it is asked about the deepest level that was drawn, and all drawn nodes before it are sent."""
        # Tokens are hidden exactly where levels are asked about one by one, and then they are -1 in drawn nodes as well.
        return bool(self.drawn.any()) and not bool((self.tokens[self.drawn] >= 0).any())

    @property
    def offered(self) -> Array:
        """[S, N] bool, the nodes that the answer decides about."""
        if not self.by_level:
            return self.drawn
        deepest = self.depth[self.drawn].max()
        out: Array = self.drawn & (self.depth == deepest)
        return out


@dataclass(frozen=True)
class RoundOutcome:
    """What a finished round was worth. All arrays are [S].

    Attributes:
        active: bool, streams that had a round; the other rows are void.
        drafted: int64, tokens drawn.
        verified: int64, tokens sent to the target, k.
        accepted: int64, min(A, k).
        cut: bool, the round met EOS or a length limit, so it says little about acceptance.
        seconds: float64, modelled by the latency profile, live too; measured for a policy that `reads_clock`; 0 without a
            profile, or where the policy does not read them.
    """

    active: Array
    drafted: Array
    verified: Array
    accepted: Array
    cut: Array
    seconds: Array


class StopPolicy:
    """Decides after each draft step which branches to draft further; none = stop and verify.

    A policy is immutable: all that changes is in the state that the caller owns. Subclasses set the class attributes
    that differ from these defaults and implement `keep`.

    Attributes:
        features: names of the scalar features that `keep` reads (see `features.FEATURES`), in its order.
        hidden: names of the hidden states that it reads.
        trims: a branch that is not kept loses the token just drawn (else that token is still verified).
        carries: state passes from sequence to sequence.
        reads_clock: `observe` gets measured time, so runs are not reproducible.
        reads_seconds: `observe` looks at the seconds of rounds; else they may be 0, as pricing a round takes time as well.
        joint: weighs the streams of a batch against each other: `keep` and `select` are asked for all of them together, and
            what is decided for one may depend on what is known of the others (`DraftStep.batch`).
        first: the first depth at which `keep` is asked; 1 for rules that draft at least one token, as published ones do.
        max_depth: no deeper draft is made; at that depth the policy is not asked any more.
        unasked: tokens drafted by how many streams share a round: in rounds of so many nothing is asked, and nothing read
            for it. For sizes at which decisions cost more than they gain.
        parts: other policies that this one calls, so that a plugin among them is treated as one.
        source: the folder that the policy was loaded from; None = none.
        label: what the user called it, a path or a spec; empty where it was made otherwise.
    """

    features: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    trims: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    reads_clock: ClassVar[bool] = False
    reads_seconds: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    first: int = 1
    max_depth: int = 20
    unasked: Mapping[int, int] = MappingProxyType({})
    parts: tuple[StopPolicy, ...] = ()
    name: str = "policy"
    source: Path | None = None
    label: str = ""

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of fresh sequences.

        Args:
            streams: S.
            keys: [S] int64, a counter-based noise key per stream for randomised policies.
        """
        return None

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Return [S, B] bool, the branches to extend, and the new state."""
        raise TypeError(f"{type(self).__name__} does not implement keep()")

    def select(self, tree: DraftTree, state: State) -> Array | None:
        """Return [S, N] bool, the nodes to verify (closed under parents), once after drafting; None = all."""
        return None

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state after a round."""
        return state

    @property
    def shown_name(self) -> str:
        """How reports and tables call the policy: as the user did, if they did."""
        return self.label or self.name

    @property
    def cost_name(self) -> str:
        """Under which a profile keeps the cost of a decision: the name without the value after the colon."""
        return self.name.partition(":")[0]

    def limited(self, depth: int) -> StopPolicy:
        """Return this policy, never drafting deeper than `depth`."""
        if self.max_depth <= depth:
            return self
        # A shallow copy: tables that a policy keeps are shared with the limited one; what rests on `max_depth` has it as key.
        other = copy.copy(self)
        other.max_depth = depth
        return other

    def with_costs(self, profile: Profile) -> StopPolicy:
        """Return this policy, deciding by the costs of a profile where it decides by costs and was given none."""
        return self
