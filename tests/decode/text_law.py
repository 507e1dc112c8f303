"""Replay of rounds drawn given the text against the live loop: every choice of both enumerated, joint laws compared.

A case's text and rounds have a joint law. Of the live loop it is put together of rounds, each enumerated from its own prefix
with the shipped `Speculator`. Of replay it is P(text) times the law of what the shipped collector draws given it, all
answers of its random numbers enumerated place by place, replayed by the shipped `replay`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import specstop.collect.dense.unroll as unrolling
import torch
from enumeration import NEGLIGIBLE, Enumerator
from oracle import Law, oracle_pair
from specstop.collect.dense.collector import Written, text_columns
from specstop.collect.dense.completions import target_rows
from specstop.collect.dense.gather import gather
from specstop.collect.dense.places import Places
from specstop.collect.dense.unroll import Anchors, Unroller, node_features
from specstop.collect.schema import Header, parents
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.policy.runner import PolicyRunner
from specstop.decode.rounds import play_round
from specstop.decode.topology import Topology, parse_tree
from specstop.decode.verify.modes import MODES
from specstop.decode.verify.noise import Purpose
from specstop.policies.contract import StopPolicy
from specstop.policies.features import ANCHOR_FEATURES
from specstop.policies.latency.profile import Profile
from specstop.policies.latency.tables import CostTable
from specstop.train.replay.source import TraceSource
from specstop.train.replay.traces.arrays import TraceArrays
from specstop.train.replay.traces.checking import check_replayable
from torch import Tensor

Rounds = tuple[Any, ...]
JointLaw = dict[tuple[tuple[int, ...], Rounds], float]
"""Probability by (text, rounds); a round is (anchor, drafted, tokens sent, accepted)."""

CHANCES = ("accept_chance", "next_chance")

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
        off_text: see `Unroller`.
        new, vocabulary, prompt: of the texts.
    """

    mode: str
    tree: str
    decider: Callable[[int], StopPolicy]
    kind: str = "dense"
    seed: int = 0
    eos: bool = False
    off_text: str = "exact"
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
    """The round that was asked for is done."""


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
        for told, tokens, weight in known[text]:
            open_.append(((*text, *tokens), (*rounds, told), probability * weight))
    return done


def live_round(case: Case, text: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...], float]]:
    """Yield (the round, the tokens that it commits, its probability) of every way in which the loop goes on after a text."""
    settings = Settings(1.0, case.new - len(text) + 1, case.topology.deepest, verification=case.mode, tree=case.tree)
    source, watcher = Enumerator(), _First()
    speculator = Speculator(case.pair, case.policy(), settings, source=lambda key, window: source, observer=watcher)
    prompt = [*case.prompt, *text[:-1]]
    first, found = 0.0, []
    for seen in source.runs(lambda: watcher.run(speculator, prompt, text[-1])):
        if seen is None:
            continue
        first += source.probability
        (drafted, sent, accepted), committed = seen
        found.append(((len(text), drafted, sent, accepted), committed, source.probability))
    yield from ((told, tokens, weight / first) for told, tokens, weight in found)


class _First:
    """Observes one round."""

    def run(self, speculator: Speculator, prompt: list[int], first: int) -> Any:
        self._prompt, self._first, self.seen = prompt, first, None
        try:
            generation = speculator.generate(prompt, 5)
        except FirstRound:
            return self.seen
        assert not generation.rounds  # the first token ended the text
        return None

    def level(self, *_: Any) -> None:
        """See `Observer`."""

    def round(self, seen: Any) -> None:
        """See `Observer`."""
        tokens = seen.text.tokens[len(self._prompt) :]
        if tokens[0] == self._first:
            found, sent = seen.found, [place for place in seen.sent if place]
            rows = sorted((found.rows[place], found.tokens[place]) for place in sent)
            self.seen = (seen.record.drafted, tuple(rows), seen.record.accepted), tuple(tokens[1:])
        raise FirstRound


