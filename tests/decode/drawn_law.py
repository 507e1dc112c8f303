"""Enumeration of everything that the collector draws given a text, and replay of the resulting traces."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from cases import Case
from deciders import DECIDERS
from enumeration import Enumerator, JointLaw, target_texts
from oracle import Law, oracle_pair
from specstop.collect.completions import target_rows
from specstop.collect.dense import DenseCollector, node_features
from specstop.collect.proposals import Proposals, TargetText
from specstop.collect.schema import Header, PromptTask, parents
from specstop.decode.settings import Settings
from specstop.decode.topology import Topology, parse_tree
from specstop.decode.verify.modes import MODES
from specstop.policies.costs import CostTable
from specstop.policies.features import ANCHOR_FEATURES
from specstop.policies.profile import Profile
from specstop.train.replay.arrays import TraceArrays
from specstop.train.replay.run import replay
from torch import Tensor

CHANCES = ("accept_chance", "next_chance")


class Numbers(Enumerator):
    """The random numbers of the draws at one place, each in every interval within which no answer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[float] = []
        self.exhausted = False
        self.begin()

    def end(self) -> None:
        """Record the probability of the run, and go on to the next one, or to the first again once there is none."""
        if not self.exhausted:
            self.leaves.append(self.probability)
            self.exhausted = not self.advance()

    def uniform(self, marks: Sequence[float]) -> float:
        """Return a number of the next interval between marks."""
        edges = sorted({0.0, 1.0, *(min(max(mark, 0.0), 1.0) for mark in marks)})
        return float(self.choose(self._at, [((low + high) / 2, low, high) for low, high in itertools.pairwise(edges)]))


class EnumeratedDraws:
    """Enumerates `given_text.KeyedDraws`: rows at one position and row of the tree share their numbers, as keyed ones do."""

    def __init__(
        self, numbers: dict[int, Numbers], wanted: Callable[[int, int], bool], position: Tensor, node: Tensor
    ) -> None:
        self._numbers, self._keys = numbers, list(zip(position.tolist(), node.tolist(), strict=True))
        self._wanted = wanted
        self._taken = torch.zeros(len(self._keys), dtype=torch.bool)

    def _answer(self, marks: Callable[[int], list[float]], active: Sequence[bool]) -> list[float]:
        """Return a number for each row, given the marks of those that ask."""
        by_key: dict[tuple[int, int], float] = {}
        for key in dict.fromkeys(self._keys):
            rows = [row for row, key_of_row in enumerate(self._keys) if key_of_row == key and active[row]]
            if rows and self._wanted(*key):
                numbers = self._numbers.setdefault(key[0], Numbers())
                by_key[key] = numbers.uniform([mark for row in rows for mark in marks(row)])
        return [by_key.get(key, 0.5) for key in self._keys]

    def accepts(self, chance: Tensor, rank: int) -> Tensor:
        uniform = self._answer(lambda row: [float(chance[row])], (chance > 0.0).tolist())
        self._taken = torch.tensor(uniform, dtype=torch.float64) < chance
        return self._taken

    def tokens(self, weights: Tensor, rank: int) -> Tensor:
        mass = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
        uniform = self._answer(lambda row: mass[row].tolist()[:-1], (~self._taken).tolist())
        return torch.searchsorted(mass, torch.tensor(uniform, dtype=torch.float64)[:, None], right=True)[:, 0]


def replay_law(case: Case) -> JointLaw:
    """Return the joint law of text and rounds of replay."""
    out: JointLaw = {}
    tree = parse_tree(case.tree)
    policy = DECIDERS[case.decider]().limited(tree.deepest)
    for text, probability in target_texts(case).items():
        if len(text) < 2:
            out[text, ()] = probability
            continue
        arrays, weights = drawn_traces(case, text)
        rounds: list[tuple[tuple[int, ...], ...]] = [()] * len(weights)
        for sequence, *counts in replay(arrays, policy, profile(tree)).log.tolist():
            rounds[sequence] += (tuple(counts),)
        for played, weight in zip(rounds, weights.tolist(), strict=True):
            out[text, played] = out.get((text, played), 0.0) + probability * weight
    return out


