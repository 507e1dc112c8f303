"""A random pair of a few thousand weights and its prompts, for attacks that need models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from random_models import EAGER_ONLY, VOCABULARY, build, noisy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

END = 2
WORDS = {"<pad>": 0, "<s>": 1, "</s>": END, **{f"w{i}": i for i in range(3, VOCABULARY)}}
PROMPTS = ("w5 w9 w4 w31", "w17 w8", "w40 w41 w3 w3 w12 w29")


def save_pair(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float64, words: int = VOCABULARY) -> Path:
    """Save target, draft and their tokenizer of the first `words` words below `folder`, which is returned."""
    inner = Tokenizer(WordLevel({word: at for word, at in WORDS.items() if at < words}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>", pad_token="<pad>")
    target = build(kind, dtype, "eager" if kind in EAGER_ONLY else "sdpa")
    for name, model in (("target", target), ("draft", noisy(target))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def prompt_ids(prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """Return the tokens of the prompts."""
    return [[WORDS[word] for word in prompt.split()] for prompt in prompts]
