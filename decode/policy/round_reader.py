"""What a policy is shown of one round of the live loop: read when it is asked, so that nothing is read for nobody."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.history import History
from ..round_state import DraftScores, RoundState
from ..topology import Topology
from .reader import Base, Level, Reader


class RoundReader:
    """Reads a round of S streams for a policy.

    Args:
        policy: any stop policy.
        widths: H of each hidden state that the policy reads.
        size: S.
        topology: of a round.
        temperature: of the sampling.
    """

    def __init__(
        self,
        policy: StopPolicy,
        widths: Mapping[str, int],
        size: int,
        topology: Topology,
        temperature: float,
    ) -> None:
        self._reader = Reader(policy, widths, size)
        self._size, self._topology, self._temperature = size, topology, temperature
        self._unread: DraftScores | None = None

    def begin(self, round: RoundState) -> None:
        """Begin a round; also in the middle of one, where a policy takes over."""
        self.round = round
        self._base: Base | None = None
        self._level: Level | None = None
        self._unread = None

    def drawn(self, depth: int, scores: DraftScores) -> None:
        """Keep what the tokens of a depth were drawn from until the policy is asked about them."""
        if self._reader.wants(depth, self._topology.deepest):
            # What was there before has been read by now (`ModelSource.grow`).
            self._unread = scores

    @property
    def has_unread_path(self) -> bool:
        """Whether there is something that the policy was not asked about, but that paths lead through."""
        # What else was drawn without a question, as where a policy is not asked at all, is not worth a look.
        return self._unread is not None and self._reader.follows_path

    def read(self) -> None:
        """Read what paths lead through."""
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
        texts = [
            (s, text, anchor)
            for s, (text, anchor) in enumerate(zip(self.round.texts, self.round.anchors, strict=True))
            if text is not None and anchor is not None
        ]
        streams = None if len(texts) == self._size else [stream for stream, _, _ in texts]
        if not self._reader.reads_target:
            return self._reader.base(history, self._temperature, streams=streams)
        rows = [anchor.row for _, _, anchor in texts]
        states = [anchor.hidden for _, _, anchor in texts if anchor.hidden is not None]
        return self._reader.base(
            history,
            self._temperature,
            rows[0] if len(rows) == 1 else torch.cat(rows),
            [(text.tokens[-1], text.tokens[-2]) for _, text, _ in texts],  # anchors, the tokens before them
            torch.cat(states) if states else None,
            streams,
        )

    def _read_level(self, base: Base) -> None:
        """Read the tokens drawn last."""
        assert self._unread is not None
        self._level = self._reader.level(self.round, self._unread, self._temperature, base, self._level)
        self._unread = None
