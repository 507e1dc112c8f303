"""The pair that a benchmark runs on, and how long it is timed: with `--quick` a pair made in seconds, and hardly at all."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specstop.decode.profile.measuring import Effort
from specstop.policies.progress import Progress, silent
from specstop.train.demo.pair import RECIPES, Document, cached_pair, demo_pair, stdlib_documents

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
