"""The pair that a benchmark runs on, its prompts, and how long it is timed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from specstop.collect.prompts import Prompt, encode, read_prompts
from specstop.decode import Generation, Settings, Speculator, load_pair, stream_key
from specstop.decode.profile.measuring import Effort
from specstop.policies import FixedLength
from specstop.train.demo.pair import shipped_pair
from transformers import AutoModelForCausalLM

QUICK_REPETITIONS = 2


def pair_folder(options: argparse.Namespace) -> Path:
    """Return the folder of `--pair`, by default that of the shipped pair."""
    return options.pair or shipped_pair()


def prompts_of(pair: Path, train: int, test: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return up to `train` training and `test` test prompts of a pair, which neither of its models was trained on."""
    return read_prompts(pair / "prompts-train.jsonl", train), read_prompts(pair / "prompts-test.jsonl", test)


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
