"""A target and a draft of one tokenizer, loaded and checked."""

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
from .cache import scored_tokens
from .checkpoints.adapters import unwrap
from .checkpoints.hashing import model_hash
from .checkpoints.memory import check_memory
from .checkpoints.opening import open_checkpoint
from .engine import choose_engine, speed_up
from .loading import load_model, load_tokenizer
from .masks import KINDS
from .placement import call_from, check_device_map, is_placed, place_of, tell_once
from .reading.modes import READS_ALL, Reading, readable
from .reading.ropes import LengthRope, length_rope
from .reading.self_check import check_model

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
ATTENTION = ("sdpa", "eager")
"""Attention backends that read the mask of a tree correctly."""

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
        readings: how target and draft can be read (`self_check`).
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
    readings: tuple[Reading, Reading] = (READS_ALL, READS_ALL)

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
    def ropes(self) -> tuple[LengthRope, ...]:
        """Position encodings of target and draft that depend on the length."""
        models = (self.target, *(() if self.draft is None else (self.draft,)))
        return tuple(rope for rope in map(length_rope, models) if rope is not None)

    def check_length(self, tokens: int, is_shifted: bool = False) -> None:
        """Refuse texts whose position encoding would change in a way that the loop does not follow.

        Args:
            tokens: of the longest text.
            is_shifted: whether positions of a text are not the places of its tokens: then no change is followed.

        Raises:
            InputError: prompt and new tokens are longer than the first set of factors serves.
        """
        for rope in self.ropes:
            if is_shifted and rope.two_sided and tokens > rope.original:
                raise InputError(
                    f"prompt and new tokens are {tokens} together, but from {rope.original} on ({rope.field}) the position "
                    "encoding has other factors, which is only followed for prompts of token ids padded on the left; give "
                    "such prompts, or lower --max-new-tokens"
                )
            if not rope.two_sided and tokens > rope.original:
                raise InputError(
                    f"prompt and new tokens are {tokens} together, but from {rope.original} on ({rope.field}) the dynamic "
                    "position encoding changes with every token, and a text would depend on the draft length; shorten the "
                    "prompt or lower --max-new-tokens"
                )

    def check_prompts(self, prompts: Iterable[Sequence[int]]) -> None:
        """Refuse token ids that the target does not know.

        Raises:
            InputError: a prompt has one.
        """
        unknown = next((token for prompt in prompts for token in prompt if not 0 <= token < self.vocabulary), None)
        if unknown is not None:
            raise InputError(
                f"a prompt has the token id {unknown}, but the target scores only {self.vocabulary} tokens; leave that "
                "token out"
            )

    def check_topology(self, topology: Topology) -> None:
        """Refuse a tree for models that do not read one right.

        Raises:
            PairError: the topology is no chain, and a model reads only those.
        """
        if topology.is_chain:
            return
        for role, model, reading in zip(("target", "draft"), (self.target, self.draft), self.readings, strict=True):
            if model is not None and not reading.tree:
                raise PairError(
                    f"the {role} is a {type(model).__name__}, which reads no trees: candidates beside each other get other "
                    "logits than in a text of their own; decode chains (no tree, another verification)"
                )

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
    readings = [check_model(role, model) for role, model in roles.items()]
    widths = [scored_tokens(model) for model in roles.values()]
    if draft is not None and tokenizer is None and widths[0] != widths[1] and not _differ_by_padding(target, draft):
        raise PairError(f"target and draft have different vocabularies: {widths[0]} and {widths[1]} tokens")
    home = place_of(target) if draft is None else None
    reads = (readings[0], readings[-1])
    return Pair(target, draft, tokenizer, widths[0], _eos(target, tokenizer), home=home, readings=reads)


def _agree(first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    """Whether the ids of two vocabularies mean the same tokens, but that one may have further tokens after the other's."""
    small, large = sorted((first, second), key=len)
    last = max(small.values(), default=-1)
    same = all(large.get(token) == number for token, number in small.items())
    return same and all(number > last for token, number in large.items() if token not in small)


def _differ_by_padding(target: PreTrainedModel, draft: PreTrainedModel) -> bool:
    """Whether two models without a tokenizer know the same tokens, each filled up to a size of its own.

    Qwen2.5 has 152,064 rows at 7B and 151,936 at 0.5B, for the same 151,665 tokens. Of other tokenizers of about one size the
    end of text differs.
    """
    close = abs(scored_tokens(target) - scored_tokens(draft)) < _PADDED
    return close and not set(_eos(target, None)).isdisjoint(_eos(draft, None))


def _check_kind(role: str, model: PreTrainedModel) -> None:
    """Refuse, by name, a model whose cache is no list of keys and values, or that misreads masks."""
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or []) - set(KINDS)
    if kinds:
        raise PairError(
            f"the {role} is a {name}, which has {', '.join(sorted(kinds))} layers, whose cache cannot be rolled back here; "
            "expected full, sliding-window or chunked attention in every layer"
        )
    if config.is_encoder_decoder:
        raise PairError(
            f"the {role} is a {name}, whose cache cannot be rolled back here; expected a decoder of attention"
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
        if not _agree(first.get_vocab(), other.get_vocab()):
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