def _live_point(case: Case) -> JointLaw:
    """Return the joint law under point drafts: the noise of each position says which token is the target's own."""
    out: JointLaw = {}
    for text, probability in case.texts().items():
        source = _Known([*text, *[0] * case.topology.deepest], len(case.prompt), case.vocabulary)
        watcher = _Telling()
        settings = Settings(1.0, case.new, case.topology.deepest, verification=case.mode, tree=case.tree)
        speculator = Speculator(case.pair, case.policy(), settings, source=_always(source), observer=watcher)
        assert speculator.generate(list(case.prompt), 5).tokens == text
        out[text, tuple(watcher.told)] = probability
    return out


class _Telling:
    """Observes every round."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def level(self, *_: Any) -> None:
        """See `Observer`."""

    def round(self, seen: Any) -> None:
        """See `Observer`."""
        found, record = seen.found, seen.record
        rows = sorted((found.rows[place], found.tokens[place]) for place in seen.sent if place)
        self.told.append((record.anchor, record.drafted, tuple(rows), record.accepted))


def _always(source: Any) -> Callable[[int, int], Any]:
    return lambda key, window: source


class _Known:
    """Noise under which the target's own tokens are those of a text."""

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


class Numbers:
    """The random numbers of the draws at one place, each in every interval within which no answer changes, depth first."""

    def __init__(self) -> None:
        self._forks: list[tuple[list[tuple[float, float]], int]] = []
        self.leaves: list[float] = []
        self.exhausted = False
        self.begin()

    def begin(self) -> None:
        """Begin a run: the next leaf, or the first again once there is none."""
        self._at, self.probability = 0, 1.0

    def end(self) -> None:
        """Note the leaf, and go on to the next one."""
        if self.exhausted:
            return
        self.leaves.append(self.probability)
        while self._forks and self._forks[-1][1] + 1 == len(self._forks[-1][0]):
            self._forks.pop()
        if not self._forks:
            self.exhausted = True
        else:
            spans, taken = self._forks[-1]
            self._forks[-1] = spans, taken + 1

    def uniform(self, marks: Sequence[float]) -> float:
        """Return a number of the interval, between marks, whose turn it is."""
        edges = sorted({0.0, 1.0, *(min(max(mark, 0.0), 1.0) for mark in marks)})
        spans = [(low, high) for low, high in itertools.pairwise(edges) if high - low > NEGLIGIBLE]
        if self.exhausted:
            taken = 0
        else:
            if self._at == len(self._forks):
                self._forks.append((spans, 0))
            taken = self._forks[self._at][1]
            assert self._forks[self._at][0] == spans, "the same answers must lead to the same choices"
            self._at += 1
        low, high = spans[taken]
        self.probability *= high - low
        return (low + high) / 2


class EnumeratedDraws:
    """See `given_text.Draws`: rows at one position and row of the tree share their numbers, as keyed ones do."""

    def __init__(
        self, numbers: dict[int, Numbers], wanted: Callable[[int, int], bool], position: Tensor, node: Tensor
    ) -> None:
        self._numbers, self._keys = numbers, list(zip(position.tolist(), node.tolist(), strict=True))
        self._wanted = wanted
        self._taken = torch.zeros(len(self._keys), dtype=torch.bool)

    def _answer(self, marks: Callable[[int], list[float]], asks: Sequence[bool]) -> list[float]:
        """Return a number for each row, given the marks of those that ask."""
        found: dict[tuple[int, int], float] = {}
        for key in dict.fromkeys(self._keys):
            rows = [row for row, own in enumerate(self._keys) if own == key and asks[row]]
            if rows and self._wanted(*key):
                numbers = self._numbers.setdefault(key[0], Numbers())
                found[key] = numbers.uniform([mark for row in rows for mark in marks(row)])
        return [found.get(key, 0.5) for key in self._keys]

    def accepts(self, chance: Tensor, rank: int) -> Tensor:
        uniform = self._answer(lambda row: [float(chance[row])], (chance > 0.0).tolist())
        self._taken = torch.tensor(uniform, dtype=torch.float64) < chance
        return self._taken

    def tokens(self, weights: Tensor, rank: int) -> Tensor:
        mass = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
        uniform = self._answer(lambda row: mass[row].tolist()[:-1], (~self._taken).tolist())
        return torch.searchsorted(mass, torch.tensor(uniform, dtype=torch.float64)[:, None], right=True)[:, 0]


