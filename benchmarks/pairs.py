"""The pair that a benchmark runs on, its prompts, and how long it is timed.

With `--quick` the pair is made in seconds, and timed hardly at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from specstop.collect.prompts.read import Prompt, encode, read_prompts
from specstop.decode import Generation, Settings, Speculator, load_pair, stream_key
from specstop.decode.profile.measuring import Effort
from specstop.policies import FixedLength
from specstop.policies.errors import InputError
from specstop.policies.files.atomic import read_json
from specstop.policies.progress import Progress, silent
from specstop.train.demo.pair import cached_pair, demo_pair
from specstop.train.demo.pair_recipe import RECIPES
from specstop.train.demo.pair_text import Document, cut_prompts, split_documents, stdlib_documents
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

QUICK = replace(
    RECIPES["tiny"], steps=200, own_steps=100, own_rows=32, own_prefix=16, own_tokens=32, held_out=0.1,
    text_bytes=60_000, prompts_train=48, prompts_test=24,
)  # fmt: skip
"""A hundred thousand weights that have learnt a little: about half of the drafts are accepted."""

QUICK_DOCUMENTS, QUICK_REPETITIONS = 80, 2


def documents(options: argparse.Namespace) -> Sequence[Document]:
    """Return the text that the pair of `own_pair` was made of."""
    return stdlib_documents()[: QUICK_DOCUMENTS if options.quick else None]


def own_pair(options: argparse.Namespace, progress: Progress = silent) -> Path:
    """Return the folder of the embedded pair, or with `--quick` that of the tiny one; made where it is not cached."""
    if options.quick:
        return cached_pair(QUICK, documents(options), progress)
    return demo_pair(progress=progress)


def pair_folder(options: argparse.Namespace, progress: Progress = silent) -> Path:
    """Return the folder of `--pair`, else of the benchmark's own pair."""
    return options.pair or own_pair(options, progress)


def effort(options: argparse.Namespace) -> Effort:
    """Return how long a profile of the pair is measured."""
    return Effort(repetitions=QUICK_REPETITIONS) if options.quick else Effort()


def accepted_first(texts: Sequence[Generation]) -> float:
    """Return P(A >= 1), the share of rounds whose first draft was accepted, of those that drafted."""
    rounds = [made for text in texts for made in text.rounds if made.verified]
    return sum(made.accepted > 0 for made in rounds) / max(len(rounds), 1)


def weaker_pair(folder: Path, room: Path, least: float = 0.5, most: float = 0.58, tries: int = 12) -> Path:
    """Write the pair of `folder` with noise on the draft's weights, as much as brings P(A >= 1) between two limits.

    Args:
        folder: of a pair.
        room: for the draft; targets and prompts are linked.
        least, most: greedy acceptance of the first draft on 24 training prompts. A draft that is no better stays as it is.
        tries: halvings of the noise's scale.

    Raises:
        RuntimeError: no scale that was tried gives that.
    """
    out, scale, low, high = room / "weaker", 0.0, 0.0, 1.0
    out.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name != "draft":
            (out / path.name).symlink_to(path.resolve())
    for _ in range(tries):
        _disturbed(folder / "draft", scale, out / "draft")
        pair = load_pair(out / "target", out / "draft")
        prompts = read_prompts(out / "prompts-train.jsonl", 24)
        loop = Speculator(pair, FixedLength(1), Settings(0.0, 128))
        ids = encode(prompts, pair.tokenizer, 512)
        rate = accepted_first([loop.generate(i, stream_key(0, p.id)) for i, p in zip(ids, prompts, strict=True)])
        if rate <= most and (rate >= least or scale == 0.0):
            return out
        low, high = (scale, high) if rate > most else (low, scale)
        scale = (low + high) / 2.0
    raise RuntimeError(f"no noise on the draft's weights gives P(A >= 1) between {least} and {most}")


def unseen_prompts(pair: Path, text: Sequence[Document], train: int, test: int) -> tuple[list[Prompt], list[Prompt]]:
    """Cut more prompts than a pair came with, from text that neither of its models has seen.

    Args:
        pair: folder of `make_pair`.
        text: what it was made of.
        train: prompts for collecting traces.
        test: prompts for tests, from other documents.

    Returns:
        Training and test prompts, as many as the text has.

    Raises:
        InputError: the pair was not made of these documents.
    """
    described: Any = read_json(pair / "pair.json", "the pair")
    recipe = described["recipe"]
    split = split_documents(text, recipe["held_out"], recipe["seed"], recipe["text_bytes"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "target")
    # Three fifths for training, as `split_documents` deals what it holds out.
    most = len(split.left) * 3 // 5
    found = []
    for side, own, more, count in (
        ("train", split.prompts_train, split.left[:most], train),
        ("test", split.prompts_test, split.left[most:], test),
    ):
        cut = cut_prompts(tokenizer, [*own, *more], count, tuple(recipe["prompt_tokens"]), recipe["seed"])
        first = (pair / f"prompts-{side}.jsonl").read_text(encoding="utf-8").partition("\n")[0]
        # The pair's own documents come first, cut with the same seed: the same text gives the same first prompt.
        if cut[0] != json.loads(first):
            raise InputError(f"expected the text that {pair} was made of: its first {side} prompt is not in this one")
        found.append([Prompt(record["id"], record["prompt"], record["group"]) for record in cut])
    return found[0], found[1]


def _disturbed(draft: Path, scale: float, out: Path) -> None:
    """Write a draft model with normal noise on each matrix, `scale` of the spread of its weights."""
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights += scale * weights.std() * torch.randn(weights.shape, generator=chance)
    model.save_pretrained(out)
    for path in draft.iterdir():
        if "token" in path.name and not (out / path.name).exists():
            (out / path.name).symlink_to(path.resolve())
