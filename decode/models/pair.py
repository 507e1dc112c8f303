"""A target and a draft with one tokenizer, loaded and checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...policies.errors import InputError, PairError
from ..topology import Topology
from .attention import LAYER_TYPES
from .engine import choose_engine, speed_up
from .loading import check_memory, load_model, load_tokenizer, open_checkpoint, unwrap
from .placement import (
    DeviceMap,
    call_from,
    calling_device,
    is_placed,
    model_hash,
    parse_device_map,
    replacement_refusal,
    warn_once,
)
from .self_check import check_model
from .view import READS_ALL, LongRope, Reading, long_rope, readable, scored_tokens

DTYPES = ("float32", "bfloat16", "float16", "float64")
ATTENTION = ("sdpa", "eager")  # backends that read the mask of a tree correctly
_MAX_PADDING = 512  # vocabularies are padded to a multiple of at most this size


@dataclass(frozen=True)
class Pair:
    """Target p, draft q and their tokenizer.

    Attributes:
        target, draft: Causal language models on one device. The draft is None if candidates have another source.
        vocabulary: Number of token ids that the target scores, with padding. A draft may score fewer.
        eos: Ids that end a text.
        engines: How target and draft compute (`engine.ENGINES`).
        hashes: Of target and draft, if the engine has changed their parameters; of another drafter, its identity and then
            the hash of the draft model if it uses one.
        drafter: Default drafter (`drafters.find_drafters`).
        call_device: Device from which a target without a draft is called, if not its own.
        readings: Supported calls of target and draft (`self_check`).
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase | None
    vocabulary: int
    eos: tuple[int, ...] = ()
    engines: tuple[str, str] = ("plain", "plain")
    hashes: tuple[str, ...] | None = None
    drafter: str = "model"
    call_device: torch.device | None = None
    readings: tuple[Reading, Reading] = (READS_ALL, READS_ALL)

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """The models by role: `target`, and `draft` if there is one."""
        return {"target": self.target} | ({} if self.draft is None else {"draft": self.draft})

    @cached_property
    def device(self) -> torch.device:
        """Device from which both models are called. Cached, because a model searches its parameters for it."""
        return self.call_device or torch.device((self.draft or self.target).device)

    @property
    def draft_model(self) -> PreTrainedModel:
        """The draft. Raises `InputError` if there is none."""
        if self.draft is None:
            raise InputError(
                "this needs a draft model: give --draft, or another drafter (--drafter lookup, medusa:PATH, ...)"
            )
        return self.draft

    @property
    def draft_name(self) -> str:
        """Folder or hub name of the draft, or an empty string."""
        return "" if self.draft is None else str(self.draft.config.name_or_path)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Type of the logits: float64 for float64 models, else float32."""
        return torch.float64 if self.target.dtype == torch.float64 else torch.float32

    @property
    def readable(self) -> int:
        """Maximum length of a text, in tokens, for both models."""
        return min(map(readable, self.models.values()))

    @cached_property
    def ropes(self) -> tuple[LongRope, ...]:
        """LongRoPE encodings of target and draft."""
        return tuple(rope for rope in map(long_rope, self.models.values()) if rope is not None)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Short hashes of target, draft and tokenizer, by which traces and policies identify their pair."""
        hashes = dict(zip(("target", "draft"), self.hashes or map(model_hash, self.models.values()), strict=False))
        if self.tokenizer is not None:
            vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items())).encode()
            hashes["tokenizer"] = hashlib.blake2b(vocabulary, digest_size=8).hexdigest()
        return hashes

    def check_length(self, tokens: int) -> None:
        """Raise `InputError` if texts of so many tokens, with positions unlike their indices, reach other factors."""
        if any(tokens > rope.original for rope in self.ropes):
            raise InputError(
                f"prompt and new tokens are {tokens} together, but beyond original_max_position_embeddings the position "
                "encoding changes, which is only followed for prompts of token ids padded on the left; give such prompts, or "
                "lower --max-new-tokens"
            )

    def check_prompts(self, prompts: Iterable[Sequence[int]]) -> None:
        """Check that the target scores all tokens of prompts. Raises `InputError` otherwise."""
        unknown = next((token for prompt in prompts for token in prompt if not 0 <= token < self.vocabulary), None)
        if unknown is not None:
            raise InputError(
                f"a prompt has the token id {unknown}, but the target scores only {self.vocabulary} tokens; omit that token"
            )

    def check_topology(self, topology: Topology) -> None:
        """Check that both models support trees unless the topology is a chain. Raises `PairError` otherwise."""
        for (role, model), reading in zip(self.models.items(), self.readings, strict=False):
            if not (topology.is_chain or reading.tree):
                raise PairError(
                    f"the {role} is a {type(model).__name__}, which reads no trees: several candidates of one depth "
                    "change each other's logits; decode chains (no tree, another verification)"
                )


