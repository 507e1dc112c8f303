"""The CTC-drafter's released candidates: a tree of symbols, collapsed, in a topology that has room for all of it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from small_drafters import small_network
from specstop.decode.drafters import TrainedDrafter, find_drafter, save_drafter, with_drafter
from specstop.decode.drafters.ctc import SYMBOLS, Trie, collapsed, size
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.settings import Settings
from specstop.decode.topology import parse_tree
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength

BLANK = -1
ROOM = parse_tree("ctc-released")


def sequences(trie: Trie) -> set[tuple[int, ...]]:
    """Every path of a trie."""
    return {(token, *below) for token, rest in trie.items() for below in {(), *sequences(rest)}}


def by_the_book(symbols: list[list[int]]) -> set[tuple[int, ...]]:
    """What is said by each path of Medusa's tree: a symbol that equals the one before it and blanks are left out."""
    paths: list[tuple[int, ...]] = [()]
    for row, parent in enumerate(SYMBOLS.parent[1:], 1):
        rank = SYMBOLS.children[parent].index(row)
        paths.append((*paths[parent], symbols[len(paths[parent])][rank]))
    said = {tuple(s for at, s in enumerate(path) if s != BLANK and (at == 0 or s != path[at - 1])) for path in paths}
    return said - {()}


def left_out(trie: Trie, row: int = 0) -> int:
    """Nodes that find no place in the topology, large sub-tries first."""
    rows = ROOM.children[row]
    in_order = sorted(trie.values(), key=size, reverse=True)
    placed = sum(left_out(below, at) for below, at in zip(in_order, rows, strict=False))
    return placed + sum(1 + size(below) for below in in_order[len(rows) :])


def drawn(rng: random.Random) -> list[list[int]]:
    """Ten different symbols at each of four positions, often the same ones and a blank among them."""
    symbols = [rng.sample(range(rng.choice((11, 14, 20, 80))), 10) for _ in range(4)]
    for some in symbols:
        if rng.random() < 0.85:
            some[rng.choice((0, 0, 0, 1, 2, 3, 5, 9))] = BLANK
    return symbols


def test_blanks_and_repeated_symbols_fall_away() -> None:
    a, b, c, d = 1, 2, 3, 4
    symbols = [[a, BLANK], [a, b], [BLANK, c], [d]]
    # a a _ d; a b _; _ a _; _ b c and so on, as far as Medusa's tree has them.
    assert sequences(collapsed(symbols, BLANK)) == {(a,), (a, d), (a, c), (a, b), (a, b, c), (b,)}
    assert sequences(collapsed([[a], [a]], BLANK)) == {(a,)}
    assert collapsed([[BLANK], [BLANK]], BLANK) == {}


def test_the_topology_has_room_whatever_the_symbols_are() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        symbols = drawn(rng)
        trie = collapsed(symbols, BLANK)
        assert sequences(trie) == by_the_book(symbols)
        assert left_out(trie) == 0
    for blanks in itertools.product((None, 0, 1, 2, 6, 9), repeat=4):
        symbols = [[BLANK if rank == at else 10 * p + rank for rank in range(10)] for p, at in enumerate(blanks)]
        assert left_out(collapsed(symbols, BLANK)) == 0


@pytest.fixture(scope="module")
def spec(plain_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    output = plain_pair.target.get_output_embeddings().weight.float()
    network = small_network("ctc", output.shape[1], plain_pair.vocabulary, output, 4, 0.05)
    folder = tmp_path_factory.mktemp("released") / "ctc"
    save_drafter(TrainedDrafter("ctc", network, plain_pair.fingerprint["target"]), folder)
    return f"ctc-released:{folder}"


@torch.inference_mode()
def test_a_round_drafts_what_the_positions_say_and_no_more(
    plain_pair: Pair, prompt_ids: list[list[int]], spec: str
) -> None:
    pair = with_drafter(plain_pair, spec)
    speculator = Speculator(pair, FixedLength(4), Settings(0.0, 24, tree="ctc-released"))
    plain = Speculator(plain_pair, FixedLength(0), Settings(0.0, 24))
    drafted = set()
    for prompt in prompt_ids[:4]:
        made = speculator.generate(prompt, 3)
        assert made.tokens == plain.generate(prompt, 3).tokens
        drafted |= {r.drafted for r in made.rounds}
    assert len(drafted) > 1 and max(drafted) < SYMBOLS.nodes, "collapsed, a round has fewer nodes than Medusa's tree"


def test_it_is_another_drafter_of_the_same_folder(plain_pair: Pair, spec: str) -> None:
    folder = Path(spec.partition(":")[2])
    with_ours = with_drafter(plain_pair, f"ctc:{folder}")
    assert with_drafter(plain_pair, spec).fingerprint["draft"] != with_ours.fingerprint["draft"]
    with pytest.raises(InputError, match="a drafter of the kind ctc; write ctc:"):
        find_drafter(f"medusa:{folder}", plain_pair)
