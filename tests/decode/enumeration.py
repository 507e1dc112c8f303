"""Every sequence of random choices of the loop, one by one: the exact distribution of its texts, to compare with theory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deciders import DECIDERS
from oracle import Law, oracle_pair
from specstop.decode.drafters import find_drafter
from specstop.decode.loop import Settings, Speculator
from specstop.decode.noise import Purpose
from specstop.decode.sampling import Shaping
from torch import Tensor

NEGLIGIBLE = 1e-15
EXACT = 1e-12
MOST_LEAVES = 3000
Texts = dict[tuple[int, ...], float]


class TooMany(Exception):
    """More leaves than a case may have."""


@dataclass
class Fork:
    """A choice: (answer, low, high) by option, the bounds being those of the uniform that it is made from."""

    options: list[tuple[Any, float, float]]
    taken: int = 0


class Enumerator:
    """A `Source` that answers each choice in every possible way, depth first.

    As in `KeyedSource` an answer says in which interval the uniform of its key (round, node, purpose) lies. A loop that
    uses a number twice therefore gets the answers that depend on each other, with the probabilities they have.

    Attributes:
        probability: of the run that just ended.
        reused: choices whose number had been used before in the same run.
    """

    def __init__(self) -> None:
        self._forks: list[Fork] = []
        self._at = 0
        self._spans: dict[tuple[int, int, Purpose], tuple[float, float]] = {}
        self.probability, self.reused = 1.0, 0

    def runs(self, run: Callable[[], Any]) -> Iterator[Any]:
        """Yield what `run` returns under every sequence of answers."""
        while True:
            self._at, self._spans, self.probability = 0, {}, 1.0
            result = run()
            assert self._at == len(self._forks), "the same answers must lead to the same choices"
            yield result
            while self._forks and self._forks[-1].taken + 1 == len(self._forks[-1].options):
                self._forks.pop()
            if not self._forks:
                return
            self._forks[-1].taken += 1

    def categorical(self, probs: Tensor, round: int, node: int, purpose: Purpose) -> int:
        mass = (probs.cumsum(-1) / probs.sum()).tolist()
        return int(self._choose((round, node, purpose), list(zip(range(len(mass)), [0.0, *mass], mass, strict=False))))

    def bernoulli(self, prob: float, round: int, node: int, purpose: Purpose) -> bool:
        return bool(self._choose((round, node, purpose), [(True, 0.0, prob), (False, prob, 1.0)]))

    def gumbel(self, position: int, count: int) -> Tensor:
        raise AssertionError("the rejection family has no Gumbel noise")

    def _choose(self, key: tuple[int, int, Purpose], options: list[tuple[Any, float, float]]) -> Any:
        self.reused += key in self._spans
        low, high = self._spans.get(key, (0.0, 1.0))
        if self._at == len(self._forks):
            within = [(answer, max(low, a), min(high, b)) for answer, a, b in options]
            self._forks.append(Fork([(answer, a, b) for answer, a, b in within if b - a > NEGLIGIBLE]))
        fork = self._forks[self._at]
        self._at += 1
        answer, *span = fork.options[fork.taken]
        self._spans[key] = (span[0], span[1])
        self.probability *= (span[1] - span[0]) / (high - low)
        return answer


@dataclass(frozen=True)
class Case:
    """One combination to prove.

    Attributes:
        mode, tree: as in `Settings`.
        decider: name in `DECIDERS`.
        kind: of the table, see `Law`.
        seed: of the table.
        shaping: name in `SHAPINGS`.
        eos: whether the last token of the vocabulary ends a text.
        drafter: as of `find_drafter`.
        vocabulary, new, temperature, prompt: of the texts.
        attention: backend of the models.
    """

    mode: str = "rejection"
    tree: str = "2,1"
    decider: str = "fixed"
    kind: str = "mixed"
    seed: int = 0
    shaping: str = "plain"
    eos: bool = False
    drafter: str = "model"
    vocabulary: int = 3
    new: int = 4
    temperature: float = 1.0
    prompt: tuple[int, ...] = (0, 1)
    attention: str = "sdpa"

    def __str__(self) -> str:
        parts = [self.mode, self.tree, self.decider, self.kind, self.shaping, self.drafter, "eos" if self.eos else "no eos"]
        return " ".join([*parts, f"V={self.vocabulary} n={self.new} T={self.temperature:g} seed={self.seed}"])

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.vocabulary - 1,) if self.eos else ()


@dataclass
class Proof:
    """What enumerating a case brought.

    Attributes:
        texts: probability by text.
        distance: total variation from the target's own distribution.
        leaves: sequences of choices.
        drafted, dropped, accepted, later: sums over leaves of tokens drawn, drawn but not verified, accepted, and accepted
            in later rounds than the first.
        reused: random numbers used twice.
    """

    texts: Texts = field(default_factory=dict)
    distance: float = 1.0
    leaves: int = 0
    drafted: int = 0
    dropped: int = 0
    accepted: int = 0
    later: int = 0
    reused: int = 0


SHAPINGS = {"plain": Shaping(), "shaped": Shaping(top_k=2, repetition_penalty=1.7)}
CHAINS = ("chain:1", "chain:2", "chain:3")
TREES = ("2", "3", "2,1", "2,2", "1,2", "parents:-1,-1,1,2")
SHAPES = {"rejection": CHAINS + TREES, "rejection_replace": CHAINS + TREES, "block": CHAINS}
PROMPTS = ((0, 1), (2,), (0, 1, 0, 2, 0))


def enumerate_texts(case: Case, most: int = MOST_LEAVES) -> Proof:
    """Run `Speculator` on every sequence of choices and return the distribution of its texts, not compared yet."""
    pair = oracle_pair(Law(case.vocabulary, case.seed, case.kind), case.ends, case.attention)
    settings = Settings(
        case.temperature, case.new, fallback=1, verification=case.mode, tree=case.tree, shaping=SHAPINGS[case.shaping]
    )
    source, proof = Enumerator(), Proof()

    def build() -> Speculator:
        drafter = find_drafter(case.drafter, pair)
        return Speculator(pair, DECIDERS[case.decider](), settings, source=lambda key, window: source, drafter=drafter)

    speculator = build()
    # A policy that fails is replaced for good: each leaf needs one that has not failed yet.
    fails = case.decider.startswith("raising")
    for generation in source.runs(lambda: (build() if fails else speculator).generate(case.prompt, key=5)):
        proof.leaves += 1
        if proof.leaves > most:
            raise TooMany(str(case))
        proof.texts[generation.tokens] = proof.texts.get(generation.tokens, 0.0) + source.probability
        proof.drafted += sum(r.drafted for r in generation.rounds)
        proof.dropped += sum(r.drafted - r.verified for r in generation.rounds)
        proof.accepted += sum(r.accepted for r in generation.rounds)
        proof.later += sum(r.accepted for r in generation.rounds[1:])
    proof.reused = source.reused
    return proof


def prove(case: Case, most: int = MOST_LEAVES) -> Proof:
    """Return the distribution of the loop's texts and its distance from the target's own."""
    proof = enumerate_texts(case, most)
    proof.distance = distance(proof.texts, target_texts(case))
    return proof


def target_texts(case: Case) -> Texts:
    """Return the probability of each text: the product of the target's own conditionals."""
    law = Law(case.vocabulary, case.seed, case.kind)
    out: Texts = {}
    open_ = [((), 1.0)]
    while open_:
        text, probability = open_.pop()
        if len(text) == case.new or (text and text[-1] in case.ends):
            out[text] = probability
            continue
        prefix = (*case.prompt, *text)
        weights = shaped(law.rows(prefix)[0].tolist(), prefix, case)
        open_.extend(((*text, token), probability * w) for token, w in enumerate(weights) if w > 0.0)
    return out


