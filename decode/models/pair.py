"""A target and a draft of one tokenizer, loaded and checked."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...policies.errors import InputError, PairError
from .checkpoints.adapters import unwrap
from .checkpoints.hashing import model_hash
from .checkpoints.memory import check_memory
from .checkpoints.opening import open_checkpoint
from .engine import choose_engine, speed_up
from .loading import load_model, load_tokenizer
from .placement import call_from, check_device_map, is_placed, place_of, tell_once

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
ATTENTION = ("sdpa", "eager")
"""Attention backends that read the mask of a tree correctly."""

ENDLESS = 1 << 30
"""Tokens that a model reads whose positions nothing limits."""

_PADDED = 512
"""Vocabularies are filled up to a multiple of so much at most, so that matrix products come out even."""


@dataclass(frozen=True)
class Pair:
    """Target p, draft q and their tokenizer.

    Attributes:
        target, draft: causal language models, called from one device; no draft where the candidates come from elsewhere
            (prompt lookup). Loops call views of them, in evaluation mode (`view`).
        tokenizer: of both.
        vocabulary: number of token ids that the target scores, padding beyond the tokenizer's tokens included, as its own
            `generate` has it; a draft that knows fewer never proposes the others.
        eos: ids that end a text.
        engines: how target and draft compute (`engine.ENGINES`).
        hashes: of target and draft, where an engine no longer tells them from the models.
        drafter: what proposes unless a run says otherwise (`drafters.find_drafter`).
        home: the device that a target without a draft is called from, if not its own.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase | None
    vocabulary: int
    eos: tuple[int, ...] = ()
    engines: tuple[str, str] = ("plain", "plain")
    hashes: tuple[str, ...] | None = None
    drafter: str = "model"
    home: torch.device | None = None

    @cached_property
    def device(self) -> torch.device:
        """Where both models are called from. A model looks through its weights to tell, so it is asked once."""
        return self.home or torch.device((self.draft or self.target).device)

    @property
    def draft_model(self) -> PreTrainedModel:
        """The draft; `InputError` where there is none."""
        if self.draft is None:
            raise InputError(
                "this needs a draft model: give --draft, or others than its candidates (--drafter lookup, medusa:PATH, ...)"
            )
        return self.draft

    @property
    def draft_name(self) -> str:
        """Folder or hub name of the draft; "" where there is none."""
        return "" if self.draft is None else str(self.draft.config.name_or_path)

    @property
    def logits_dtype(self) -> torch.dtype:
        """In which scores are computed: float64 for float64 models, else float32."""
        return torch.float64 if self.target.dtype == torch.float64 else torch.float32

    @property
    def readable(self) -> int:
        """The longest text that both models read."""
        return min(readable(model) for model in (self.target, self.draft) if model is not None)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Short hashes of target, draft if there is one, and tokenizer, by which traces and policies know their pair."""
        known = self.hashes or _hashes(self.target, self.draft)
        hashes = dict(zip(("target", "draft"), known, strict=False))
        if self.tokenizer is not None:
            vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items())).encode()
            hashes["tokenizer"] = hashlib.blake2b(vocabulary, digest_size=8).hexdigest()
        return hashes


def _hashes(target: PreTrainedModel, draft: PreTrainedModel | None) -> tuple[str, ...]:
    return tuple(model_hash(model) for model in (target, draft) if model is not None)


def join(
    target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Pair:
    """Check two loaded models against each other and return them as a pair; a target without a draft by itself.

    Models that carry a PEFT adapter keep it; a `PeftModel` is unwrapped.

    Raises:
        PairError: they lie on different devices (a target that accelerate has placed is called from the draft's), or one is
            of a kind that cannot be rolled back or read a tree, or carries an adapter that its layers do not have.
    """
    target, draft = unwrap(target, "target"), None if draft is None else unwrap(draft, "draft")
    roles = {"target": target} if draft is None else {"target": target, "draft": draft}
    for role, model in roles.items():
        tell_once(role, model)
    if is_placed(target):
        call_from(target, place_of(target))
    elif draft is not None and target.device != draft.device:
        raise PairError(f"target and draft must be on one device, but are on {target.device} and {draft.device}")
    for role, model in roles.items():
        _check_kind(role, model)
    widths = [_width(model) for model in roles.values()]
    if draft is not None and tokenizer is None and widths[0] != widths[1] and not _differ_by_padding(target, draft):
        raise PairError(f"target and draft have different vocabularies: {widths[0]} and {widths[1]} tokens")
    if tokenizer is not None and len(tokenizer) > min(widths):
        raise PairError(f"the tokenizer has {len(tokenizer)} tokens, but the models score only {min(widths)}")
    home = place_of(target) if draft is None else None
    return Pair(target, draft, tokenizer, widths[0], _eos(target, tokenizer), home=home)


def _width(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model scores."""
    return int(model.config.get_text_config().vocab_size)


def _differ_by_padding(target: PreTrainedModel, draft: PreTrainedModel) -> bool:
    """Whether two models without a tokenizer know the same tokens, each filled up to a size of its own.

    Qwen2.5 has 152,064 rows at 7B and 151,936 at 0.5B, for the same 151,665 tokens. Of other tokenizers of about one size the
    end of text differs.
    """
    close = abs(_width(target) - _width(draft)) < _PADDED
    return close and not set(_eos(target, None)).isdisjoint(_eos(draft, None))


def _check_kind(role: str, model: PreTrainedModel) -> None:
    """Refuse, by name, a model whose cache is no list of keys and values, or that takes positions or masks otherwise."""
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise PairError(
            f"the {role} has {', '.join(sorted(kinds))} layers, whose cache cannot be rolled back here; "
            "expected full or sliding-window attention in every layer"
        )
    if getattr(model, "_is_stateful", False) or config.is_encoder_decoder:
        raise PairError(
            f"the {role} is a {name}, whose cache cannot be rolled back here; expected a decoder of attention"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        raise PairError(
            f"the {role} is a {name}, which counts positions itself; expected a model that is told position_ids, since "
            "candidates of one depth share one"
        )
    backend = model.config._attn_implementation
    if backend not in ATTENTION:
        raise PairError(
            f"the {role} uses {backend} attention; expected {' or '.join(ATTENTION)}, which take the mask of a tree: "
            f"call set_attn_implementation({ATTENTION[0]!r}) on it"
        )


def load_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention: str | None = None,
    engine: str = "auto",
    device_map: str | None = None,
) -> Pair:
    """Load a pair from two folders or hub names.

    Args:
        target, draft: folders or hub names of models, or of PEFT adapters, which are applied to their base models; no draft
            where none is needed (prompt lookup).
        device, dtype: of both models; quantised ones keep the types they were saved with.
        attention: `sdpa` or `eager`; None = sdpa, or eager for a model that has no other (Gemma 2).
        engine: `plain`, `packed`, `compact`, or `auto`, the fastest that can run each model (see `engine`).
        device_map: where the target's layers lie, if not on `device`: `auto` shares them out among all GPUs, the host and the
            disk (see `placement`). Draft and loop stay on `device`.

    Raises:
        PairError: a folder is missing or no model, its config or a tensor is not what it must be, the tokenizers differ, or
            the models do not fit together, or into memory.
    """
    kind, where, places = check_dtype(dtype), check_device(device), check_device_map(device_map)
    sides = [open_checkpoint(target, "--target"), *([] if draft is None else [open_checkpoint(draft, "--draft")])]
    first, *others = (load_tokenizer(side) for side in sides)
    for other in others:
        if first.get_vocab() != other.get_vocab():
            raise PairError(
                f"target and draft must share one tokenizer, but {target} has {len(first)} tokens and {draft} has "
                f"{len(other)}, not the same ones; choose a draft of the target's family"
            )
    check_memory(sides if places is None else sides[1:], where, kind)
    # The draft first: the target is shared out among what memory it leaves.
    small = None if draft is None else load_model(sides[1], where, kind, attention)
    pair = join(load_model(sides[0], where, kind, attention, places), small, first)
    return with_engine(dataclasses.replace(pair, home=where) if small is None else pair, engine)


def with_engine(pair: Pair, engine: str = "auto") -> Pair:
    """Return a plain pair under an engine (see `engine`).

    A packed model is changed in place: it can no longer be saved, trained or used by itself. A compact one shares its weights
    with the library's, some of which move: what runs that one and was made before must not go on.
    """
    names = choose_engine(pair.target, engine), "plain" if pair.draft is None else choose_engine(pair.draft, engine)
    hashes = _hashes(pair.target, pair.draft)  # first: weights in another layout are no parameters any more
    target = speed_up(pair.target, names[0])
    draft = None if pair.draft is None else speed_up(pair.draft, names[1])
    return dataclasses.replace(pair, target=target, draft=draft, engines=names, hashes=hashes)


def check_dtype(name: str) -> torch.dtype:
    """Return the torch type called `name`, or raise `InputError` naming those there are."""
    if name not in DTYPES:
        raise InputError(f"--dtype: expected one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


def check_device(name: str) -> torch.device:
    """Return the torch device called `name`, or raise `InputError` when this machine has none."""
    try:
        one = torch.ones(1, device=torch.device(name))
        one.item()  # "meta", for one, has shapes but no numbers
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device: {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return one.device  # "cuda" is not equal to "cuda:0", on which its tensors lie


def readable(model: PreTrainedModel) -> int:
    """Return the longest text that a model reads."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or ENDLESS


def _eos(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    configured = getattr(target.generation_config, "eos_token_id", None)
    if configured is None and tokenizer is not None:
        configured = tokenizer.eos_token_id
    return end_tokens(configured)


def end_tokens(configured: Any) -> tuple[int, ...]:
    """Return the ids that end a text from an `eos_token_id`: None, an id, or several.

    Raises:
        PairError: it is something else.
    """
    ids = configured if isinstance(configured, list | tuple) else [] if configured is None else [configured]
    if not all(type(token) is int for token in ids):
        raise PairError(
            f"the target's eos_token_id: expected a token's number, or a list of them, not {configured!r}; mend its "
            "generation_config.json"
        )
    return tuple(ids)
