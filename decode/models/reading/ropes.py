"""Position encodings whose factors depend on the length that is read (`dynamic_rope_update` of transformers).

LongRoPE has two sets of factors, the second for calls that reach beyond `original_max_position_embeddings`; dynamic NTK has
others at every length beyond `max_position_embeddings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class LengthRope:
    """Where the factors change.

    Attributes:
        field: of the configuration that says it.
        original: longest text, in tokens, that is read with the first factors.
        two_sided: there is one other set of factors (LongRoPE); else they change with every token (dynamic NTK).
        rereads: the library reads a text again, with the other factors, once it is longer (Phi-3).
    """

    field: str
    original: int
    two_sided: bool
    rereads: bool

    def allowed(self, base: int, depth: int) -> int:
        """Return the depth, up to `depth`, of a round with roots at `base` whose tokens have the factors of its roots."""
        return min(depth, self.original - 1 - base) if self.two_sided and base < self.original else depth


def length_rope(model: PreTrainedModel) -> LengthRope | None:
    """Return how the position encoding of a model depends on the length; None where it does not."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return None
    kinds: list[Mapping[str, Any]] = [one for one in (rope, *rope.values()) if isinstance(one, Mapping)]
    longest = getattr(config, "max_position_embeddings", None)
    for one in kinds:
        kind = str(one.get("rope_type", ""))
        if kind == "longrope":
            original = one.get("original_max_position_embeddings") or longest
            if original:
                return LengthRope("original_max_position_embeddings", int(original), True, _rereads(model))
        elif "dynamic" in kind and longest:
            return LengthRope("max_position_embeddings", int(longest), False, False)
    return None


def _rereads(model: PreTrainedModel) -> bool:
    """Whether `generate` drops the cache where the factors change, as the class itself decides."""
    prepare: Any = inspect.unwrap(getattr(type(model), "prepare_inputs_for_generation"))  # noqa: B009 - of a mixin
    named = "original_max_position_embeddings" in (*prepare.__code__.co_names, *prepare.__code__.co_consts)
    return named and hasattr(model.config, "original_max_position_embeddings")
