"""The contract between a stop policy and its caller: the live loop with one stream, or replay with thousands.

Everything is a numpy array. Shapes: S streams, B branches of a depth, F declared features, H hidden size, N tree nodes. A
chain has B = 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from .profile import Profile

Array = np.ndarray[Any, Any]

State = Any
"""What a policy remembers between calls: None, an array, or nested tuples or dataclasses of arrays. Their first axis is S.
The caller owns it and passes it to the next call. Only the policy reads it."""


@dataclass(slots=True)  # not frozen: one is created for each decision, and freezing takes as long as some rules
class DraftStep:
    """Arguments of a decision: right after the tokens of a depth were drawn, before they are fed to the draft.

    Attributes:
        depth: j, the same for all streams; 0 = before any draft forward. Then B = 1, or the number of drafters of a policy
            that routes: keeping a branch means that its drafter drafts.
        alive: [S, B] bool; the other rows hold zeros and are ignored.
        parent: [S, B] int64, index of the branch's parent among the branches of depth j - 1.
        features: [S, B, F] float32, C-contiguous, in the policy's order; at j = 0 only ANCHOR and HISTORY columns, others 0.
        hidden: declared hidden states by name, each [S, B, H] float32.
        batch: [S] int64, batch index of each stream: streams of a batch share a verification. -1 if the stream is idle.
        drafter: [B] int64, index of the drafter of each branch; None = the policy does not route.
        parent_drafter: the same of the branches of depth j - 1.
    """

    depth: int
    alive: Array
    parent: Array
    features: Array
    hidden: Mapping[str, Array]
    batch: Array
    drafter: Array | None = None
    parent_drafter: Array | None = None


@dataclass(frozen=True)
class DraftTree:
    """The nodes that a round may verify. All arrays are [S, N].

    If decisions must not depend on tokens, the tokens are hidden and `select` is called after each level was drawn, before
    `keep`. Its answer then counts for that level only.

    Attributes:
        tokens: int64; -1 = not drawn, or hidden.
        parent: int64; -1 = the root.
        depth: int64.
        drawn: bool, nodes that were drawn and not dropped.
    """

    tokens: Array
    parent: Array
    depth: Array
    drawn: Array

    @property
    def by_level(self) -> bool:
        """Whether the answer counts for the deepest level only. All drawn nodes above it are verified."""
        # Tokens are hidden in drawn nodes if and only if levels are selected one by one.
        return bool(self.drawn.any()) and not bool((self.tokens[self.drawn] >= 0).any())

    @property
    def offered(self) -> Array:
        """[S, N] bool, the nodes for which the answer counts."""
        return self.drawn & (self.depth == self.depth[self.drawn].max()) if self.by_level else self.drawn


@dataclass(frozen=True)
class RoundOutcome:
    """The outcome of a round. All arrays are [S].

    Attributes:
        active: bool, streams that had a round; the other rows are undefined.
        drafted: int64, tokens drawn.
        verified: int64, tokens sent to the target, k.
        accepted: int64, min(A, k).
        cut: bool, an end of text or a length limit ended the round, so it is no evidence of acceptance.
        seconds: float64, modelled by the latency profile, also in the live loop; measured for a policy that `reads_clock`;
            0 without a profile, or for a policy that does not read seconds.
        drafting: [S, D] bool, drafters that drafted; None = the policy does not route.
    """

    active: Array
    drafted: Array
    verified: Array
    accepted: Array
    cut: Array
    seconds: Array
    drafting: Array | None = None


class StopPolicy:
    """Decides after each draft step which branches to draft further; none = stop and verify.

    A policy is immutable: everything that changes is in the state, which the caller owns. Subclasses implement `keep` and set
    the class attributes that differ from these defaults.

    Attributes:
        features: names of the scalar features that `keep` reads (see `features.FEATURES`), in its order.
        hidden: names of the hidden states that it reads.
        trims: the token of a branch that is not kept is dropped (otherwise it is still verified).
        carries: the state is kept from text to text.
        reads_clock: `observe` receives measured seconds, so runs are not reproducible.
        reads_seconds: `observe` reads the seconds of rounds. If not, they may be 0, because modelling them takes time.
        joint: decisions about a stream may depend on other streams of its batch (`DraftStep.batch`).
        routes: decides at depth 0 which drafters draft; policies that do not route use the first drafter.
        drafter: name of the drafter that it uses if it does not route; "" = the first one.
        joins: may let several drafters draft in one round, the candidates of which are verified together.
        first: the first depth at which `keep` is called; 1 for rules that draft at least one token, as published rules do.
        max_depth: length of the longest draft; `keep` is not called at that depth.
        lengths: [D] int64, draft length of each drafter if the policy decides at depth 0 alone; `keep` is not called later,
            and not at all if `first` is above 0.
        unasked: draft length by number of streams in a round, for batch sizes at which decisions cost more than they gain.
            In such rounds the policy is not called and no features are computed.
        parts: other policies that this one calls. It is treated as a plugin if one of them is.
        source: the folder from which the policy was loaded, or None.
        label: the path or spec with which the user named the policy, or "".
    """

    features: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    trims: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    reads_clock: ClassVar[bool] = False
    reads_seconds: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    routes: ClassVar[bool] = False
    drafter: str = ""
    joins: bool = False
    first: int = 1
    max_depth: int = 20
    lengths: Array | None = None
    unasked: Mapping[int, int] = MappingProxyType({})
    parts: tuple[StopPolicy, ...] = ()
    name: str = "policy"
    source: Path | None = None
    label: str = ""

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of new texts in S streams; `keys` [S] int64 seed the noise of randomised policies."""
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
        """The name in reports and tables: the user's, if there is one."""
        return self.label or self.name

    @property
    def cost_name(self) -> str:
        """The name under which a profile stores the cost of a decision: without the value after the colon."""
        return self.name.partition(":")[0]

    def limited(self, depth: int) -> StopPolicy:
        """Return this policy with drafts of at most `depth` tokens."""
        if self.max_depth <= depth:
            return self
        # A shallow copy shares the tables of the policy, so caches of what depends on `max_depth` have it in their keys.
        other = copy.copy(self)
        other.max_depth = depth
        return other

    def with_costs(self, profile: Profile) -> StopPolicy:
        """Return this policy with the costs of a profile, if it uses costs and has none."""
        return self