def shaped(logits: Sequence[float], prefix: Sequence[int], case: Case) -> list[float]:
    """Return the probabilities that `case` samples from: written out again, so that it can differ from the loop's."""
    shaping = SHAPINGS[case.shaping]
    penalty = shaping.repetition_penalty
    scores = [(x * penalty if x < 0 else x / penalty) if t in prefix else x for t, x in enumerate(logits)]
    scores = [x / case.temperature for x in scores]
    if shaping.top_k:
        least = sorted(scores, reverse=True)[shaping.top_k - 1]
        scores = [x if x >= least else float("-inf") for x in scores]
    return torch.softmax(torch.tensor(scores, dtype=torch.float64), -1).tolist()


def distance(one: Texts, other: Texts) -> float:
    """Return the total variation between two distributions; what does not sum to 1 counts as well."""
    return 0.5 * sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other})


def all_cases() -> Iterator[Case]:
    """Yield every lossless mode of the rejection family with every shape, policy, processor and end of text.

    Tables, prompts and temperatures take turns, by chance with a fixed seed.
    """
    chance = random.Random(11)
    for decider in DECIDERS:
        for mode, trees in SHAPES.items():
            for tree in trees:
                for shaping in SHAPINGS:
                    for eos in (False, True):
                        seed, prompt = chance.randrange(10**6), chance.choice(PROMPTS)
                        temperature, new = chance.choice((1.0, 1.0, 0.7)), 5 if eos and tree in CHAINS else 4
                        kind = "dense" if tree in (*CHAINS, "2") and chance.random() < 0.4 else "mixed"
                        yield Case(
                            mode, tree, decider, kind, seed, shaping, eos, "model", 3, new, temperature, prompt
                        )


def other_cases() -> Iterator[Case]:
    """Yield prompt lookup, larger vocabularies, and masks of the other form."""
    said = (0, 1, 0, 2, 0, 1)
    for decider in ("fixed", "best-branch", "trims-unsure", "selects-unsure", "raising"):
        for mode, trees in SHAPES.items():
            for tree in trees[::2]:
                yield Case(mode, tree, decider, "mixed", 3, drafter="lookup", eos=True, prompt=said)
                yield Case(mode, tree, decider, "mixed", 4, "shaped", drafter="lookup", prompt=said)
                yield Case(mode, tree, decider, "mixed", 5, eos=True, vocabulary=4)
                yield Case(mode, tree, decider, "sparse", 6, vocabulary=5)
                yield Case(mode, tree, decider, "mixed", 7, eos=True, attention="eager")


def prove_within(case: Case, most: int = MOST_LEAVES) -> tuple[Case, Proof]:
    """Return the proof of `case`, or of one with fewer choices where it has more than `most` leaves."""
    while True:
        try:
            return case, prove(case, most)
        except TooMany:
            # A sparse table leaves each token two successors; after that the text gets shorter.
            case = replace(case, kind="sparse") if case.kind != "sparse" else replace(case, new=case.new - 1)