def drawn_traces(case: Case, text: tuple[int, ...]) -> tuple[TraceArrays, Any]:
    """Return every trace that the collector may draw given a text, each as a sequence, with their probabilities [S]."""
    pair, tree, start = (
        oracle_pair(Law(case.vocabulary, case.seed, case.kind), case.ends),
        parse_tree(case.tree),
        len(case.prompt),
    )
    numbers: dict[int, Numbers] = {}

    def wanted(position: int, node: int) -> bool:
        """Whether a round may come to what is drawn there: the limit leaves one token to the target."""
        return position - start + depths[node] <= case.new - 2 and position - start < len(text)

    collector = DenseCollector(
        pair, Settings(1.0, case.new, tree.deepest, tree=tree.name, verification=case.mode),
        choices=lambda key, draw, position, node: EnumeratedDraws(numbers, wanted, position, node),
    )  # fmt: skip
    depths = collector.shape.topology.depth
    rows = target_rows(pair, list(case.prompt), list(text))[0]
    anchor = torch.arange(1, len(text))
    prompt = PromptTask(0, "t", "", list(case.prompt))
    known = TargetText(prompt, list(text), rows, None, None, len(text), anchor)
    runs: list[Proposals] = []
    with torch.inference_mode():
        while not runs or not all(one.exhausted for one in numbers.values()):
            for one in numbers.values():
                one.begin()
            runs.append(collector.propose(known))
            for one in numbers.values():
                one.end()
        return _combined(case, collector, known, runs, numbers)


def _combined(
    case: Case, collector: DenseCollector, text: TargetText, runs: list[Proposals], numbers: dict[int, Numbers]
) -> tuple[TraceArrays, Any]:
    """Return the traces of all combinations of leaves of the places, put together by the collector's `trees`."""
    start, first, anchor = len(case.prompt), runs[0], text.anchor
    leaves = [numbers[start + 1 + at].leaves if start + 1 + at in numbers else [1.0] for at in range(first.places)]
    combos = np.array(list(itertools.product(*(range(len(one)) for one in leaves))))  # [C, P]
    weights = np.prod([np.array(one)[combos[:, at]] for at, one in enumerate(leaves)], 0)
    many, states = len(combos), len(first.place)
    pick = torch.from_numpy(combos)[:, first.place]  # [C, U] run by state
    mixed = copy.copy(first)
    state = torch.arange(states)
    names = "token accepted top stats best numbers overlap target_prob accept_chance next_chance next_token hidden"
    for name in names.split():
        stack = [getattr(run, name) for run in runs]
        if isinstance(stack[0], Tensor):
            setattr(mixed, name, torch.stack(stack)[pick, state].flatten(0, 1))
        else:
            whole = np.stack(stack)[pick.numpy(), state.numpy()]
            setattr(mixed, name, whole.reshape(-1, *whole.shape[2:]))
    shift = torch.arange(many)[:, None] * states
    mixed.after, mixed.begin = (first.after + shift).flatten(), (first.begin + shift).flatten()
    begin = (anchor - 1 + torch.arange(many)[:, None] * first.places).flatten()
    repeated = replace(text, anchor=anchor.repeat(many))
    return _arrays(case, collector.columns(repeated, 0, mixed.trees(begin)), many, len(anchor)), weights


def _arrays(case: Case, columns: Any, many: int, rows: int) -> TraceArrays:
    tree = parse_tree(case.tree)
    names = node_features(tree, case.mode)
    header = Header(
        "", "", {}, case.vocabulary, case.ends, 1.0, parents(tree), names, ANCHOR_FEATURES, case.new, 0, 1, many, "",
        verification=case.mode, label=MODES[case.mode].label,
    )  # fmt: skip
    tokens = torch.from_numpy(columns["tokens"]).int()
    full = torch.full((many,), rows, dtype=torch.int64)
    return TraceArrays(
        header=header, prompt_ids=[str(at) for at in range(many)], samples=[""] * many, text_hashes=[""] * many,
        groups=[""] * many, keys=torch.zeros(many, dtype=torch.int64), offset=torch.arange(many) * rows, rows=full,
        first_anchor=torch.ones_like(full), prompt_tokens=torch.full_like(full, len(case.prompt)),
        text_tokens=torch.from_numpy(np.array(columns["text_tokens"])[::rows].copy()).long(),
        accepted=torch.from_numpy(columns["accepted_length"]).long(), tokens=tokens,
        ends=torch.isin(tokens, torch.tensor(case.ends, dtype=torch.int32)), cut=torch.from_numpy(columns["cut"]),
        columns={name: torch.from_numpy(np.asarray(columns[name])) for name in (*ANCHOR_FEATURES, *names)},
        path=None if tree.is_chain else torch.from_numpy(columns["accepted"]),
        extra={name: torch.from_numpy(columns[name]) for name in CHANCES if name in columns},
    )  # fmt: skip


def profile(tree: Topology) -> Profile:
    """Return a latency profile of no machine."""
    verify = (1e-3,) * (tree.deepest + 1)
    table = CostTable(8.0, (1e-3, 1e-3), 0.0, verify)
    return Profile(table, replace(table, context=40.0), 0.0, 0.0, (1e-3, 0.0), {}, 1.0, {})
