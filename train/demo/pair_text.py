"""The text behind a demo pair: documents, their split, a byte-level BPE tokenizer and prompts."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ...policies.errors import InputError

END_OF_TEXT = "<|endoftext|>"
# Folders of the standard library without library text: tests, installed packages, generated tables.
_SKIPPED_FOLDERS = frozenset(
    {
        *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__"),
        *("encodings", "pydoc_data"),
    }
)
_SKIPPED_PREFIXES = ("config-", "python")


class Document(NamedTuple):
    """One text: `prompt`, when given, is used as it is; otherwise prompts are pieces of `text`."""

    name: str
    text: str
    group: str
    prompt: str | None = None


class Split(NamedTuple):
    """Documents by use, none in two lists; but `spare` is `learn` where nothing is left to spare. `left` are of no use."""

    learn: list[Document]
    spare: list[Document]
    prompts_train: list[Document]
    prompts_test: list[Document]
    left: list[Document]


def stdlib_documents() -> list[Document]:
    """Return the source files of the running Python's standard library, tests excluded, in a fixed order.

    Raises:
        InputError: The library's folder holds no source files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = folder_documents(root, suffixes=(".py",))
    if not documents:
        raise InputError(f"expected the source files of the standard library in {root}, found none")
    return documents


def folder_documents(root: Path, suffixes: tuple[str, ...] = (".py", ".txt")) -> list[Document]:
    """Return the files below `root` with one of `suffixes`, sorted; `group` is the first part of the path."""
    documents = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in suffixes or not path.is_file():
            continue
        parts = path.relative_to(root).parts
        folders = parts[:-1]
        if any(part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in folders):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            documents.append(Document("/".join(parts), text, Path(parts[0]).stem))
    return documents


def split_documents(documents: Sequence[Document], held_out: float, seed: int, text_bytes: int = 0) -> Split:
    """Hold out a seeded share of the documents: three fifths for train prompts, the rest for test prompts.

    With `text_bytes` only as many of the others are learnt as reach that size, and as many again are spare.

    Raises:
        InputError: There are fewer than four documents.
    """
    if len(documents) < 4:
        raise InputError(f"expected at least 4 documents to make a pair from, got {len(documents)}")
    order = list(documents)
    random.Random(seed).shuffle(order)
    # Two at least are held out, one for each kind of prompts, and two are learnt.
    count = min(max(2, round(held_out * len(order))), len(order) - 2)
    train_count = min(max(1, round(0.6 * count)), count - 1)
    rest = order[count:]
    learn = _first(rest, text_bytes) if text_bytes else rest
    spare = _first(rest[len(learn) :], text_bytes)
    left = rest[len(learn) + len(spare) :]
    return Split(learn, spare or learn, order[:train_count], order[train_count:count], left)


def _first(documents: Sequence[Document], text_bytes: int) -> list[Document]:
    """Return the first documents, as many as reach `text_bytes`."""
    ends = accumulate(len(document.text.encode()) for document in documents)
    return list(documents[: 1 + sum(end < text_bytes for end in ends)])


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with `vocabulary` entries, the end-of-text token included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, bos_token=END_OF_TEXT
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> torch.Tensor:
    """Return all documents as one stream, each closed by the end-of-text token."""  # [tokens], int64
    stream: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch([document.text for document in documents]):
        stream.extend(encoding.ids)
        stream.append(tokenizer.eos_token_id)
    return torch.tensor(stream, dtype=torch.int64, device="cpu")


def cut_prompts(
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[Document],
    count: int,
    tokens: tuple[int, int],
    seed: int,
) -> list[dict[str, str]]:
    """Return up to `count` prompts of about `tokens` (least, most) tokens, from all documents in turn.

    A piece starts at a line start; pieces of one document do not overlap.
    """
    chance = random.Random(seed)
    pieces = [_pieces(tokenizer, document, tokens, chance) for document in documents]
    prompts: list[dict[str, str]] = []
    for turn in range(max(map(len, pieces), default=0)):
        for document, found in zip(documents, pieces, strict=True):
            if turn < len(found) and len(prompts) < count:
                prompts.append({"id": f"{document.name}#{turn}", "prompt": found[turn], "group": document.group})
    return prompts


def _pieces(
    tokenizer: PreTrainedTokenizerFast, document: Document, tokens: tuple[int, int], chance: random.Random
) -> list[str]:
    """Cut one document into non-overlapping pieces, in a seeded order."""
    if document.prompt is not None:
        return [document.prompt]
    text = document.text
    pieces = []
    begin = 0
    while 0 <= begin < len(text):
        length = chance.randint(*tokens)
        # Tokens are hardly ever longer than this; encoding the whole rest each time would be slow.
        encoding = tokenizer.backend_tokenizer.encode(text[begin : begin + 16 * length])
        if len(encoding.ids) < length:
            break
        end = begin + encoding.offsets[length - 1][1]
        pieces.append(text[begin:end])
        begin = text.find("\n", end) + 1 or len(text)
        while begin < len(text) and text[begin] == "\n":
            begin += 1
    chance.shuffle(pieces)
    return pieces
