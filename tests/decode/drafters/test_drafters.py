"""Lookup, suffix and model drafters: what they propose, and the backlog of a round."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from hypothesis import given, settings as hypothesis_settings, strategies as st
from small_drafters import new_round, proposed
from specstop.decode.drafters import LookupDrafter, ModelDrafter, SuffixDrafter, find_drafters
from specstop.decode.drafters.suffix import SuffixAutomaton, SuffixIndex
from specstop.decode.hooks import Hook
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.attention import Part
from specstop.decode.models.pair import Pair
from specstop.decode.round_state import RoundState
from specstop.decode.settings import Settings
from specstop.decode.topology import chain, parse_tree
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.fixed import FixedLength
from specstop.policies.kernels.suffix import COUNT, EDGES, LENGTH, LINK, SHARED_LENGTH, STATES


def begun(drafter: Any, *texts: Sequence[int]) -> Any:
    """Return a drafter that has the texts, one per stream, but for their last tokens."""
    drafter.reserve(len(texts), 64)
    for stream, text in enumerate(texts):
        drafter.committed(stream, list(text[:-1]), None)
    return drafter


def weights(drafter: Any, *texts: Sequence[int]) -> list[dict[int, float]]:
    """Return what a drafter proposes after each text, by token."""
    begun(drafter, *texts)
    rows = proposed(drafter, new_round([text[-1] for text in texts], chain(3)), 0)
    return [{int(t): float(row[t].exp()) for t in torch.isfinite(row).nonzero()[:, 0]} for row in rows]


def occurrences(texts: Sequence[Sequence[int]], part: Sequence[int]) -> int:
    return sum(list(t[i : i + len(part)]) == list(part) for t in texts for i in range(len(t) - len(part) + 1))


# Lookup


def test_lookup_counts_what_followed_the_longest_suffix(pair):
    (after_5,) = weights(LookupDrafter(pair), [5, 8, 5, 9, 5, 9, 5, 7, 5])  # 5 was followed by 8, 9, 9, 7
    assert {t: round(w) for t, w in after_5.items()} == {8: 1, 9: 2, 7: 1}
    assert after_5[9] > after_5[7] > after_5[8], "the later of equals first"
    text = [4, 5, 6, 20, 9, 5, 6, 21, 9, 6, 22, 4, 5, 6]
    for longest, expected in ((3, [20]), (2, [20, 21]), (1, [20, 21, 22])):
        assert list(weights(LookupDrafter(pair, longest), text)[0]) == expected
    assert weights(LookupDrafter(pair), [4, 5, 6, 7], [4]) == [{}, {}]
    (first, *_) = (
        Speculator(pair, FixedLength(4), Settings(0.0, 3), drafters=[LookupDrafter(pair)]).generate([40]).rounds
    )
    assert (first.drafted, first.verified, first.accepted, first.committed) == (0, 0, 0, 1)


@pytest.mark.parametrize("kind", [LookupDrafter, SuffixDrafter])
def test_each_branch_and_each_stream_continues_from_its_own_tokens(pair, kind):
    drafter = begun(kind(pair), [5, 8, 30, 5, 9, 31, 5])
    round = new_round([5], parse_tree("2,2"), {1: 9, 2: 8})
    assert set(proposed(drafter, round, 0)[0].topk(2).indices.tolist()) == {8, 9}
    assert proposed(drafter, round, 1, 2).argmax(-1).tolist() == [31, 30]
    drafter.committed(0, [5, 9], None)
    assert not torch.isfinite(proposed(drafter, new_round([44], chain(1)), 0)).any()
    drafter.reserve(1, 64)
    assert not torch.isfinite(proposed(drafter, new_round([5], chain(1)), 0)).any(), "a new text"
    texts = [[5, 8, 5, 9, 5], [6, 7, 6], [4, 3]]
    assert weights(kind(pair), *texts) == [weights(kind(pair), text)[0] for text in texts]


# Suffix automaton


@given(texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=3))
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
def test_every_substring_is_counted(texts):
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add_text(text)
    states, _, _, sizes = automaton.arrays
    assert sizes[STATES] <= 2 * sum(map(len, texts)) + 1 and sizes[EDGES] <= 3 * sum(map(len, texts))
    for part in {tuple(t[i:j]) for t in texts for i in range(len(t)) for j in range(i + 1, len(t) + 1)}:
        state, length = automaton.match(part)
        assert length == len(part) and states[state, COUNT] == occurrences(texts, part), part
        assert states[states[state, LINK], LENGTH] < len(part) <= states[state, LENGTH]


def suffix_index(text: Sequence[int], shared: Sequence[int] = (), vocabulary: int = 64) -> SuffixIndex:
    automaton = SuffixAutomaton()
    automaton.add_text(shared)
    index = SuffixIndex(automaton, vocabulary)
    index.extend(text)
    return index


def mixed(text: Sequence[int], shared: Sequence[int], path: Sequence[int] = ()) -> tuple[int, int, dict[int, float]]:
    """Return length and count of the longest match, and the weights of what follows it, by a plain search."""
    context = [*text, *path]

    def longest_in(other: Sequence[int]) -> int:
        lengths = range(1, len(context) + 1)
        return max((n for n in lengths if occurrences([other], context[len(context) - n :])), default=0)

    own, other = longest_in(text if path else text[:-1]), longest_in(shared)
    searched, longest = (shared, other) if other > own else (text, own)
    weights, share, before = dict[int, float](), 1.0, list[list[int]]()
    for n in range(longest, -1, -1):
        suffix = context[len(context) - n :]
        ends = [i for i in range(n, len(searched) + 1) if list(searched[i - n : i]) == suffix]
        if ends in before or not (n or weights):
            continue  # a state of the automaton is the longest suffix with these ends
        before.append(ends)
        counts = Counter(searched[i] for i in ends if i < len(searched))
        total = sum(counts.values()) + len(counts)
        for token, times in counts.items():
            weights[token] = weights.get(token, 0.0) + share * times / total
        share *= len(counts) / total if counts else 1.0
    return longest, occurrences([searched], context[len(context) - longest :]) - (searched is text), weights


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=16),
    shared=st.lists(st.integers(0, 3), max_size=10),
    split=st.integers(0, 16),
    path=st.lists(st.integers(0, 3), max_size=3),
)
@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
def test_signals_and_followers_are_those_of_a_plain_search(text, shared, split, path):
    index, run, rate = suffix_index(text[:split], shared), 0, 0.0
    index.extend(text[split:])
    for at, token in enumerate(text):
        weights = mixed(text[:at], shared)[2] if at else {}
        agrees = bool(weights) and min(weights, key=lambda t: (-round(weights[t], 12), t)) == token
        run, rate = (run + 1) * agrees, 0.9 * rate + 0.1 * agrees
    length, count, weights = mixed(text, shared)
    best = max(weights.values(), default=0.0) / (sum(weights.values()) or 1.0)
    assert index.signals() == pytest.approx((length, best, count if length else 0, run, rate))
    assert index.followers(()) == pytest.approx(weights)
    assert index.followers(path) == pytest.approx(mixed(text, shared, path)[2]), "a path adds no occurrences"


def test_tokens_outside_of_the_vocabulary_are_not_proposed():
    assert suffix_index([1, 9, 1, 2, 1], vocabulary=4).followers(()).keys() == {1, 2}


@pytest.mark.parametrize("seed", range(3))
def test_texts_that_ended_are_searched_while_others_go_on(pair, seed):
    """The longest suffix of each open text that occurred in one that has ended, against a plain search."""
    chance, ended, texts = random.Random(seed), list[list[int]](), [list[int]() for _ in range(3)]
    drafter = SuffixDrafter(pair, keep=1)
    drafter.reserve(3, 64)
    for _ in range(60):
        stream = chance.randrange(3)
        if texts[stream] and chance.random() < 0.15:
            ended.append(texts[stream])
            texts[stream] = []
            drafter.begin(stream)
        new = [chance.randrange(3) for _ in range(chance.randint(1, 4))]
        drafter.committed(stream, new, None)
        texts[stream] += new
        for text, index in zip(texts, drafter._indexes, strict=True):
            matches = (n for n in range(1, len(text) + 1) if occurrences(ended, text[len(text) - n :]))
            assert index._facts[SHARED_LENGTH] == max(matches, default=0)


def test_earlier_texts_and_files_are_searched_on_request(pair, tmp_path):
    def best(drafter: Any, text: list[int]) -> int | None:
        drafter.committed(0, text[:-1], None)
        row = proposed(drafter, new_round(text[-1:], chain(1)), 0)[0]
        return int(row.argmax()) if torch.isfinite(row).any() else None

    for keep, expected in ((0, None), (1, 9)):
        drafter = begun(SuffixDrafter(pair, keep=keep), [7, 8, 9, 10, 0])
        drafter.reserve(1, 64)
        assert best(drafter, [20, 7, 8]) == expected
    drafter.reset()
    assert drafter.carries and best(drafter, [20, 7, 8]) is None
    (tmp_path / "code.txt").write_text("w7 w8 w11\nw7 w8 w11")
    (drafter,) = find_drafters(f"suffix:{tmp_path}/code.txt", pair)
    assert best(drafter, [20, 7, 8]) == 11
    drafter.reserve(1, 64)
    assert best(drafter, [20, 7, 8, 12, 20, 7, 8]) == 12, "the match within the text is longer"
    drafter.reset()
    assert best(drafter, [20, 7, 8]) == 11, "the file stays"


# Backlog


class Spy(ModelDrafter):
    """Counts the tokens that it reads of each stream before its first proposal."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.read: dict[int, int] = {}

    def _part(self, round: RoundState, depth: int, stream: int, rows: Sequence[int]) -> Part:
        before = self._model.lengths[stream]
        part = super()._part(round, depth, stream, rows)
        if depth == 0:
            self.read[stream] = self._model.lengths[stream] - before + len(part.tokens)
        return part


