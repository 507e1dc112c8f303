"""Enumeration of all random choices of the loop: the exact distribution of its texts, compared with the target's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cases import SHAPINGS, Case, shaped
from deciders import DECIDERS
from joint_policies import JOINT
from oracle import Law, oracle_pair
from small_drafters import DRAFTERS, small_drafter
from specstop.decode.drafters import find_drafters
from specstop.decode.hooks import Hook
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.records import Generation
from specstop.decode.round_state import RoundState
from specstop.decode.verify.noise import KeyedSource, Purpose
from torch import Tensor

NEGLIGIBLE = 1e-15
EXACT = 1e-12
MOST_LEAVES = 3000
Texts = dict[tuple[int, ...], float]
JointLaw = dict[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], float]


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
        self._spans: dict[Hashable, tuple[float, float]] = {}
        self.probability, self.reused = 1.0, 0

    def runs(self, run: Callable[[], Any]) -> Iterator[Any]:
        """Yield what `run` returns under every sequence of answers."""
        has_next = True
        while has_next:
            self.begin()
            result = run()
            assert self._at == len(self._forks), "the same answers must lead to the same choices"
            yield result
            has_next = self.advance()

    def begin(self) -> None:
        """Begin a run."""
        self._at, self._spans, self.probability = 0, {}, 1.0

    def advance(self) -> bool:
        """Go on to the next sequence of answers; return False if there is none."""
        while self._forks and self._forks[-1].taken + 1 == len(self._forks[-1].options):
            self._forks.pop()
        if self._forks:
            self._forks[-1].taken += 1
        return bool(self._forks)

    def categorical(self, probs: Tensor, round: int, node: int, purpose: Purpose) -> int:
        mass = (probs.cumsum(-1) / probs.sum()).tolist()
        return int(self.choose((round, node, purpose), list(zip(range(len(mass)), [0.0, *mass], mass, strict=False))))

    def bernoulli(self, prob: float, round: int, node: int, purpose: Purpose) -> bool:
        return bool(self.choose((round, node, purpose), [(True, 0.0, prob), (False, prob, 1.0)]))

    def gumbel(self, position: int, count: int) -> Tensor:
        raise AssertionError("the rejection family has no Gumbel noise")

    def choose(self, key: Hashable, options: list[tuple[Any, float, float]]) -> Any:
        """Return the next answer among options (answer, low, high)."""
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


@dataclass
class Proof:
    """Result of enumerating a case.

    Attributes:
        texts: probability by text.
        joint: probability by (text, rounds); a round is (anchor, drafted, verified, accepted).
        distance: total variation from the target's distribution.
        leaves: sequences of choices.
        drafted, dropped, accepted, later: sums over leaves of tokens drawn, drawn but not verified, accepted, and accepted
            in later rounds than the first.
        reused: random numbers used twice.
        shared: verifications of several streams.
    """

    texts: Texts = field(default_factory=dict)
    joint: JointLaw = field(default_factory=dict)
    distance: float = 1.0
    leaves: int = 0
    drafted: int = 0
    dropped: int = 0
    accepted: int = 0
    later: int = 0
    reused: int = 0
    shared: int = 0


def enumerate_texts(case: Case, most: int = MOST_LEAVES, beside: int = 0) -> Proof:
    """Run `Speculator` on every sequence of choices and return the distribution of its texts, not compared yet.

    Args:
        case: what is decoded.
        most: leaves.
        beside: number of other streams of the batch, which have keyed noise; the second half of them begins before.
    """
    pair = oracle_pair(Law(case.vocabulary, case.seed, case.kind), case.ends, case.attention, case.draft_knows)
    settings = Settings(
        case.temperature, case.new, fallback=1, verification=case.mode, tree=case.tree, sampling=SHAPINGS[case.sampling]
    )
    source, proof = Enumerator(), Proof()

    class Counts(Hook):
        def on_verified(self, round: RoundState) -> None:
            proof.shared += len(round.target_rows) > 1

    def build() -> Speculator:
        drafters = (
            [small_drafter(case.drafter, pair)] if case.drafter in DRAFTERS else find_drafters(case.drafter, pair)
        )
        policy = (DECIDERS.get(case.decider) or JOINT[case.decider])()
        return Speculator(
            pair, policy, settings, source=open_source, drafters=drafters, hooks=[Counts()], batch=1 + beside
        )

    def open_source(key: int, window: int) -> Any:
        return source if key == 5 else KeyedSource(key, pair.vocabulary, window, pair.logits_dtype)

    def decode(speculator: Speculator) -> Generation:
        speculator.reset()
        others = [Request(case.prompt[:1] * (1 + key % 3), key) for key in range(100, 100 + 2 * beside)]
        return speculator.run([*others[beside:], Request(case.prompt, 5), *others[:beside]])[beside]

    speculator = build()
    # A policy that fails is replaced for good: each leaf needs one that has not failed yet.
    fails = case.decider.startswith("raising")
    for generation in source.runs(lambda: decode(build() if fails else speculator)):
        proof.leaves += 1
        if proof.leaves > most:
            raise TooMany(str(case))
        rounds = tuple((r.anchor, r.drafted, r.verified, r.accepted) for r in generation.rounds)
        key = generation.tokens, rounds
        proof.texts[generation.tokens] = proof.texts.get(generation.tokens, 0.0) + source.probability
        proof.joint[key] = proof.joint.get(key, 0.0) + source.probability
        proof.drafted += sum(r.drafted for r in generation.rounds)
        proof.dropped += sum(r.drafted - r.verified for r in generation.rounds)
        proof.accepted += sum(r.accepted for r in generation.rounds)
        proof.later += sum(r.accepted for r in generation.rounds[1:])
    proof.reused = source.reused
    return proof


def prove(case: Case, most: int = MOST_LEAVES, beside: int = 0) -> Proof:
    """Return the distribution of the loop's texts and its distance from the target's."""
    proof = enumerate_texts(case, most, beside)
    proof.distance = distance(proof.texts, target_texts(case))
    return proof


def target_texts(case: Case) -> Texts:
    """Return the probability of each text: the product of the target's conditionals."""
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


def distance(one: dict[Any, float], other: dict[Any, float]) -> float:
    """Return the total variation between two distributions; what does not sum to 1 counts as well."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def prove_within(case: Case, most: int = MOST_LEAVES, beside: int = 0) -> tuple[Case, Proof]:
    """Return the proof of `case`, or of one with fewer choices where it has more than `most` leaves."""
    while True:
        try:
            return case, prove(case, most, beside)
        except TooMany:
            # A sparse table leaves each token two successors; after that the text gets shorter.
            case = replace(case, kind="sparse") if case.kind != "sparse" else replace(case, new=case.new - 1)
