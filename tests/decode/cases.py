"""Cases of the enumeration: combinations of mode, tree, policy, table, processors, end of text and drafter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from deciders import DECIDERS
from specstop.decode.verify.sampling import SamplingParams
from torch import Tensor
from transformers import LogitsProcessor


class ByPrefix(LogitsProcessor):
    """Adds numbers that depend on the whole prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.tensor([added(ids, scores.shape[-1]) for ids in input_ids.tolist()], dtype=scores.dtype)


def added(prefix: Sequence[int], vocabulary: int) -> list[float]:
    """Return what `ByPrefix` adds after a prefix."""
    chance = random.Random(str(list(prefix)))
    return [chance.gauss(0.0, 1.0) for _ in range(vocabulary)]


SHAPINGS = {
    "plain": SamplingParams(),
    "shaped": SamplingParams(top_k=2, repetition_penalty=1.7),
    "by-prefix": SamplingParams(processors=(ByPrefix(),)),
}
CHAINS = ("chain:1", "chain:2", "chain:3")
TREES = ("2", "3", "2,1", "2,2", "1,2", "parents:-1,-1,1,2")
SHAPES = {"rejection": CHAINS + TREES, "rejection_replace": CHAINS + TREES, "block": CHAINS}
PROMPTS = ((0, 1), (2,), (0, 1, 0, 2, 0))


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        mode, tree: as in `Settings`.
        decider: name in `DECIDERS`.
        kind: of the table, see `Law`.
        seed: of the table.
        sampling: name in `SHAPINGS`.
        eos: whether the last token of the vocabulary ends a text.
        drafter: as of `find_drafters`.
        vocabulary, new, temperature, prompt: of the texts.
        attention: backend of the models.
        draft_knows: how many tokens of the vocabulary, the first ones; 0 = all.
    """

    mode: str = "rejection"
    tree: str = "2,1"
    decider: str = "fixed"
    kind: str = "mixed"
    seed: int = 0
    sampling: str = "plain"
    eos: bool = False
    drafter: str = "model"
    vocabulary: int = 3
    new: int = 4
    temperature: float = 1.0
    prompt: tuple[int, ...] = (0, 1)
    attention: str = "sdpa"
    draft_knows: int = 0

    def __str__(self) -> str:
        end = "eos" if self.eos else "no eos"
        words = (self.mode, self.tree, self.decider, self.kind, self.sampling, self.drafter, end)
        return f"{' '.join(words)} V={self.vocabulary} n={self.new} T={self.temperature:g} seed={self.seed}"

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.vocabulary - 1,) if self.eos else ()


def shaped(logits: Sequence[float], prefix: Sequence[int], case: Case) -> list[float]:
    """Return the probabilities that `case` samples from: computed independently of the product code."""
    sampling = SHAPINGS[case.sampling]
    penalty = sampling.options.get("repetition_penalty", 1.0)
    scores = [(x * penalty if x < 0 else x / penalty) if t in prefix else x for t, x in enumerate(logits)]
    if sampling.processors:
        scores = [x + more for x, more in zip(scores, added(prefix, case.vocabulary), strict=True)]
    scores = [x / case.temperature for x in scores]
    if "top_k" in sampling.options:
        least = sorted(scores, reverse=True)[sampling.options["top_k"] - 1]
        scores = [x if x >= least else float("-inf") for x in scores]
    return torch.softmax(torch.tensor(scores, dtype=torch.float64), -1).tolist()


def all_cases() -> Iterator[Case]:
    """Yield every lossless mode of the rejection family with every shape, policy, processor and end of text.

    Tables, prompts and temperatures take turns, by chance with a fixed seed.
    """
    chance = random.Random(11)
    for decider in DECIDERS:
        for mode, trees in SHAPES.items():
            for tree in trees:
                for sampling in SHAPINGS:
                    for eos in (False, True):
                        seed, prompt = chance.randrange(10**6), chance.choice(PROMPTS)
                        temperature, new = chance.choice((1.0, 1.0, 0.7)), 5 if eos and tree in CHAINS else 4
                        kind = "dense" if tree in (*CHAINS, "2") and chance.random() < 0.4 else "mixed"
                        yield Case(mode, tree, decider, kind, seed, sampling, eos, "model", 3, new, temperature, prompt)


def other_cases() -> Iterator[Case]:
    """Yield prompt lookup, larger vocabularies, and masks of the other form."""
    said = (0, 1, 0, 2, 0, 1)
    for decider in ("fixed", "confidence", "trims-unsure", "selects-unsure", "raising-in-select"):
        for mode, trees in SHAPES.items():
            for tree in trees[::2]:
                yield Case(mode, tree, decider, "mixed", 3, drafter="lookup", eos=True, prompt=said)
                yield Case(mode, tree, decider, "mixed", 4, "shaped", drafter="lookup", prompt=said)
                yield Case(mode, tree, decider, "mixed", 5, eos=True, vocabulary=4)
                yield Case(mode, tree, decider, "sparse", 6, vocabulary=5)
                yield Case(mode, tree, decider, "mixed", 7, eos=True, attention="eager")