def join(
    target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Pair:
    """Check two loaded models and return them as a pair. The draft may be None.

    A `PeftModel` is unwrapped; adapters in the layers are kept.

    Raises:
        PairError: The models are on different devices, do not fit together, or cannot be rolled back.
    """
    target, draft = unwrap(target, "target"), None if draft is None else unwrap(draft, "draft")
    call_device = calling_device(target) if draft is None else None
    pair = Pair(target, draft, tokenizer, scored_tokens(target), _eos(target, tokenizer), call_device=call_device)
    if is_placed(target):
        call_from(target, calling_device(target))
    elif draft is not None and target.device != draft.device:
        raise PairError(f"target and draft must be on one device, but are on {target.device} and {draft.device}")
    for role, model in pair.models.items():
        if (why := replacement_refusal(model)) and (is_placed(model) or model.device.type == "cpu"):
            warn_once(model, f"the {role} runs as it is, neither packed nor recorded as CUDA graphs: {why}")
        layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or []) - set(LAYER_TYPES)
        if layer_types:
            raise PairError(
                f"the {role} is a {type(model).__name__}, which has {', '.join(sorted(layer_types))} layers, and their cache "
                f"cannot be rolled back; expected one of {', '.join(LAYER_TYPES)} in every layer"
            )
        if (backend := model.config._attn_implementation) not in ATTENTION:
            raise PairError(
                f"the {role} uses {backend} attention; expected {' or '.join(ATTENTION)}, which accept the mask of a tree: "
                f"call set_attn_implementation({ATTENTION[0]!r}) on it"
            )
    readings = [check_model(role, model) for role, model in pair.models.items()]
    if draft is not None and tokenizer is None and not _differ_by_padding(target, draft):
        widths = f"{scored_tokens(target)} and {scored_tokens(draft)}"
        raise PairError(f"target and draft have different vocabularies: {widths} tokens")
    return dataclasses.replace(pair, readings=(readings[0], readings[-1]))


def _differ_by_padding(target: PreTrainedModel, draft: PreTrainedModel) -> bool:
    """Whether two models without a tokenizer have the same tokens, apart from the padding of their vocabularies.

    Qwen2.5 has 152,064 rows at 7B and 151,936 at 0.5B, for the same 151,665 tokens. Other tokenizers of a similar size have
    another end of text.
    """
    difference = abs(scored_tokens(target) - scored_tokens(draft))
    return not difference or (difference < _MAX_PADDING and not set(_eos(target, None)).isdisjoint(_eos(draft, None)))


def _same_tokens(first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    """Whether two vocabularies agree, except that one may have further tokens after those of the other."""
    small, large = sorted((first, second), key=len)
    last = max(small.values(), default=-1)
    more = [number for token, number in large.items() if token not in small]
    return small.items() <= large.items() and min(more, default=last + 1) > last


def load_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention: str | None = None,
    engine: str = "auto",
    device_map: DeviceMap | None = None,
) -> Pair:
    """Load a pair from two folders or hub names.

    Args:
        target, draft: Folders or hub names of models, or of PEFT adapters, which are applied to their base models.
        device, dtype: Of both models; quantised ones keep the types they were saved with.
        attention: `sdpa` or `eager`; None = sdpa, or eager for a model that has no other (Gemma 2).
        engine: `plain`, `packed`, `compact`, or `auto`, the fastest that can run each model (see `engine`).
        device_map: Devices of the target's layers (`placement.DeviceMap`, or its JSON); draft and loop stay on `device`.

    Raises:
        PairError: A model cannot be loaded, the models do not fit together, or they do not fit into memory.
    """
    kind, where, parsed_map = check_dtype(dtype), check_device(device), parse_device_map(device_map)
    checkpoints = [open_checkpoint(target, "--target")]
    if draft is not None:
        checkpoints.append(open_checkpoint(draft, "--draft"))
    tokenizer, *others = map(load_tokenizer, checkpoints)
    for other in others:
        if not _same_tokens(tokenizer.get_vocab(), other.get_vocab()):
            raise PairError(
                f"target and draft must share one tokenizer, but {target} has {len(tokenizer)} tokens and {draft} has "
                f"{len(other)}, not the same ones; choose a draft of the target's family"
            )
    check_memory(checkpoints if parsed_map is None else checkpoints[1:], where, kind)
    # The draft first: the target is distributed over the memory that it leaves.
    draft_model = None if draft is None else load_model(checkpoints[1], where, kind, attention)
    pair = join(load_model(checkpoints[0], where, kind, attention, parsed_map), draft_model, tokenizer)
    return with_engine(dataclasses.replace(pair, call_device=where) if draft is None else pair, engine)


def with_engine(pair: Pair, engine: str = "auto") -> Pair:
    """Return a plain pair under an engine (see `engine`).

    A packed model is changed in place: it can no longer be saved, trained or used by itself. A compact one shares its weights
    with the original, some of which are moved: caches of the original that already exist cannot be used any more.
    """
    names = {role: choose_engine(model, engine) for role, model in pair.models.items()}
    hashes = tuple(map(model_hash, pair.models.values()))  # first, because packed weights are not parameters
    models: Any = {role: speed_up(model, names[role]) for role, model in pair.models.items()}
    engines = names["target"], names.get("draft", "plain")
    return dataclasses.replace(pair, **models, engines=engines, hashes=hashes)


def check_dtype(name: str) -> torch.dtype:
    """Return the torch type called `name`. Raises `InputError` if it is not supported."""
    if name not in DTYPES:
        raise InputError(f"--dtype: expected one of {', '.join(DTYPES)}, not {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_device(name: str) -> torch.device:
    """Return the torch device called `name`. Raises `InputError` if this machine has none."""
    try:
        one = torch.ones(1, device=torch.device(name))
        one.item()  # fails on "meta", for example
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device: {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return one.device  # "cuda" is not equal to "cuda:0", the device of its tensors


def _eos(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    configured = getattr(target.generation_config, "eos_token_id", None)
    return end_tokens(tokenizer.eos_token_id if configured is None and tokenizer is not None else configured)


def end_tokens(configured: Any) -> tuple[int, ...]:
    """Return the ids that end a text, from an `eos_token_id`: None, an id, or several. Raises `PairError` for others."""
    ids = configured if isinstance(configured, list | tuple) else [] if configured is None else [configured]
    if not all(type(token) is int for token in ids):
        raise PairError(
            f"the target's eos_token_id: expected a token's number, or a list of them, not {configured!r}; correct its "
            "generation_config.json"
        )
    return tuple(ids)
