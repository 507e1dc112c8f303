"""A pair with a byte-level tokenizer, for structured output, and a schema with its validator."""

from __future__ import annotations

import json
from typing import Literal

import pydantic
from conftest import build_draft, build_model
from specstop.decode.models.pair import Pair, join
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = 1


class Person(pydantic.BaseModel):
    """The values that the schema `PERSON` allows."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    name: str = pydantic.Field(max_length=3)
    age: int = pydantic.Field(ge=0, le=99)
    tags: list[Literal["a", "bc", None]] = pydantic.Field(default=[], max_length=2)
    ok: bool


PERSON = Person.model_json_schema()


def is_person(text: str) -> bool:
    """Return whether a text is JSON of the schema `PERSON`."""
    try:
        Person.model_validate_json(text)
    except pydantic.ValidationError:
        return False
    return True


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with merges across the tokens of JSON."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    texts = [json.dumps({"name": f"n{i}", "age": i, "ok": bool(i % 2), "tags": ["a"] * (i % 3)}) for i in range(20)]
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")


def byte_pair() -> Pair:
    """Return a random pair; its vocabulary is padded beyond the tokenizer's, and the draft is the target with noise."""
    tokenizer = byte_tokenizer()
    width = len(tokenizer) + 7
    target = build_model(3, vocab_size=width, eos_token_id=END, bos_token_id=None, max_position_embeddings=256)
    return join(target, build_draft(target, 0.05), tokenizer)
