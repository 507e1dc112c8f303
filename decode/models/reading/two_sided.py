"""A cached model with a position encoding that changes its factors at a given length (LongRoPE).

A call uses the factors of the last position that it reads. To give each text the same factors as token-by-token decoding of
that text alone, no call contains texts on both sides of the boundary, and no round spans it (`LengthRope.allowed`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import CachedModel
from ..packing import Part, split
from .modes import Reading
from .ropes import LengthRope


class TwoSidedModel(CachedModel):
    """A `CachedModel` of a model with LongRoPE.

    Args:
        model, capacity, vocabulary, hidden, streams, device, reading: See `CachedModel`.
        rope: Length at which the factors change.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        vocabulary: int,
        hidden: bool | Sequence[int],
        streams: int,
        device: torch.device | None,
        reading: Reading,
        rope: LengthRope,
    ) -> None:
        super().__init__(model, capacity, vocabulary, hidden, streams, device, reading)
        self._rope = rope
        self._tokens = torch.zeros(streams, capacity, dtype=torch.int64, device=self._device)  # [S, capacity]
        self._long = [False] * streams  # whether the cached keys of a stream use the second factors

    def read(
        self,
        tokens: Tensor,
        rows: int = 0,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        stream: int = 0,
    ) -> Tensor:
        """Append `tokens` to a stream and return logits; see `CachedModel.read`."""
        start = self.lengths[stream]
        last = start + tokens.shape[1] if positions is None else 1 + int(positions.max())
        is_long = last > self._rope.original
        if self._rope.rereads and start and is_long and not self._long[stream]:
            # Like `generate`, read all earlier tokens again with the second factors. The first new token is included because
            # the call must reach beyond the boundary.
            before = torch.cat([self._tokens[stream : stream + 1, :start], tokens[:, :1]], 1)
            self.roll_back(0, stream)
            super().read(before, 1, stream=stream)
            self.roll_back(start, stream)
        self._tokens[stream, start : start + tokens.shape[1]] = tokens[0]
        logits = super().read(tokens, rows, mask, positions, stream)
        self._long[stream] = is_long
        return logits

    def roll_back(self, length: int, stream: int = 0) -> None:
        """Remove all tokens of a stream after the first `length`."""
        super().roll_back(length, stream)
        self._long[stream] &= length > 0

    def keep(self, base: int, slots: Sequence[int], stream: int = 0) -> None:
        """Remove all tokens of a stream after `base` except those in `slots`; see `CachedModel.keep`."""
        tokens = self._tokens[stream]
        tokens[base : base + len(slots)] = tokens[list(slots)]
        super().keep(base, slots, stream)

    def read_parts(self, parts: Sequence[Part]) -> Tensor:
        """Append tokens to several streams: one call for each side of the boundary and one for each text that reaches it."""
        groups: dict[int, list[Part]] = {}
        for part in parts:
            is_long = self._end(part) > self._rope.original
            changes = self._rope.rereads and is_long and not self._long[part.stream]
            groups.setdefault(part.stream if changes else -1 - is_long, []).append(part)
        outputs: dict[int, tuple[Tensor, Tensor | None]] = {}
        for group in groups.values():
            for part in group:
                start = self.lengths[part.stream]
                self._tokens[part.stream, start : start + len(part.tokens)] = self._uploaded(part.tokens)[0]
            ends = [self._end(part) for part in group]
            logits, bounds = super().read_parts(group), split(group)
            for part, first, end, last in zip(group, bounds[:-1], bounds[1:], ends, strict=True):
                self._long[part.stream] = last > self._rope.original
                outputs[part.stream] = logits[first:end], None if self.states is None else self.states[:, first:end]
        if len(groups) > 1:
            states = [outputs[part.stream][1] for part in parts]
            self.states = torch.cat([state for state in states if state is not None], 1) if self._hidden else None
        return torch.cat([outputs[part.stream][0] for part in parts])

    def _end(self, part: Part) -> int:
        """Return the last position of a part plus one."""
        if part.tree is None:
            return self.lengths[part.stream] + len(part.tokens)
        return int(part.tree.base + part.tree.topology.depths[list(part.tree.rows)].max()) + 1
