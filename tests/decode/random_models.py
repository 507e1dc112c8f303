"""Small random models of many kinds, for tests and for `benchmarks/architectures.py`.

Small models of the causal language model classes of transformers (`build_class`), of eleven kinds in any dtype
(`build`), and the comparison of the texts of a class with those of `generate` (`sweep_class`).
"""

from __future__ import annotations

import contextlib
import copy
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from specstop.decode import Settings, Speculator, join
from specstop.decode.loop import Request
from specstop.policies import FixedLength, InputError
from specstop.policies.errors import PairError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96
LARGEST = 30_000_000
"""Maximum number of weights of a small model."""


def noisy(model: PreTrainedModel, share: float = 0.02) -> PreTrainedModel:
    """Return a copy with noise on its matrices, of `share` times their standard deviation, which is sometimes accepted."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.add_((share * weight.double().std() * noise).to(weight.dtype))
    return draft


def prompts(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Return random prompts of 1 to 20 tokens, and one that is longer than a slice of the causal mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [70 if i == 1 else 1 + 7 * i % 20 for i in range(count)]
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def plain(model: PreTrainedModel, prompt: Sequence[int], new: int, **options: Any) -> list[int]:
    """Return the new tokens of the model's `generate`."""
    ids, library = torch.tensor([list(prompt)], device=model.device), cast(Any, model)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new, **options}
    out = library.generate(ids, **options)
    return [int(token) for token in out[0, len(prompt) :]]


PROMPTS = ([5, 9, 17, 33, 3, 8, 60], [50, 51, 52], [7, 41, 9, 33, 12])
NEW = 12

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32,
    "emb_dim": 32, "word_embed_proj_dim": 32, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48, "n_inner": 48, "dff": 48, "d_inner": 48, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "decoder_layers": 2, "encoder_layers": 1, "num_decoder_layers": 2, "num_encoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "max_position_embeddings": 256, "n_positions": 256,
    "n_ctx": 256, "max_seq_len": 256, "initializer_range": 0.3, "init_std": 0.3, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "sliding_window": 8,
    "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False, "first_k_dense_replace": 1,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    "global_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8,
}  # fmt: skip
"""Values of configuration fields; fields that a class does not have are skipped."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8}, "llama4": {"attention_chunk_size": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]}, "reformer": {"is_decoder": True},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48}, "falcon": {"multi_query": True},
    "mpt": {"expansion_ratio": 2}, "roberta": {"is_decoder": True}, "phi3": {"original_max_position_embeddings": 256},
}  # fmt: skip
"""Additional values by model type."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon alibi": ("falcon", {"alibi": True}),
    "roberta encoder": ("roberta", {"is_decoder": False}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
}
"""Additional configurations of a model type: the type and its fields by name of the variant."""


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "qwen2": ("qwen2", {}), "qwen3": ("qwen3", {}), "mistral": ("mistral", {"sliding_window": None}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}), "mistral-window": ("mistral", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": ("gpt2", {}), "gpt-neox": ("gpt_neox", {}), "opt": ("opt", {}),
    "granite-scaled": ("granite", {"logits_scaling": 4.0}), "cohere-scaled": ("cohere", {"logit_scale": 0.25}),
    "gemma2-capped": ("gemma2", {"final_logit_softcapping": 2.0}),
}  # fmt: skip
"""Model type and further fields by kind. Windows have 8 tokens: they are shorter than every text and several trees."""

CONFIGS = tuple(kind for kind in KINDS if not kind.endswith(("scaled", "capped")))
SCALED = tuple(kind for kind in KINDS if kind not in CONFIGS)
"""Kinds that scale or cap the numbers of their output layers."""

EAGER_ONLY = ("gemma2", "gemma2-capped")  # transformers has no other attention for its soft-capped scores


def small_config(kind: str, **fields: Any) -> PreTrainedConfig:
    """Return the configuration of an entry of `KINDS`, with further fields."""
    model_type, values = KINDS[kind]
    return shrunk(CONFIG_MAPPING[model_type], {**values, **fields})


