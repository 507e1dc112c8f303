"""Position encodings that depend on the length: the text is that of plain decoding, whatever is drafted, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import table
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import join
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.policies.baselines.fixed import FixedLength
from specstop.policies.errors import InputError
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

NEW = 24
ORIGINAL = 24
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 200, "initializer_range": 0.4, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = [[5, 9, 17, 33, 3, 8], [7, 7, 9, 41, 22, 60, 12, 30, 31, 5, 44, 18], [3 + at * at % 60 for at in range(27)]]
"""Two that reach the boundary, one of them early, and one that is longer."""


def model(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if kind == "phi3":  # its `generate` reads a text again where the factors change
        made: PreTrainedModel = Phi3ForCausalLM(
            Phi3Config(**SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=LONG)
        )
    else:
        made = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LONG if kind == "llama-long" else rope))
    return made.double().eval()


@pytest.mark.parametrize(
    ("kind", "draft_kind"),
    [("phi3", "same"), ("phi3", "llama-long"), ("llama-long", "same"), ("llama", "phi3"), ("llama", "llama-long")],
)
def test_texts_are_those_of_generate(kind: str, draft_kind: str) -> None:
    target = model(kind)
    draft = table.noisy(target) if draft_kind == "same" else model(draft_kind, 1)
    pair = join(target, draft)
    expected = [table.plain(target, prompt, NEW) for prompt in PROMPTS]
    assert plain_texts(pair, PROMPTS, [0] * 3, NEW).tokens == expected
    for depth, tree, verification, batch in (
        (0, None, "auto", 3), (2, None, "match", 1), (4, None, "auto", 3), (8, None, "rejection", 1),
        (3, None, "rejection", 3), (2, "2,2", "match", 3), (3, "3,2,1", "rejection", 1), (2, "2,2", "auto", 1),
    ):  # fmt: skip
        settings = Settings(0.0, NEW, tree=tree, verification=verification)
        speculator = Speculator(pair, FixedLength(depth), settings, batch=batch)
        made = [list(one.tokens) for one in speculator.run([Request(prompt) for prompt in PROMPTS])]
        assert made == expected, (depth, tree, verification, batch)


def test_dynamic_factors_are_refused_beyond_the_length_where_they_change() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target = (
        LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 30}, rope_parameters=rope)).double().eval()
    )
    pair = join(target, table.noisy(target))
    prompt = PROMPTS[0]
    made = Speculator(pair, FixedLength(4), Settings(0.0, NEW)).run([Request(prompt)])[0]
    assert list(made.tokens) == table.plain(target, prompt, NEW)
    with pytest.raises(InputError, match="reads at most 30"):
        Speculator(pair, FixedLength(4), Settings(0.0, NEW + 1)).run([Request(prompt)])
