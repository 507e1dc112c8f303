"""Replay of rounds drawn given the text against the live loop: every choice of both enumerated, joint laws compared.

A case's text and rounds have a joint law. For the live loop it is combined from rounds, each enumerated from its prefix
with the shipped `Speculator`. For replay it is P(text) times the law of what the shipped collector draws given it, all
answers of its random numbers enumerated place by place, replayed by the shipped `replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from enumeration import Enumerator
from oracle import Law, oracle_pair
from specstop.decode.hooks import Hook
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.round_state import RoundState
from specstop.decode.topology import Topology, parse_tree
from specstop.decode.verify.noise import Purpose
from specstop.policies.contract import StopPolicy
from torch import Tensor

Rounds = tuple[Any, ...]
JointLaw = dict[tuple[tuple[int, ...], Rounds], float]
"""Probability by (text, rounds); a round is (anchor, drafted, tokens sent, accepted)."""

SURE = 1e6
"""Noise of a token that is to be the best of its row."""


@dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
        mode, tree: as in `Settings`; the policy's depth is the tree's.
        decider: makes the policy, of a depth; it carries nothing from round to round.
        kind, seed: of the table.
        eos: whether the last token of the vocabulary ends a text.
        new, vocabulary, prompt: of the texts.
    """

    mode: str
    tree: str
    decider: Callable[[int], StopPolicy]
    kind: str = "dense"
    seed: int = 0
    eos: bool = False
    new: int = 5
    vocabulary: int = 3
    prompt: tuple[int, ...] = (0, 1)

    @property
    def topology(self) -> Topology:
        return parse_tree(self.tree)

    def policy(self) -> StopPolicy:
        """Return a new policy, as deep as the tree."""
        return self.decider(self.topology.deepest)

    @property
    def pair(self) -> Pair:
        return oracle_pair(Law(self.vocabulary, self.seed, self.kind), (self.vocabulary - 1,) if self.eos else ())

    def row(self, prefix: Sequence[int]) -> list[float]:
        """Return the target's probabilities after a prefix, the first of which is taken for sure: fewer texts."""
        law = Law(self.vocabulary, self.seed, self.kind)
        p = torch.softmax(law.rows((*self.prompt, *prefix))[0], -1).tolist()
        if prefix:
            return list(p)
        best = p.index(max(p[: len(p) - self.eos]))
        return [float(token == best) for token in range(self.vocabulary)]

    def texts(self) -> dict[tuple[int, ...], float]:
        """Return the probability of each text."""
        out, open_ = {}, [((), 1.0)]
        while open_:
            text, probability = open_.pop()
            if len(text) == self.new or (self.eos and text and text[-1] == self.vocabulary - 1):
                out[text] = probability
            else:
                open_ += [((*text, t), probability * w) for t, w in enumerate(self.row(text)) if w > 0.0]
        return out


class FirstRound(Exception):
    """The first round has ended."""


def live_law(case: Case) -> JointLaw:
    """Return the joint law of text and rounds of the live loop."""
    if case.mode == "point":
        return _live_point(case)
    known: dict[tuple[int, ...], list[tuple[Any, tuple[int, ...], float]]] = {}
    done: JointLaw = {}
    open_: list[tuple[tuple[int, ...], Rounds, float]] = [
        ((token,), (), w) for token, w in enumerate(case.row(())) if w > 0.0
    ]
    while open_:
        text, rounds, probability = open_.pop()
        if len(text) == case.new or (case.eos and text[-1] == case.vocabulary - 1):
            done[text, rounds] = done.get((text, rounds), 0.0) + probability
            continue
        if text not in known:
            known[text] = list(live_round(case, text))
        for outcome, tokens, weight in known[text]:
            open_.append(((*text, *tokens), (*rounds, outcome), probability * weight))
    return done


def live_round(case: Case, text: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...], float]]:
    """Yield (the round, the tokens that it commits, its probability) of every way in which the loop goes on after a text."""
    settings = Settings(1.0, case.new - len(text) + 1, case.topology.deepest, verification=case.mode, tree=case.tree)
    source, watcher = Enumerator(), _First()
    speculator = Speculator(case.pair, case.policy(), settings, source=lambda key, window: source, hooks=[watcher])
    prompt = [*case.prompt, *text[:-1]]
    first, outcomes = 0.0, []
    for seen in source.runs(lambda: watcher.run(speculator, prompt, text[-1])):
        if seen is None:
            continue
        first += source.probability
        (drafted, sent, accepted), committed = seen
        outcomes.append(((len(text), drafted, sent, accepted), committed, source.probability))
    yield from ((outcome, tokens, weight / first) for outcome, tokens, weight in outcomes)


class _First(Hook):
    """Observes one round."""

    def run(self, speculator: Speculator, prompt: list[int], first: int) -> Any:
        self._prompt, self._first, self.seen = prompt, first, None
        try:
            generation = speculator.generate(prompt, 5)
        except FirstRound:
            return self.seen
        assert not generation.rounds  # the first token ended the text
        return None

    def on_round_end(self, round: RoundState) -> None:
        """See `Hook`."""
        text = round.texts[0]
        assert text is not None
        tokens = text.tokens[len(self._prompt) :]
        if tokens[0] == self._first:
            record = round.records[0]
            self.seen = (record.drafted, sent_tokens(round), record.accepted), tuple(tokens[1:])
        raise FirstRound


def sent_tokens(round: RoundState) -> tuple[tuple[int, int], ...]:
    """Return the rows sent with their tokens."""
    ((_, sent),) = round.target_rows
    return tuple((row, int(round.tokens[0, row])) for row in sent[1:])


def _live_point(case: Case) -> JointLaw:
    """Return the joint law under point drafts: the noise of each position says which token the target draws."""
    out: JointLaw = {}
    for text, probability in case.texts().items():
        source = _Known([*text, *[0] * case.topology.deepest], len(case.prompt), case.vocabulary)
        watcher = _RoundRecorder()
        settings = Settings(1.0, case.new, case.topology.deepest, verification=case.mode, tree=case.tree)
        speculator = Speculator(case.pair, case.policy(), settings, source=_always(source), hooks=[watcher])
        assert speculator.generate(list(case.prompt), 5).tokens == text
        out[text, tuple(watcher.outcome)] = probability
    return out


class _RoundRecorder(Hook):
    """Observes every round."""

    def __init__(self) -> None:
        self.outcome: list[Any] = []

    def on_round_end(self, round: RoundState) -> None:
        """See `Hook`."""
        record = round.records[0]
        self.outcome.append((record.anchor, record.drafted, sent_tokens(round), record.accepted))


def _always(source: Any) -> Callable[[int, int], Any]:
    return lambda key, window: source


class _Known:
    """Noise under which the target's tokens are those of a text."""

    def __init__(self, text: Sequence[int], start: int, vocabulary: int) -> None:
        self._text, self._start, self._vocabulary = text, start, vocabulary

    def gumbel(self, position: int, count: int) -> Tensor:
        out = torch.zeros(count, self._vocabulary, dtype=torch.float64)
        for row in range(count):
            out[row, self._text[position + row - self._start]] = SURE
        return out

    def categorical(self, probs: Tensor, round: int, node: int, purpose: Purpose) -> int:
        raise AssertionError("point drafts are not drawn")

    bernoulli = categorical


def apart(one: JointLaw, other: JointLaw) -> float:
    """Return the total variation between two laws."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