def replay_law(case: Case, texts: dict[tuple[int, ...], float] | None = None) -> JointLaw:
    """Return the joint law of text and rounds of replay, of all texts or of these."""
    out: JointLaw = {}
    for text, probability in (case.texts() if texts is None else texts).items():
        if len(text) < 2:
            out[text, ()] = probability
            continue
        arrays, weights = drawn_traces(case, text)
        for told, weight in zip(replayed(arrays, case.policy()), weights.tolist(), strict=True):
            out[text, told] = out.get((text, told), 0.0) + probability * weight
    return out


def replayed(arrays: TraceArrays, policy: StopPolicy) -> list[Rounds]:
    """Return the rounds of each sequence, as the shared round loop plays them on a trace."""
    check_replayable(arrays, policy, profile(arrays.tree))
    source, runner = TraceSource(arrays, policy, np.arange(arrays.sequences)[:, None]), PolicyRunner(policy)
    runner.start(arrays.keys.numpy())
    rounds: list[list[Any]] = [[] for _ in range(arrays.sequences)]
    tokens = arrays.tokens.numpy()
    while source.active.any():
        anchor, active = source.anchor, source.active
        made = play_round(source, runner)
        sent = made.found.sent[:, 1:]
        for at in np.flatnonzero(active).tolist():
            rows = tuple((node + 1, int(tokens[source.row[at], node])) for node in np.flatnonzero(sent[at]).tolist())
            rounds[at].append((int(anchor[at]), int(made.found.drafted[at]), rows, int(made.accepted[at])))
        source.next_texts()
    return [tuple(told) for told in rounds]


def drawn_traces(case: Case, text: tuple[int, ...]) -> tuple[TraceArrays, Any]:
    """Return every trace that the collector may draw given a text, each as a sequence, with their probabilities [S]."""
    pair, tree, start = case.pair, case.topology, len(case.prompt)
    numbers: dict[int, Numbers] = {}

    def wanted(position: int, node: int) -> bool:
        """Whether a round may come to what is drawn there: the limit leaves one token to the target."""
        return position - start + depths[node] <= case.new - 2 and position - start < len(text)

    unroller = Unroller(
        pair, tree, 1.0, verification=case.mode, off_text=case.off_text,
        choices=lambda key, draw: lambda position, node: EnumeratedDraws(numbers, wanted, position, node),
    )  # fmt: skip
    depths = unroller.shape.depth
    rows = target_rows(pair, list(case.prompt), list(text))[0]
    anchor = torch.arange(1, len(text))
    anchors = Anchors([*case.prompt, *text], start, anchor, 0)
    runs: list[Places] = []
    with mock.patch.object(unrolling, "gather", lambda places, begin, tree: places):
        while not runs or not all(one.exhausted for one in numbers.values()):
            for one in numbers.values():
                one.begin()
            runs.append(unroller.unroll(anchors, rows))
            for one in numbers.values():
                one.end()
    return _combined(case, unroller, text, rows, anchor, runs, numbers)


