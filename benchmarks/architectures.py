"""Greedy texts of every kind of model and engine, compared with transformers' `generate`.

    python benchmarks/architectures.py --check
    python benchmarks/architectures.py --part classes

- `classes`: every causal language model class of the installed transformers that can be built small, in float64:
  alone, side by side, as a chain and as a tree. Its texts are those of `generate`, or the class is refused with
  `PairError` or `InputError`.
- `engines`: eleven kinds of model with two attention backends, three dtypes and all engines, the draft a noisy copy
  of the target. In float64 every text is equal. In float32 and bfloat16 a text may leave the plain one at a tie (the
  two best logits differ by rounding only).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from harness import Run
from random_models import CONFIGS, EAGER_ONLY, build, names, noisy, plain, prompts, sweep_class
from specstop.decode import Pair, Settings, Speculator, join, with_engine
from specstop.decode.benchmark import count_differences
from specstop.decode.records import Generation
from specstop.policies import Confidence, FixedLength, StopPolicy
from transformers import PreTrainedModel
from transformers.utils import logging

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = (None, "3,2,1", "fork:4x4", "parents:-1,-1,0,0,1,2,5")
POLICIES: tuple[StopPolicy, ...] = (FixedLength(4), Confidence(0.2))


def classes(run: Run) -> None:
    """Compare the classes of transformers."""
    logging.set_verbosity_error()  # small configurations are no checkpoint's
    chosen = run.choose(names(), ("llama", "gptj", "mamba"))
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
    cells: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name, attention, dtype, target, pair in pairs(run.choose(list(CONFIGS), ["llama"])):
        sample = prompts(count, vocabulary=pair.vocabulary)
        base = [Generation(tuple(plain(target, prompt, new)), (), len(prompt), 0.0, 0.0) for prompt in sample]
        results = []
        for tree in SHAPES[: run.choose(None, 2)]:
            for policy in POLICIES:
                settings = Settings(0.0, new, tree=tree)
                speculator = Speculator(pair, policy, settings)
                texts = [speculator.generate(prompt) for prompt in sample]
                results.append(count_differences(pair, settings, sample, texts, base))
        cells.setdefault((dtype, pair.engines[0]), []).extend(results)
        differing = sum(ties + wrong for ties, wrong in results)
        run.row(
            f"{name}, {attention}, {dtype}, {pair.engines[0]}: equal texts",
            count * len(results) - differing, f"of {count * len(results)}, {sum(ties for ties, _ in results)} after a tie",
        )  # fmt: skip
    for (dtype, engine), results in sorted(cells.items()):
        if dtype == "bfloat16":
            continue
        ties = sum(ties for ties, _ in results)
        wrong = sum(wrong for _, wrong in results) + (ties if dtype == "float64" else 0)
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(Run(__doc__, [classes, engines]).execute())
