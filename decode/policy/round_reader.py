"""What a policy is shown of one round of the live loop: read when it is asked, so that nothing is read for nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.history import History
from ..stream import Stream
from ..topology import Topology
from .reader import Base, Level, Logits, Reader


class RoundReader:
    """Reads a round of S streams for a policy.

    Args:
        policy: any stop policy.
        widths: H of each hidden state that the policy reads.
        size: S.
        topology: of a round.
        temperature: of the sampling.
        streams: of the round that is being played, where the policy takes over in the middle of one.
    """

    def __init__(
        self,
        policy: StopPolicy,
        widths: Mapping[str, int],
        size: int,
        topology: Topology,
        temperature: float,
        streams: Sequence[Stream] = (),
    ) -> None:
        self._reader = Reader(policy, widths, size)
        self._size, self._topology, self._temperature = size, topology, temperature
        self.begin(streams)

    def begin(self, streams: Sequence[Stream]) -> None:
        """Begin a round of these streams."""
        self._streams = streams
        self._base: Base | None = None
        self._level: Level | None = None
        self._unread: tuple[Sequence[Sequence[int]], Logits] | None = None

    def drawn(self, depth: int, places: Sequence[Sequence[int]], logits: Logits | None) -> None:
        """Keep what the places of each stream were drawn from, at a depth, until the policy is asked about them."""
        if logits is not None and self._reader.wants(depth, self._topology.deepest):
            # What was there before has been read by now (`ModelSource.grow`).
            self._unread = places, logits

    @property
    def passed(self) -> bool:
        """Whether there is something that the policy was not asked about, but that paths lead through."""
        # What else was drawn without a question, as where a policy is not asked at all, is not worth a look.
        return self._unread is not None and self._reader.follows_path

    def read(self) -> None:
        """Read what was `passed`."""
        self._read_level(self._reader.unknown)

    def step(self, depth: int, alive: Array, history: History) -> DraftStep:
        """Return what the policy is shown of the branches that are `alive` [S, B]."""
        # Once a round, within which neither anchor nor history changes.
        if self._base is None:
            self._base = self._read_base(history)
        if self._unread is not None:
            self._read_level(self._base)
        return self._reader.step(depth, self._base, self._level, self._topology, alive)

    def _read_base(self, history: History) -> Base:
        """Return what is known of the round before its first token."""
        streams = self._streams
        playing = None if len(streams) == self._size else [own.number for own in streams]
        if not self._reader.reads_target:
            return self._reader.base(history, self._temperature, streams=playing)
        rows = [own.text.anchor.row for own in streams]
        states = [own.text.anchor.hidden for own in streams if own.text.anchor.hidden is not None]
        return self._reader.base(
            history,
            self._temperature,
            rows[0] if len(rows) == 1 else torch.cat(rows),
            [(own.text.roots[0], own.text.tokens[own.base - 1]) for own in streams],  # anchors, the tokens before them
            torch.cat(states) if states else None,
            playing,
        )

    def _read_level(self, base: Base) -> None:
        """Read the tokens drawn last."""
        assert self._unread is not None
        places, logits = self._unread
        turns = [(own.number, own.found, some) for own, some in zip(self._streams, places, strict=True) if some]
        self._level = self._reader.level(turns, logits, self._temperature, base, self._level)
        self._unread = None