def _combined(
    case: Case, unroller: Unroller, text: tuple[int, ...], rows: Tensor, anchor: Tensor, runs: list[Places],
    numbers: dict[int, Numbers],
) -> tuple[TraceArrays, Any]:  # fmt: skip
    """Return the traces of all combinations of leaves of the places, put together by the collector's own `gather`."""
    start, first = len(case.prompt), runs[0]
    leaves = [numbers[start + 1 + at].leaves if start + 1 + at in numbers else [1.0] for at in range(first.places)]
    combos = np.array(list(itertools.product(*(range(len(one)) for one in leaves))))  # [C, P]
    weights = np.prod([np.array(one)[combos[:, at]] for at, one in enumerate(leaves)], 0)
    many, states = len(combos), len(first.place)
    pick = torch.from_numpy(combos)[:, first.place]  # [C, U] run by state
    mixed = copy.copy(first)
    state = torch.arange(states)
    for name in ("token", "kept", "pre", "best", "numbers", "overlap", "target_prob", "chance", "some", "own"):
        stack = [getattr(run, name) for run in runs]
        if isinstance(stack[0], Tensor):
            setattr(mixed, name, torch.stack(stack)[pick, state].flatten(0, 1))
        else:
            whole = np.stack(stack)[pick.numpy(), state.numpy()]
            setattr(mixed, name, whole.reshape(-1, *whole.shape[2:]))
    shift = torch.arange(many)[:, None] * states
    mixed.after, mixed.begin = (first.after + shift).flatten(), (first.begin + shift).flatten()
    begin = (anchor - 1 + torch.arange(many)[:, None] * first.places).flatten()
    trees = gather(mixed, begin, unroller.tree)
    stub: Any = SimpleNamespace(
        unroll=lambda *_: trees, pair=unroller.pair, depth=unroller.depth, features=unroller.features, draws=1
    )
    written = Written((0, "t", "", list(case.prompt), 0), list(text), rows, len(text), anchor.repeat(many))
    return _arrays(case, text_columns(stub, written), many, len(anchor)), weights


def _arrays(case: Case, columns: Any, many: int, rows: int) -> TraceArrays:
    tree, names = case.topology, node_features(case.topology, case.mode)
    eos = (case.vocabulary - 1,) if case.eos else ()
    mode = MODES[case.mode]
    header = Header(
        "", "", {}, case.vocabulary, eos, 1.0, parents(tree), names, ANCHOR_FEATURES, case.new, 0, 1, many, "",
        verification=case.mode, label=mode.label, off_text=case.off_text,
    )  # fmt: skip
    tokens = torch.from_numpy(columns["tokens"]).int()
    full = torch.full((many,), rows, dtype=torch.int64)
    return TraceArrays(
        header=header,
        prompt_ids=[str(at) for at in range(many)],
        groups=[""] * many,
        keys=torch.zeros(many, dtype=torch.int64),
        offset=torch.arange(many) * rows,
        rows=full,
        first_anchor=torch.ones_like(full),
        prompt_tokens=torch.full_like(full, len(case.prompt)),
        text_tokens=torch.from_numpy(np.array(columns["text_tokens"])[::rows].copy()).long(),
        accepted=torch.from_numpy(columns["accepted_length"]).long(),
        tokens=tokens,
        ends=torch.isin(tokens, torch.tensor(eos, dtype=torch.int32)),
        cut=torch.from_numpy(columns["cut"]),
        columns={name: torch.from_numpy(np.asarray(columns[name])) for name in (*ANCHOR_FEATURES, *names)},
        path=None if tree.is_chain else torch.from_numpy(columns["accepted"]),
        extra={name: torch.from_numpy(columns[name]) for name in CHANCES if name in columns},
    )


def profile(tree: Topology) -> Profile:
    """Return a latency profile of no machine."""
    verify = (1e-3,) * (tree.deepest + 1)
    table = CostTable(8.0, (1e-3, 1e-3), 0.0, verify)
    return Profile(table, replace(table, context=40.0), 0.0, 0.0, (1e-3, 0.0), {}, 1.0, {})


def apart(one: JointLaw, other: JointLaw) -> float:
    """Return the total variation between two laws."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
