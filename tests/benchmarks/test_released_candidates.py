"""CTC's candidates as released: every path of symbols collapsed, counted as far as the target goes along."""

from __future__ import annotations

import itertools

import torch
from benchmark_scripts import part
from specstop.decode.topology import parse_tree


def test_the_longest_collapsed_path_that_the_target_agrees_with_is_accepted() -> None:
    """Three tokens and a blank at three positions, the whole tree of ranks: any text that some alignment says is accepted."""
    released = part("released", "drafting")
    symbols = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(-1)
    said = {tuple(s for s, _ in itertools.groupby(path) if s != 3) for path in itertools.product(range(4), repeat=3)}
    for follows in itertools.product(range(3), repeat=3):
        longest = max(n for n in range(4) for text in said if text[:n] == follows[:n] and len(text) >= n)
        assert released._released(symbols, follows, parse_tree("4,4,4")) == longest
        assert released._by_prefix(symbols, follows, parse_tree("3,3,3")) == longest
    best = symbols.argmax(-1).tolist()
    one = [s for s, _ in itertools.groupby(best) if s != 3]
    other = [(s + 1) % 3 for s in one] or [0]
    assert released._released(symbols, one, parse_tree("1,1,1")) == len(one)
    assert released._released(symbols, other, parse_tree("1,1,1")) == 0


def test_paths_are_ranks_among_siblings() -> None:
    released = part("released", "drafting")
    assert list(released.ranks(parse_tree("2,1"))) == [[0], [1], [0, 0], [1, 0]]
    assert len(list(released.ranks(parse_tree("medusa-63")))) == 63
