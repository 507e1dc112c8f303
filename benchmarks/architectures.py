"""Greedy texts of every kind of model and engine, compared with transformers' `generate`.

    python benchmarks/architectures.py --check
    python benchmarks/architectures.py --part classes --classes llama gptj

- `classes`: every causal language model class of the installed transformers that can be built small, in float64:
  alone, side by side, as a chain and as a tree. Its texts are those of `generate`, or the class is refused with
  `PairError` or `InputError`.
- `engines`: eleven kinds of model with two attention backends, three dtypes and all engines, the draft a noisy copy
  of the target. In float64 every text is equal. In float32 a text may leave the plain one at a tie (the two best
  logits closer than 1e-4). In bfloat16 the margins at which texts part are reported.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from harness import Run
from specstop.decode import Pair, join, with_engine
from transformers import PreTrainedModel
from transformers.utils import logging

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "decode")]

from random_models import (  # noqa: E402
    CONFIGS,
    DTYPES,
    EAGER_ONLY,
    POLICIES,
    SHAPES,
    Compared,
    build,
    compare,
    names,
    noisy,
    plain,
    prompts,
    sweep_class,
)


def classes(run: Run) -> None:
    """Compare the classes of transformers."""
    logging.set_verbosity_error()  # small configurations are no checkpoint's
    chosen = run.options.classes or run.choose(names(), ("llama", "gptj", "mamba"))
    rows = [sweep_class(name) for name in chosen]
    built = [row for row in rows if row.cells]
    for row in rows:
        cells = Counter(row.cells.values())
        results = ", ".join(f"{count} {cell}" for cell, count in cells.items()) or "not built"
        run.row(f"{row.name} ({row.cls})", cells["equal"], f"{results} {row.note}".strip())
    equal = sum(set(row.cells.values()) == {"equal"} for row in built)
    run.row("classes with equal texts in every way", equal, f"of {len(built)} that were built, {len(rows)} in all")
    faults = sum(row.faults for row in rows)
    run.bar("methods with wrong texts or an exception", faults, at_most=0, always=True)


def engines(run: Run) -> None:
    """Compare kinds of model by attention, dtype and engine."""
    count, new = run.choose((8, 48), (2, 8))
    kinds = run.options.kinds or run.choose(list(CONFIGS), ["llama"])
    cells: dict[tuple[str, str], list[Compared]] = {}
    for name, attention, dtype, target, pair in pairs(kinds):
        sample = prompts(count, vocabulary=pair.vocabulary)
        expected = [plain(target, prompt, new) for prompt in sample]
        results = [
            compare(target, pair, policy, tree, sample, expected, new)
            for tree in SHAPES[: run.choose(None, 2)]
            for policy in POLICIES
        ]
        cells.setdefault((dtype, pair.engines[0]), []).extend(results)
        different = [f"{m:.2g}" for result in results for m in result.margins]
        run.row(
            f"{name}, {attention}, {dtype}, {pair.engines[0]}: equal texts",
            sum(result.equal for result in results),
            f"of {sum(result.texts for result in results)}, margins {' '.join(different) or 'none'}",
        )
    for (dtype, engine), results in sorted(cells.items()):
        if dtype == "bfloat16":
            continue
        ties = 0 if dtype == "float64" else sum(result.ties for result in results)
        wrong = sum(result.texts - result.equal for result in results) - ties
        run.bar(
            f"{dtype}, {engine}: texts that differ without a tie", wrong, at_most=0, always=True, note=f"{ties} ties"
        )


def pairs(kinds: Iterable[str]) -> Iterator[tuple[str, str, str, PreTrainedModel, Pair]]:
    """Yield (kind, attention, dtype, unchanged target, pair) for each engine."""
    for name in kinds:
        for attention in ("eager",) if name in EAGER_ONLY else ("sdpa", "eager"):
            for dtype in DTYPES:
                target = build(name, DTYPES[dtype], attention)
                draft = noisy(target)
                yield name, attention, dtype, target, join(target, draft)
                if dtype != "float64":  # only the plain engine computes in float64
                    yield name, attention, dtype, target, with_engine(join(copy.deepcopy(target), draft))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this script."""
    parser.add_argument("--classes", nargs="+", metavar="TYPE", help="model types of the part `classes` (default: all)")
    parser.add_argument("--kinds", nargs="+", choices=CONFIGS, help="kinds of the part `engines` (default: all)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(Run(__doc__, {"classes": classes, "engines": engines}, add_options).execute())
