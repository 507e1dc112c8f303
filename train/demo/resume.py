"""The working folder of a demo: its sizes, its lock, and continuing after an interruption."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from ...collect.prompts import encode, read_prompts
from ...decode.loop import Speculator
from ...decode.models.pair import Pair
from ...decode.profile.measuring import Effort
from ...decode.settings import Settings
from ...policies.errors import InputError
from ...policies.files import STAGE_PREFIX, cache_folder, read_json, write_json
from ...policies.fixed import FixedLength

STATE_FILE = "demo.json"
PROBE_TOKENS = 24

REFERENCE_TOKEN_S = 3.3e-3
"""Seconds per token of plain decoding on a quiet machine; the default sizes assume it."""

SMALLEST_SHARE = 0.35
"""Smallest share of the default prompts: fewer give wide intervals."""


@dataclass(frozen=True)
class Sizes:
    """How much work the demo does.

    Attributes:
        train: Training prompts.
        test: Held-out prompts.
        live: Held-out prompts that are decoded live.
        tokens: New tokens of each text.
        depth: Longest draft, K.
        heads: Kinds of heads to train.
        effort: How long the costs of model calls are measured.
        decision_effort: How long the costs of decisions are measured.
    """

    train: int = 104
    test: int = 76
    live: int = 8
    tokens: int = 160
    depth: int = 10
    heads: tuple[str, ...] = ("logistic", "tokens", "mlp", "xgboost")
    effort: Effort = field(default_factory=lambda: Effort(budget_s=12.0))
    decision_effort: Effort = field(default_factory=lambda: Effort(repetitions=6))

    def scaled(self, share: float) -> Sizes:
        """Scale the numbers of prompts by `share`, and shorten the texts if it is at most 0.6."""
        fewest = {"train": 16, "test": 20, "live": 3}  # fewer give no verdict, or no profile between live texts
        counts = {name: max(least, round(getattr(self, name) * share)) for name, least in fewest.items()}
        return dataclasses.replace(self, **counts, tokens=self.tokens if share > 0.6 else min(self.tokens, 128))

    def text(self) -> str:
        """Return the sizes in words."""
        return f"{self.train} training and {self.test} held-out prompts of {self.tokens} tokens, drafts of up to {self.depth}"


QUICK = Sizes(
    train=48, test=40, live=6, tokens=96, heads=("logistic", "tokens"), effort=Effort(budget_s=5.0),
    decision_effort=Effort(repetitions=4),
)  # fmt: skip


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a lock that two demos with the same result folder share.

    Raises:
        InputError: Another process holds it.
    """
    name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    cache_folder().mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(cache_folder() / f"demo-{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise InputError(f"--out: another demo is writing {folder}; wait for it, or choose another folder") from None
    try:
        yield
    finally:
        lock.release()


def continued_sizes(
    work: Path, folder: Path, settings: dict[str, Any], overwrite: bool, announce: Callable[[str], None]
) -> Sizes | None:
    """Return the sizes of an interrupted run with these settings; remove an interrupted run that cannot be continued.

    Raises:
        InputError: There is an interrupted run with other settings, and `overwrite` is not given.
    """
    if not (work / STATE_FILE).is_file():
        shutil.rmtree(work, ignore_errors=True)
        return None
    state = read_json(work / STATE_FILE, "the interrupted demo")
    if state.get("settings") == settings:
        announce("Continuing the interrupted demo.")
        for left in work.rglob(f"{STAGE_PREFIX}*"):  # files that were being written
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        saved = state["sizes"]
        efforts = {name: Effort(**saved[name]) for name in ("effort", "decision_effort")}
        return Sizes(**{**saved, **efforts, "heads": tuple(saved["heads"])})
    if not overwrite:
        changed = [name for name, value in settings.items() if state.get("settings", {}).get(name) != value]
        raise InputError(
            f"--out: an interrupted demo for {folder} differs in {', '.join(changed)}; repeat its options to continue it, "
            "pass --overwrite to discard it, or choose another folder"
        )
    (work / STATE_FILE).unlink()  # first: without it the rest is never continued
    shutil.rmtree(work, ignore_errors=True)
    return None


def begin(
    work: Path, pair_folder: Path, models: Pair, settings: dict[str, Any], sizes: Sizes | None, default_sizes: Sizes,
    announce: Callable[[str], None],
) -> Sizes:  # fmt: skip
    """Create the working folder and return the sizes, by default adapted to the measured speed."""
    if sizes is None:
        prompts = read_prompts(pair_folder / "prompts-train.jsonl", 4)
        token_s = token_seconds(models, encode(prompts, models.tokenizer, models.readable - PROBE_TOKENS))
        sizes = default_sizes.scaled(min(1.0, max(SMALLEST_SHARE, REFERENCE_TOKEN_S / token_s)))
        announce(f"This machine decodes {1 / token_s:.0f} tokens/s with the target alone: {sizes.text()}.")
    work.mkdir(parents=True)
    write_json(work / STATE_FILE, {"settings": settings, "sizes": dataclasses.asdict(sizes)})
    return sizes


def token_seconds(models: Pair, prompts: Sequence[Sequence[int]]) -> float:
    """Return the median seconds per token of plain decoding over `prompts`, after a warm-up."""
    plain = Speculator(models, FixedLength(0), Settings(0.0, PROBE_TOKENS, 1, ignore_eos=True))
    plain.generate(prompts[0], 0)
    seconds = []
    for number, tokens in enumerate(prompts):
        started = time.perf_counter()
        plain.generate(tokens, number)
        seconds.append((time.perf_counter() - started) / PROBE_TOKENS)
    return statistics.median(seconds)
