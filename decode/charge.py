"""The policy in charge of a text: asked here, told here how rounds went, and replaced when it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..policies.baselines.fixed import FixedLength
from ..policies.contract import RoundOutcome, State, StopPolicy, checked_observe, checked_select, checked_start
from ..policies.errors import SpecstopWarning
from ..policies.plugin_code import reason
from .candidates import Candidates
from .decide import Base, Decider, Level
from .guard import best_fixed, describe, make_watch
from .settings import Text


class Guard:
    """A policy that cannot harm the text: one that raises or breaks the contract is reported once and replaced.

    Args:
        policy: the user's.
        chain: whether no round has more than one branch.
        fallback: length that is drafted after a failure.
        mode: of the live guard: off, warn, or fallback (`guard`).
        widths: H of each hidden state that the policy reads.

    Attributes:
        policy: the one in charge.
        decider: asks it.
        carried: its state between texts, if it carries one.
    """

    def __init__(
        self,
        policy: StopPolicy,
        chain: bool,
        fallback: int,
        mode: str = "off",
        widths: Mapping[str, int] | None = None,
    ) -> None:
        self.policy, self._chain, self._fallback = policy, chain, fallback
        self._watch, self._mode = make_watch(policy, mode, chain), mode
        self.decider = Decider(policy, widths)
        self.carried: State = None
        self._warned = False
        self._given = policy, self.decider

    def renew(self) -> None:
        """Put the user's policy in charge again and forget what it has carried from text to text."""
        self.policy, self.decider = self._given
        self._watch = make_watch(self.policy, self._mode, self._chain)
        self.carried = None

    def start(self, text: Text, key: int) -> None:
        """Give the text its policy state."""
        text.policy_state = self.carried
        if self.carried is None:
            try:
                text.policy_state = checked_start(self.policy, 1, np.array([key], dtype=np.int64))
            except Exception as error:  # a plugin may raise anything; the text must not suffer
                self._fail(text, error)

    def keep(
        self, text: Text, depth: int, base: Base, level: Level | None, found: Candidates, alive: Sequence[int]
    ) -> list[int]:
        """Return the places to draft on from."""
        try:
            kept, text.policy_state = self.decider(depth, base, level, text.policy_state, found, alive)
        except Exception as error:  # a plugin may raise anything; the text must not suffer
            self._fail(text, error)
            return list(alive) if depth < self._fallback else []
        if self._watch is not None:
            self._watch.decided(depth, float(text.policy_state[0, 0]))  # of a learned policy: S_j
        return kept

    @property
    def listens(self) -> bool:
        """Whether anybody is to be told how a round went."""
        return self._watch is not None or type(self.policy).observe is not StopPolicy.observe

    @property
    def selects(self) -> bool:
        """Whether the policy chooses among what was drafted."""
        return type(self.policy).select is not StopPolicy.select

    def select(self, text: Text, found: Candidates, hide_tokens: bool) -> list[bool] | None:
        """Return by row of the topology whether the target shall verify it; None = all."""
        if not self.selects or not found.drafted:
            return None
        try:
            mask = checked_select(self.policy, found.tree(hide_tokens), text.policy_state)
        except Exception as error:  # a plugin may raise anything; the text must not suffer
            self._fail(text, error)
            return None
        return None if mask is None else [True] * found.topology.roots + mask[0].tolist()

    def finished(self, text: Text, accepted: int, verified: int, cut: bool) -> None:
        """Compare live acceptance with what the policy predicted; warn, or fall back, once it leaves the band."""
        if self._watch is None:
            return
        self._watch.finished(accepted, verified, cut)
        band = self._watch.band()
        if band is None or not band.left:
            return
        message = describe(self.policy, band)
        if self._mode == "fallback":
            length = best_fixed(self.policy, self._watch.conditional(), self._fallback)
            self._replace(text, FixedLength(length))
            message += f"; drafting {length} tokens a round from here on"
        self._watch = None
        warnings.warn(message, SpecstopWarning, stacklevel=2)

    def ended(self, text: Text, outcome: Callable[[], RoundOutcome]) -> None:
        """Tell the policy that the round is over; `outcome` is made only for one that wants to hear how it went."""
        if type(self.policy).observe is StopPolicy.observe:
            return
        try:
            text.policy_state = checked_observe(self.policy, outcome(), text.policy_state)
        except Exception as error:  # a plugin may raise anything; the text must not suffer
            self._fail(text, error)

    def _fail(self, text: Text, error: Exception) -> None:
        """Warn once and go on with the fixed fallback length."""
        if not self._warned:
            name = self.policy.name
            warnings.warn(
                f"policy {name} failed ({reason(error).removeprefix(f'{name}: ')}); drafting "
                f"{self._fallback} tokens a round from here on",
                SpecstopWarning,
                stacklevel=2,
            )
        self._warned = True
        self._watch = None
        self._replace(text, FixedLength(self._fallback))

    def _replace(self, text: Text, policy: StopPolicy) -> None:
        """Put another policy in charge."""
        self.policy = policy
        self.decider = Decider(policy)
        text.policy_state = self.carried = None
