"""Position encodings with factors that depend on the text length (`dynamic_rope_update` of transformers).

LongRoPE has two sets of factors. It uses the second set for calls that reach beyond `original_max_position_embeddings`.
Dynamic NTK changes the factors with every token beyond `max_position_embeddings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class LengthRope:
    """Length at which the factors of a position encoding change.

    Attributes:
        field: Configuration field that defines the length.
        original: Maximum text length, in tokens, for the first set of factors.
        two_sided: Whether there is a second set of factors (LongRoPE). If False, they change with every token (dynamic NTK).
        rereads: Whether `generate` recomputes the cache with the second set of factors once the text is longer (Phi-3).
    """

    field: str
    original: int
    two_sided: bool
    rereads: bool

    def allowed(self, base: int, depth: int) -> int:
        """Return the largest depth, up to `depth`, at which tokens after a root at `base` still use its factors."""
        return min(depth, self.original - 1 - base) if self.two_sided and base < self.original else depth


def length_rope(model: PreTrainedModel) -> LengthRope | None:
    """Return how the position encoding of a model depends on the length; None if it does not."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return None
    candidates: list[Mapping[str, Any]] = [entry for entry in (rope, *rope.values()) if isinstance(entry, Mapping)]
    longest = getattr(config, "max_position_embeddings", None)
    for parameters in candidates:
        kind = str(parameters.get("rope_type", ""))
        if kind == "longrope":
            original = parameters.get("original_max_position_embeddings") or longest
            if original:
                return LengthRope("original_max_position_embeddings", int(original), True, _rereads(model))
        elif "dynamic" in kind and longest:
            return LengthRope("max_position_embeddings", int(longest), False, False)
    return None


def _rereads(model: PreTrainedModel) -> bool:
    """Whether the class discards the cache in `generate` when the factors change."""
    prepare: Any = inspect.unwrap(getattr(type(model), "prepare_inputs_for_generation"))  # noqa: B009 - defined by a mixin
    named = "original_max_position_embeddings" in (*prepare.__code__.co_names, *prepare.__code__.co_consts)
    return named and hasattr(model.config, "original_max_position_embeddings")
