"""Maximum text lengths, and LongRoPE, a position encoding with two sets of factors.

It uses the second set for calls that reach beyond `original_max_position_embeddings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import CachedModel
from .packed import Part

ENDLESS = 1 << 30
"""Maximum text length of a model without a limit on positions."""


def readable(model: PreTrainedModel) -> int:
    """Return the maximum length of a text in tokens."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else ENDLESS


@dataclass(frozen=True)
class LongRope:
    """Length at which the factors of a position encoding change.

    Attributes:
        original: Maximum text length, in tokens, for the first set of factors.
        rereads: Whether `generate` recomputes the cache with the second set of factors once the text is longer (Phi-3).
    """

    original: int
    rereads: bool

    def allowed(self, base: int, depth: int) -> int:
        """Return the largest depth, up to `depth`, at which tokens after a root at `base` still use its factors."""
        return min(depth, self.original - 1 - base) if base < self.original else depth


def long_rope(model: PreTrainedModel) -> LongRope | None:
    """Return at which length the position encoding of a model changes; None if it does not."""
    config, field = model.config.get_text_config(), "original_max_position_embeddings"
    rope = getattr(config, "rope_parameters", None)
    for parameters in (rope, *rope.values()) if isinstance(rope, Mapping) else ():
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "longrope":
            original = parameters.get(field) or getattr(config, "max_position_embeddings", None)
            # Some classes discard the cache in `generate` when the factors change.
            prepare: Any = inspect.unwrap(getattr(type(model), "prepare_inputs_for_generation"))  # noqa: B009
            rereads = field in (*prepare.__code__.co_names, *prepare.__code__.co_consts) and hasattr(
                model.config, field
            )
            return LongRope(int(original), rereads) if original else None
    return None


class LongRopeModel(CachedModel):
    """A `CachedModel` of a model with LongRoPE.

    A call uses the factors of the last position that it reads. To give each text the same factors as decoding of that text
    alone, token by token, no call contains texts on both sides of the boundary, and no round spans it (`LongRope.allowed`).
    """

    def __init__(self, model: PreTrainedModel, capacity: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, capacity, *args, **kwargs)
        rope = long_rope(model)
        assert rope is not None
        self._rope = rope
        self._tokens = torch.zeros(self.streams, capacity, dtype=torch.int64, device=self._device)  # [S, capacity]
        self._long = [False] * self.streams  # whether the cached keys of a stream use the second factors

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
        is_long = (start + tokens.shape[1] if positions is None else 1 + int(positions.max())) > self._rope.original
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
        """Append tokens to several streams: in one call if all use the same factors as before, else in one call each."""
        sides = {self._end(part) > self._rope.original for part in parts}
        if len(sides) == 1 and not (
            True in sides and self._rope.rereads and not all(self._long[p.stream] for p in parts)
        ):
            for part in parts:
                start = self.lengths[part.stream]
                self._tokens[part.stream, start : start + len(part.tokens)] = self._uploaded(part.tokens)[0]
            logits = super().read_parts(parts)
            for part in parts:
                self._long[part.stream] = True in sides
            return logits
        calls = [(self._read_alone(part), self.states) for part in parts]
        states = [states for _, states in calls if states is not None]
        self.states = torch.cat(states, 1) if states else None
        return torch.cat([logits for logits, _ in calls])

    def _end(self, part: Part) -> int:
        """Return the last position of a part plus one."""
        if part.tree is None:
            return self.lengths[part.stream] + len(part.tokens)
        return int(part.tree.base + part.tree.topology.depths[list(part.tree.rows)].max()) + 1
