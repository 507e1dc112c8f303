"""Suffix drafting: what is known of substrings, against a search of the text itself, and what is proposed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import NEW
from small_drafters import new_round, proposed
from specstop.decode.benchmark import run_alternating
from specstop.decode.drafters import SuffixDrafter, find_drafter
from specstop.decode.drafters.suffix import START, SuffixAutomaton
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair, load_pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.topology import chain, parse_tree
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength


def occurrences(texts: Sequence[Sequence[int]], part: tuple[int, ...]) -> int:
    return sum(tuple(t[i : i + len(part)]) == part for t in texts for i in range(len(t) - len(part) + 1))


@pytest.mark.parametrize("seed", range(6))
def test_every_substring_is_known_with_how_often_it_came(seed: int) -> None:
    chance = random.Random(seed)
    texts = [[chance.randrange(2 + seed % 3) for _ in range(chance.randint(1, 14))] for _ in range(1 + seed % 3)]
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add_text(text)
    assert len(automaton.next) <= 2 * sum(map(len, texts)) + 1
    parts = {tuple(t[i:j]) for t in texts for i in range(len(t)) for j in range(i + 1, len(t) + 1)}
    for part in parts:
        state = START
        for token in part:
            state = automaton.next[state][token]
        assert automaton.count[state] == occurrences(texts, part), part
        assert automaton.length[automaton.link[state]] < len(part) <= automaton.length[state]
    text = texts[-1]
    longest = max((n for n in range(len(text)) if occurrences(texts, tuple(text[len(text) - n :])) > 1), default=0)
    assert automaton.earlier()[1] == longest


def test_a_step_falls_back_to_the_longest_suffix_that_is_known() -> None:
    automaton = SuffixAutomaton()
    for token in (1, 2, 3, 9, 2, 3, 4):
        automaton.append(token)
    state, length = START, 0
    lengths = []
    for token in (1, 2, 3, 4, 8, 9):
        state, length = automaton.step(state, length, token)
        lengths.append(length)
    assert lengths == [1, 2, 3, 3, 0, 1]  # after 1 2 3 came no 4, after 2 3 there did; 8 is unknown


def test_frequencies_are_mixed_by_the_escape_estimate() -> None:
    """After 5 came 8, 9, 9; after 4 5 came 9 alone: worked out by hand, PPM-C."""
    automaton = SuffixAutomaton()
    for token in (5, 8, 4, 5, 9, 5, 9, 4, 5):
        automaton.append(token)
    state, length = automaton.earlier()
    assert length == 2
    single = Counter([5, 8, 4, 5, 9, 5, 9, 4, 5])
    share = 0.5 * (2 / 5)
    expected = {token: share * times / (9 + 4) for token, times in single.items()}
    expected[9] += 1 / 2 + 0.5 * 2 / 5
    expected[8] += 0.5 * 1 / 5
    weights = automaton.followers(state)
    assert weights == pytest.approx(expected)
    assert next(iter(weights)) == 9, "the likeliest first"


def test_each_branch_goes_on_from_its_own_tokens(pair: Pair) -> None:
    drafter = SuffixDrafter(pair)
    drafter.reserve(1, 64)
    drafter.committed(0, [5, 8, 30, 5, 9, 31], None)
    round = new_round([5], parse_tree("2,2"), {1: 9, 2: 8})
    first = proposed(drafter, round, 0)[0]
    assert set(first.topk(2).indices.tolist()) == {8, 9}
    assert proposed(drafter, round, 1, 2).argmax(-1).tolist() == [31, 30]
    drafter.committed(0, [5, 9], None)
    assert not torch.isfinite(proposed(drafter, new_round([44], chain(1)), 0)).any(), "44 was never seen"
    drafter.reserve(1, 64)
    assert not torch.isfinite(proposed(drafter, new_round([5], chain(1)), 0)).any(), "a new text"


def test_earlier_texts_are_searched_if_asked(pair: Pair, tmp_path: Path) -> None:
    def best(drafter: SuffixDrafter, text: list[int]) -> int | None:
        drafter.committed(0, text[:-1], None)
        row = proposed(drafter, new_round(text[-1:], chain(1)), 0)[0]
        return int(row.argmax()) if torch.isfinite(row).any() else None

    for keep, expected in ((0, None), (1, 9)):
        drafter = SuffixDrafter(pair, keep=keep)
        drafter.reserve(1, 64)
        drafter.committed(0, [7, 8, 9, 10], None)
        drafter.reserve(1, 64)
        assert best(drafter, [20, 7, 8]) == expected
    assert drafter.carries, "and forgotten by the next run if told so"
    drafter.reset()
    assert best(drafter, [20, 7, 8]) is None
    (tmp_path / "code.txt").write_text("w7 w8 w11\nw7 w8 w11")
    drafter = find_drafter(f"suffix:{tmp_path}/code.txt", pair)
    assert best(drafter, [20, 7, 8]) == 11
    drafter.reserve(1, 64)
    assert best(drafter, [20, 7, 8, 12, 20, 7, 8]) == 12, "the text's own match is longer"
    drafter.reset()
    assert best(drafter, [20, 7, 8]) == 11, "the file stays"
    with pytest.raises(InputError, match=r"expected a text file, but .*none.txt cannot be read: No such file"):
        find_drafter(f"suffix:{tmp_path}/none.txt", pair)
    with pytest.raises(InputError, match=r"but ~nobody-here/x.txt cannot be read: No such file"):
        find_drafter("suffix:~nobody-here/x.txt", pair)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_learned_of_one_text_leaves_the_ends_of_the_others_right(pair: Pair, seed: int) -> None:
    """Against a search of all texts that have ended: the longest suffix of each open text that came in one of them."""
    chance, ended = random.Random(seed), list[list[int]]()
    drafter = SuffixDrafter(pair, keep=1)
    drafter.reserve(3, 64)
    texts: list[list[int]] = [[], [], []]
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
            _, length = index.shared_match
            longest = max(n for n in range(len(text) + 1) if n == 0 or occurrences(ended, tuple(text[len(text) - n :])))
            assert length == longest


@pytest.mark.parametrize("tree", [None, "3,2,1"])
def test_text_is_the_targets(pair: Pair, pair_folder: Path, prompt_ids: list[list[int]], tree: str | None) -> None:
    alone = load_pair(pair_folder / "target", dtype="float64")
    prompts = [[*p, *p, *p] for p in prompt_ids[1::3]]
    keys = [stream_key(0, f"p{i}") for i in range(len(prompts))]
    for temperature in (0.0, 0.7):
        expected = plain_texts(pair, prompts, keys, NEW, temperature).tokens
        for policy in (FixedLength(4), Confidence(0.3)):
            drafter = SuffixDrafter(alone, keep=1)
            speculator = Speculator(
                alone, policy, Settings(temperature, NEW, tree=tree, verification="match"), drafter=drafter
            )
            made = [speculator.generate(p, key) for p, key in zip(prompts, keys, strict=True)]
            assert [list(g.tokens) for g in made] == expected
            assert sum(r.drafted for g in made for r in g.rounds) > 0
            assert all(r.backlog == 0 for g in made for r in g.rounds)


def test_a_batch_of_texts_is_proposed_for_as_if_alone(pair: Pair) -> None:
    texts = [[5, 8, 5, 9, 5], [6, 7, 6], [4, 3]]
    drafter = SuffixDrafter(pair)
    drafter.reserve(3, 64)
    for stream, text in enumerate(texts):
        drafter.committed(stream, text[:-1], None)
    together = proposed(drafter, new_round([text[-1] for text in texts], chain(2)), 0)
    for row, text in zip(together, texts, strict=True):
        alone = SuffixDrafter(pair)
        alone.reserve(1, 64)
        alone.committed(0, text[:-1], None)
        assert torch.equal(proposed(alone, new_round(text[-1:], chain(2)), 0)[0], row)


def test_a_warm_up_is_forgotten(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """What is timed after it drafts as a loop does that was made then."""

    def loop() -> Speculator:
        return Speculator(pair, FixedLength(4), Settings(0.0, NEW), drafter=SuffixDrafter(pair, keep=1))

    prompts = [(f"p{i}", [*p, *p]) for i, p in enumerate(prompt_ids[1:3])]
    (timed,) = run_alternating([loop()], prompts)
    fresh = loop()
    expected = [fresh.generate(tokens, stream_key(0, name)) for name, tokens in prompts]
    drafted = [[[r.drafted for r in g.rounds] for g in made] for made in (timed, expected)]
    assert drafted[0] == drafted[1]
