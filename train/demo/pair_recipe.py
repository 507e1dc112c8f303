"""What decides the weights of a demo pair, and the recipes at hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class ModelShape:
    """Widths of one Llama model."""

    hidden: int
    layers: int
    heads: int
    intermediate: int

    def build(self, vocabulary: int, positions: int, end: int = 0) -> LlamaForCausalLM:
        """Return a freshly initialised model with tied embeddings, on the default device."""
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            # The library's 0.02 suits wide models; these learn twice as fast from the usual fan-in scale.
            initializer_range=self.hidden**-0.5,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
        )
        return LlamaForCausalLM(config)


@dataclass(frozen=True)
class PairRecipe:
    """Everything that decides the weights, apart from the documents.

    Attributes:
        vocabulary: Entries of the tokenizer and of both models.
        target: Shape of the target.
        draft: Shape of the draft.
        steps: Steps in which both models learn the text.
        batch: Windows per step.
        length: Tokens per window.
        target_rate: Peak learning rate of the target.
        draft_rate: Peak learning rate of the draft.
        warmup: Share of the steps over which a rate rises; it falls to zero over the others.
        weight_decay: Decay of the matrices.
        positions: `max_position_embeddings` of both models.
        held_out: Share of the documents held out for prompts.
        text_bytes: Size of the text to learn, 0 for all of it. A small text seen often gives a sharp target,
            which is what a short training can afford.
        shallow_layers: Lower target layers that are trained alone at first.
        shallow_share: Share of the steps with only those layers; the others join in as additions of nothing.
        own_rows: Texts that the target writes itself and the draft then learns to follow.
        own_prefix: Tokens of such a text that are given.
        own_tokens: Tokens of such a text that the target writes.
        own_steps: Steps in which the draft learns to follow them.
        own_batch: Texts per such step.
        own_rate: Peak learning rate of these steps.
        prompts_train: Prompts to cut for collecting traces.
        prompts_test: Prompts to cut for tests.
        prompt_tokens: Least and most tokens of a prompt.
        seed: Decides the split, the weights, the batches and the prompts.
    """

    vocabulary: int
    target: ModelShape
    draft: ModelShape
    steps: int
    batch: int
    length: int
    target_rate: float
    draft_rate: float
    warmup: float = 0.05
    weight_decay: float = 0.1
    positions: int = 2048
    held_out: float = 0.1
    text_bytes: int = 0
    shallow_layers: int = 2
    shallow_share: float = 0.9
    own_rows: int = 384
    own_prefix: int = 64
    own_tokens: int = 128
    own_steps: int = 1200
    own_batch: int = 8
    own_rate: float = 3e-3
    prompts_train: int = 320
    prompts_test: int = 120
    prompt_tokens: tuple[int, int] = (48, 96)
    seed: int = 0

    def parameters(self) -> tuple[int, int]:
        """Return the parameter counts of target and draft, without allocating either."""
        with torch.device("meta"):
            models = [shape.build(self.vocabulary, self.positions) for shape in (self.target, self.draft)]
        target, draft = (sum(weight.numel() for weight in model.parameters()) for model in models)
        return target, draft


RECIPES: dict[str, PairRecipe] = {
    "small": PairRecipe(
        vocabulary=2048,
        target=ModelShape(hidden=384, layers=6, heads=6, intermediate=1024),
        draft=ModelShape(hidden=160, layers=1, heads=2, intermediate=432),
        steps=1800,
        batch=2,
        length=256,
        target_rate=2e-3,
        draft_rate=4e-3,
        text_bytes=500_000,
    ),
    "15m": PairRecipe(
        vocabulary=4096,
        target=ModelShape(hidden=384, layers=8, heads=6, intermediate=1024),
        draft=ModelShape(hidden=144, layers=1, heads=2, intermediate=384),
        steps=5000,
        batch=2,
        length=256,
        target_rate=2e-3,
        draft_rate=4e-3,
        text_bytes=1_500_000,
        own_rows=512,
        own_steps=2000,
    ),
    "100m": PairRecipe(
        vocabulary=4096,
        target=ModelShape(hidden=768, layers=14, heads=12, intermediate=2048),
        draft=ModelShape(hidden=256, layers=2, heads=4, intermediate=688),
        steps=60,
        batch=2,
        length=256,
        target_rate=1e-3,
        draft_rate=4e-3,
        text_bytes=500_000,
        own_rows=16,
        own_tokens=64,
        own_steps=60,
    ),
    "tiny": PairRecipe(
        vocabulary=320,
        target=ModelShape(hidden=64, layers=2, heads=2, intermediate=128),
        draft=ModelShape(hidden=16, layers=1, heads=2, intermediate=32),
        steps=8,
        batch=4,
        length=32,
        target_rate=3e-3,
        draft_rate=6e-3,
        held_out=0.4,
        prompts_train=8,
        prompts_test=4,
        prompt_tokens=(8, 16),
        own_rows=8,
        own_prefix=8,
        own_tokens=8,
        own_steps=4,
        own_batch=4,
    ),
}
"""Recipes by name: `small` is the demo pair, `15m` trains longer, `100m` is for timing only, `tiny` is for tests."""