class Lengths(StopPolicy):
    """Drafts varying lengths with varying drafters, also none."""

    name, max_depth, first, routes, joins = "lengths", 3, 0, True, True

    def start(self, streams: int, keys: Array) -> State:
        return keys % 1000

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        kept = step.alive & (step.depth < state * 7919 // 11 % 4)[:, None]
        return kept & (state[:, None] >> (np.arange(kept.shape[1]) + 1) & 1 == 1) if step.depth == 0 else kept, state

    def observe(self, outcome: Any, state: State) -> State:
        return state + outcome.active * 13


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", [None, "2,2,1"])
@pytest.mark.parametrize("three", [False, True])
def test_the_backlog_is_what_a_round_reads(pair, prompt_ids, tree, batch, three):
    spy, backlogs, reads = Spy(pair), list[int](), list[int]()

    class Compare(Hook):
        def on_round_end(self, round: RoundState) -> None:
            for stream, record in round.records.items():
                read = spy.read.pop(stream, 0)
                if record.drafted:
                    backlogs.append(record.backlog)
                    reads.append(read)

    drafters = [SuffixDrafter(pair), *([LookupDrafter(pair)] if three else []), spy]
    settings = Settings(0.7, NEW, 3, tree=tree)
    run = Speculator(pair, Lengths(), settings, drafters=drafters, hooks=[Compare()], batch=batch)
    run.run([Request([*ids, *ids], key * 31) for key, ids in enumerate(prompt_ids)])
    assert backlogs == reads
    assert backlogs.count(0) > 3 and max(backlogs) > 10 and len(set(backlogs)) > 4
