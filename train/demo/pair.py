"""A demo pair that needs no download: two small Llama models trained on the running Python's own source text.

The target learns the text; the draft learns the target's distribution on the same batches, then on text
that the target writes itself. The result is an ordinary pair of Hugging Face folders, with prompts from
documents that neither model has seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers.utils import logging as transformers_logging

from ...policies.errors import InputError
from ...policies.files.atomic import cache_folder, read_json, sha256, write_atomic, write_json
from ...policies.files.outputs import claim_folder, staged_folder
from ...policies.progress import Progress, silent
from .pair_fit import fit_pair
from .pair_recipe import RECIPES, PairRecipe
from .pair_text import Document, cut_prompts, encode, split_documents, stdlib_documents, train_tokenizer

# To be raised when the same recipe gives other files: cached pairs are found by it.
SCHEMA_VERSION = 1


def make_pair(documents: Sequence[Document], recipe: PairRecipe, out: Path, progress: Progress = silent) -> Path:
    """Train tokenizer, target and draft on `documents` and write the pair's folder, whole or not at all.

    The same documents, recipe and versions give the same weights. The global random state is left as it was.

    Args:
        documents: The text; a seeded share of it is held out for prompts.
        recipe: Shapes, steps and seed.
        out: The folder to write; an existing one is replaced once the new one is complete.
        progress: Called with the training steps done.

    Returns:
        `out`, with `target/`, `draft/`, `prompts-train.jsonl`, `prompts-test.jsonl` and `pair.json`.

    Raises:
        InputError: Too few documents, too little text for one window or one prompt, or as `claim_folder`.
    """
    claim_folder(out, overwrite=True)
    started = time.perf_counter()
    split = split_documents(documents, recipe.held_out, recipe.seed, recipe.text_bytes)
    tokenizer = train_tokenizer((document.text for document in split.learn), recipe.vocabulary)
    stream = encode(tokenizer, split.learn)
    prompts = {
        "train": cut_prompts(tokenizer, split.prompts_train, recipe.prompts_train, recipe.prompt_tokens, recipe.seed),
        "test": cut_prompts(tokenizer, split.prompts_test, recipe.prompts_test, recipe.prompt_tokens, recipe.seed),
    }
    _check(stream, prompts, recipe)
    starts = encode(tokenizer, split.spare)
    target, draft, losses = fit_pair(stream, starts, recipe, tokenizer.eos_token_id, progress)
    with staged_folder(out) as stage, _no_bars():
        for name, model in (("target", target), ("draft", draft)):
            model.save_pretrained(stage / name)
            tokenizer.save_pretrained(str(stage / name))
        for name, found in prompts.items():
            lines = "".join(json.dumps(prompt) + "\n" for prompt in found)
            write_atomic(stage / f"prompts-{name}.jsonl", lines)
        files = sorted(path for path in stage.rglob("*") if path.is_file())
        described = {
            **_describe(recipe, len(stream), losses),
            "seconds": round(time.perf_counter() - started, 1),
            "files": {path.relative_to(stage).as_posix(): sha256(path) for path in files},
        }
        write_json(stage / "pair.json", described)
    return out


def demo_pair(seed: int = 0, progress: Progress = silent) -> Path:
    """Return the cached demo pair of the running Python's standard library, building it when it is missing."""
    return cached_pair(replace(RECIPES["small"], seed=seed), progress=progress)


def cached_pair(recipe: PairRecipe, documents: Sequence[Document] | None = None, progress: Progress = silent) -> Path:
    """Return the cached pair of a recipe, building it when it is missing.

    The folder lies in the user's cache directory, or below the environment variable `SPECSTOP_CACHE`.

    Args:
        recipe: Which pair; a recipe belongs to one text, as the cache knows pairs by their recipes.
        documents: That text; default: the running Python's standard library.
        progress: Called with the training steps done.
    """
    out = cache_folder() / f"pair-{_digest(recipe)}"
    if not _complete(out, recipe):
        make_pair(stdlib_documents() if documents is None else documents, recipe, out, progress)
    return out


def _digest(recipe: PairRecipe) -> str:
    """Name a recipe together with what else decides the weights: the Python whose library is read."""
    fields = {"recipe": asdict(recipe), "python": platform.python_version(), "schema": SCHEMA_VERSION}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _complete(out: Path, recipe: PairRecipe) -> bool:
    """Say whether `out` holds a whole pair of this recipe."""
    try:
        described = read_json(out / "pair.json", "the cached pair")
    except InputError:
        return False
    if not isinstance(described, dict) or described.get("digest") != _digest(recipe):
        return False
    files = described.get("files")
    if not isinstance(files, dict) or not files:
        return False
    return all((out / name).is_file() and sha256(out / name) == digest for name, digest in files.items())


def _check(stream: torch.Tensor, prompts: dict[str, list[dict[str, str]]], recipe: PairRecipe) -> None:
    for name, found in prompts.items():
        if not found:
            raise InputError(
                f"expected text for at least one {name} prompt of {recipe.prompt_tokens[0]} tokens "
                "in the held-out documents, found none; give more or longer documents"
            )
    if len(stream) <= recipe.length:
        raise InputError(
            f"expected more than {recipe.length} tokens of text to train on, got {len(stream)}; "
            "give more or longer documents"
        )


def _describe(recipe: PairRecipe, text_tokens: int, losses: dict[str, float]) -> dict[str, Any]:
    target, draft = recipe.parameters()
    return {
        "schema": SCHEMA_VERSION,
        "digest": _digest(recipe),
        "recipe": asdict(recipe),
        "parameters": {"target": target, "draft": draft},
        "text_tokens": text_tokens,
        "losses": losses,
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers from drawing its own progress bars: the console belongs to the caller."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