def build(kind: str, dtype: torch.dtype, attention: str = "sdpa", seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Return a random model of an entry of `KINDS`, without an end of text."""
    torch.manual_seed(seed)
    attention = "eager" if kind in EAGER_ONLY else attention
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        small_config(kind, **fields), attn_implementation=attention
    )
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(dtype).eval()


def build_class(name: str, attempt: dict[str, Any]) -> PreTrainedModel:
    """Return a small random model in float64 and evaluation mode, without the generation defaults of its class.

    Args:
        name: an entry of `names()`.
        attempt: an entry of `ATTEMPTS`.

    Raises:
        ValueError: the model has more than `LARGEST` weights.
    """
    kind, fields = VARIANTS.get(name, (name, {}))
    config_class = CONFIG_MAPPING[kind]
    values = {**attempt, **OVERRIDES.get(kind, {}), **fields}
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(shrunk(config_class, values)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} weights")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shrunk(config_class, values))
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.double().eval()


def shrunk(config_class: Any, more: dict[str, Any]) -> Any:
    """Return a configuration with the values of `SMALL` and `more`, also in its sub-configurations."""
    default = config_class()
    properties = {key for key in SMALL if isinstance(getattr(config_class, key, None), property)}
    fields = {*default.to_dict(), *default.attribute_map}
    values = {key: value for key, value in {**SMALL, **more}.items() if key not in properties and key in fields}
    for name, sub_config in vars(default).items():
        if hasattr(sub_config, "to_dict") and name not in values:
            values[name] = shrunk(type(sub_config), more).to_dict()
    return config_class(**values)


def expected_texts(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    """Return the new tokens of the model's `generate` method for each prompt."""
    return [plain(model, prompt, NEW, **options) for prompt in PROMPTS]


SECONDS = 60
"""Time limit for building a model, and for each decoding method."""
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {}, {"num_hidden_layers": 4}, {"head_dim": 4, "num_key_value_heads": 4},
    {"head_dim": 4, "num_key_value_heads": 4, "num_hidden_layers": 4}, {"num_key_value_heads": 4, "head_dim": 12},
    {"num_hidden_layers": 8}, {"layer_types": ["linear_attention", "full_attention"]},
    {"layer_types": ["sliding_attention", "full_attention"]}, {"vision_config": None, "audio_config": None},
)  # fmt: skip
"""Additional values for classes that cannot be built with `SMALL`, tried in order."""
METHODS = {"alone": (0, None, 1), "side by side": (0, None, 3), "chain": (3, None, 3), "tree": (2, "2,2", 1)}
"""Draft length, tree and batch size of each decoding method."""


@dataclass
class Row:
    """Results of one class.

    Attributes:
        name: model type or variant.
        cls: name of the class.
        cells: result by method: "equal", "wrong", "refused" or the name of an exception.
        note: reason if the class was refused or not built.
    """

    name: str
    cls: str
    cells: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def faults(self) -> int:
        """Number of methods with a wrong text or an unexpected exception."""
        return sum(cell not in ("equal", "refused") for cell in self.cells.values())


def names() -> list[str]:
    """Return all model types and variants."""
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer than `seconds`."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    previous_handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)


def sweep_class(name: str) -> Row:
    """Decode with one class, an entry of `names()`, and each method, and compare the texts with those of `generate`."""
    kind = VARIANTS.get(name, (name,))[0]
    row = Row(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, expected = None, []
        for attempt in ATTEMPTS:
            try:
                with time_limit(SECONDS):
                    model = build_class(name, attempt)
                    try:
                        expected = expected_texts(model)
                    except (RuntimeError, TypeError, ValueError):  # some classes always compute in float32
                        model = model.float()
                        expected = expected_texts(model)
                break
            except Exception as error:  # a class may raise any exception
                row.note, model = row.note or f"not built: {type(error).__name__}: {first_line(error)}", None
        if model is None:
            return row
        row.cls, row.note, draft = type(model).__name__, "", noisy(model)
        for method, (depth, tree, batch) in METHODS.items():
            try:
                with time_limit(SECONDS):
                    pair = join(model, draft)
                    speculator = Speculator(pair, FixedLength(depth), Settings(0.0, NEW, tree=tree), batch=batch)
                    results = speculator.run([Request(prompt) for prompt in PROMPTS])
                texts = [list(result.tokens) for result in results]
                row.cells[method] = "equal" if texts == expected else "wrong"
                if texts != expected and texts == expected_texts(model, use_cache=False):
                    row.cells[method] = "wrong (equal to generate with use_cache=False)"
            except (PairError, InputError) as error:
                row.cells[method], row.note = "refused", first_line(error)
            except Exception as error:
                row.cells[method], row.note = type(error).__name__, first_line(error)
    return row


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, at most 200 characters."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:200]
