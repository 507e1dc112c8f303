"""Drafters on the target's hidden states: what they propose, and that the text stays the target's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from conftest import NEW, VOCABULARY
from contract_policies import TEST_POLICIES
from small_drafters import DRAFTERS, new_round, proposed, small_drafter
from specstop.decode.drafters.ctc import Prefixes, collapsed_length, first_positions
from specstop.decode.drafters.networks import LayerNetwork
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.models.view import hidden_width
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.topology import chain, parse_tree
from specstop.decode.verify.noise import stream_key
from specstop.policies.fixed import Confidence, FixedLength

SAME = {"atol": 1e-9, "rtol": 0.0}  # float64, in another order of operations


@pytest.fixture(scope="module")
def plain(pair: Pair, prompt_ids: list[list[int]]) -> dict[float, list[list[int]]]:
    """The target's own texts of some prompts, by temperature."""
    prompts = prompt_ids[1::4]
    keys = [stream_key(0, f"p{i}") for i in range(len(prompts))]
    return {t: plain_texts(pair, prompts, keys, NEW, t).tokens for t in (0.0, 0.7)}


def states_of(pair: Pair, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return pair.target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize(
    ("kind", "tree"),
    [  # each on a chain and on one of two trees, in turn
        *((kind, None) for kind in DRAFTERS),
        *((kind, ("3,2,1", "parents:-1,-1,0,0,1,2,5")[at % 2]) for at, kind in enumerate(DRAFTERS)),
    ],
)
def test_text_is_the_targets(
    pair: Pair, prompt_ids: list[list[int]], plain: dict[float, list[list[int]]], kind: str, tree: str | None
) -> None:
    """Each policy at one temperature, at the other one for the next kind: `benchmarks/drafters.py` decodes at both."""
    prompts, tried, at = prompt_ids[1::4], 0, DRAFTERS.index(kind)
    for number, policy in enumerate((FixedLength(5), Confidence(0.2), TEST_POLICIES["selecting"])):
        temperature = (0.0, 0.7)[(at + number) % 2]
        settings = Settings(temperature, NEW, tree=tree, max_depth=5, verification="match")
        speculator = Speculator(pair, policy, settings, drafter=small_drafter(kind, pair))
        made = [speculator.generate(prompt, stream_key(0, f"p{i}")) for i, prompt in enumerate(prompts)]
        assert [list(g.tokens) for g in made] == plain[temperature]
        rounds = [r for g in made for r in g.rounds]
        tried += sum(r.accepted for r in rounds)
        assert max(r.drafted for r in rounds) > 1
    assert tried > 0


@pytest.mark.parametrize("kind", DRAFTERS)
def test_other_modes_take_them_too(pair: Pair, prompt_ids: list[list[int]], kind: str) -> None:
    for mode, tree in (("rejection", "2,2"), ("block", None), ("typical", "2,1")):
        settings = Settings(0.7, NEW, tree=tree, max_depth=3, verification=mode)
        made = Speculator(pair, FixedLength(3), settings, drafter=small_drafter(kind, pair)).generate(prompt_ids[4], 9)
        assert sum(r.drafted for r in made.rounds) > 0
        again = Speculator(pair, FixedLength(3), settings, drafter=small_drafter(kind, pair)).generate(prompt_ids[4], 9)
        assert again.tokens == made.tokens


@pytest.mark.parametrize("kind", DRAFTERS)
@torch.inference_mode()
def test_streams_of_a_batch_are_proposed_for_as_if_alone(pair: Pair, plain_pair: Pair, kind: str) -> None:
    """Two rounds of three texts of different lengths, trees of which some streams are fed more places than others."""
    texts = [[5, 8, 5, 9], [6, 7, 30, 31, 32, 11, 9], [4, 3]]
    tree = parse_tree("2,2,1")

    def rounds(streams: list[int]) -> list[list[torch.Tensor]]:
        drafter = small_drafter(kind, pair)
        drafter.reserve(len(streams), 40)
        out = [[] for _ in streams]
        for at, number in enumerate(streams):
            drafter.committed(at, texts[number], states_of(plain_pair, texts[number]))
        for end in (20, 21):
            round = new_round([end] * len(streams), tree)
            for row in range(1, len(tree)):
                round.tokens[:, row] = [9 + number + tree.depth[row] + 2 * row for number in streams]
            fed = [(at, [0]) for at in range(len(streams))]
            for depth in range(3):
                scores = drafter.propose(round, depth, fed).dense(VOCABULARY).split([len(rows) for _, rows in fed])
                for own, part in zip(out, scores, strict=True):
                    own.append(part)
                fed = [
                    (at, [child for row in rows for child in tree.children[row]][: 1 + streams[at] % 2])
                    for at, rows in fed
                ]
            for at, number in enumerate(streams):
                path = [end, int(round.tokens[at, 1])]
                texts_now = [*texts[number], *([20, path[1]] if end == 21 else []), *path]
                drafter.committed(at, path, states_of(plain_pair, texts_now)[-2:])
        return out

    together = rounds([0, 1, 2])
    for number in range(3):
        for one, other in zip(together[number], rounds([number])[0], strict=True):
            torch.testing.assert_close(one, other, **SAME)


@torch.inference_mode()
def test_medusa_scores_by_the_state_and_hydra_by_the_path_too(pair: Pair, plain_pair: Pair) -> None:
    text, tree = [5, 8, 9, 7], parse_tree("2,1")
    hidden = states_of(plain_pair, text)[-1:]
    for kind in ("medusa", "hydra"):
        drafter = small_drafter(kind, pair)
        drafter.committed(0, text, states_of(plain_pair, text))
        round = new_round([3], tree, {1: 30, 2: 31})
        proposed(drafter, round, 0)
        rows = proposed(drafter, round, 1, 2)
        network, embed = drafter._network, pair.target.get_input_embeddings()
        for row, token in zip(rows, (30, 31), strict=True):
            path = embed(torch.tensor([[3, token]])) if kind == "hydra" else None
            torch.testing.assert_close(row, network.outputs[1](network.state(1, hidden, path))[0], **SAME)
        assert torch.equal(rows[0], rows[1]) == (kind == "medusa")
        deep = new_round([3], chain(4), dict.fromkeys(range(1, 5), 5))
        assert not torch.isfinite(proposed(drafter, deep, 4)).any(), "there are three heads"


def by_the_book(network: LayerNetwork, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The layer over a whole text, without a cache, by matrices written out: its last state."""
    count, heads = len(embedded), network.shape.attention_heads
    cos, sin = network.rotations(count, embedded.device, embedded.dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = torch.einsum("sqhd,skhd->shqk", q, k) / (q.shape[-1] ** 0.5)
        weights = weights.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf)
        assert weights.shape[1] == heads
        return torch.einsum("shqk,skhd->sqhd", weights.softmax(-1), v)

    return network(embedded[None], states[None], (cos, sin), attend)[0, -1]


@torch.inference_mode()
def test_the_layer_goes_on_from_the_targets_states_and_then_from_its_own(pair: Pair, plain_pair: Pair) -> None:
    text, tree = [5, 8, 9, 7, 11], parse_tree("2,2,1")
    drafter = small_drafter("layer", pair)
    network, embed, head = drafter._network, pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    drafter.reserve(1, 40)
    for old, new in (([], text), (text, [3, 30])):  # a first round, and one after two accepted tokens
        text = [*old, *new]
        known = states_of(plain_pair, text)
        drafter.committed(0, new, known[len(old) :])
        round = new_round([3], tree, {1: 30, 2: 31, 5: 12, 6: 13})
        assert drafter.backlog().tolist() == [len(new) + (0 if not old else 1)]
        proposed(drafter, round, 0)
        proposed(drafter, round, 1, 2)
        rows = proposed(drafter, round, 5, 6)
        for row, token in zip(rows, (12, 13), strict=True):
            read, states = [*text[1:], 3], known
            for following in (31, token):
                states = torch.cat([states, by_the_book(network, embed(torch.tensor(read)), states)[None]])
                read.append(following)
            expected = head(by_the_book(network, embed(torch.tensor(read)), states))
            torch.testing.assert_close(row, expected, **SAME)


def collapsed(alignment: Sequence[int], blank: int) -> tuple[int, ...]:
    return tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != blank)


def test_chances_of_prefixes_are_sums_over_all_alignments() -> None:
    """Three tokens and a blank at four positions: 256 alignments, each prefix of up to four tokens, repeats included."""
    positions = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(-1)
    chance: dict[tuple[int, ...], float] = {}
    for alignment in itertools.product(range(4), repeat=4):
        share = float(torch.stack([positions[0, t, symbol] for t, symbol in enumerate(alignment)]).prod())
        said = collapsed(alignment, 3)
        for end in range(len(said) + 1):
            chance[said[:end]] = chance.get(said[:end], 0.0) + share
    assert chance[()] == pytest.approx(1.0)
    assert (0, 0) in chance and (0, 0, 0) not in chance, "equal tokens take a blank between"
    seen = 0
    for length in range(4):
        for prefix in itertools.product(range(3), repeat=length):
            now = Prefixes.empty(positions)
            for token in prefix:
                now = now.extended(torch.tensor([token]), positions)
            expected = [chance.get((*prefix, token), 0.0) for token in range(3)]
            assert now.next(positions)[0].tolist() == pytest.approx(expected, abs=1e-15)
            seen += sum(value > 0 for value in expected)
    assert seen + 1 == len(chance)


def test_positions_that_were_not_drawn_change_no_chance() -> None:
    every = torch.rand(3, 5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).softmax(-1)
    drawn = torch.tensor([5, 2, 1])
    together, token = first_positions(every, drawn), torch.tensor([2])
    for row, count in enumerate(drawn.tolist()):
        few, more = every[row : row + 1, :count], together[row : row + 1]
        for one, other in (
            (Prefixes.empty(few).next(few), Prefixes.empty(more).next(more)),
            (Prefixes.empty(few).extended(token, few).next(few), Prefixes.empty(more).extended(token, more).next(more)),
        ):
            torch.testing.assert_close(one, other)
    assert [collapsed_length(symbols, 9) for symbols in ([], [9], [1, 1], [1, 9, 1], [9, 1, 2, 2])] == [0, 0, 1, 2, 2]


@torch.inference_mode()
def test_ctc_draws_positions_as_deep_as_it_is_asked(pair: Pair, plain_pair: Pair) -> None:
    text = [5, 8, 9, 7]
    drafter = small_drafter("ctc", pair, depth=4)
    drafter.reserve(1, 40)
    drafter.committed(0, text, states_of(plain_pair, text))
    round, blank = new_round([3], parse_tree("2,2,1"), {2: 32, 5: 35}), pair.vocabulary
    first, drawn = drafter.propose(round, 0, [(0, [0])]), [len(drafter._positions[0])]
    assert first.ids is not None and first.ids.shape == (1, 32)
    begun = drafter._probs(0)[None]
    for depth, row in ((1, 2), (2, 5)):  # after a second candidate too
        deeper = drafter.propose(round, depth, [(0, [row])])
        drawn.append(len(drafter._positions[0]))
    said, symbols = [position.best for position in drafter._positions[0]], drafter._probs(0)[None]
    for depth, count in enumerate(drawn, 1):
        # As many as say so many tokens, if that many do; not one more.
        assert count == 4 or collapsed_length(said[:count], blank) >= depth
        assert collapsed_length(said[: count - 1], blank) < depth
    prefix = Prefixes.empty(symbols)
    for token in (32, 35):
        prefix = prefix.extended(torch.tensor([token]), symbols)
    assert deeper.ids is not None
    torch.testing.assert_close(deeper.scores[0], prefix.next(symbols)[0][deeper.ids[0]].log(), **SAME)
    while len(drafter._positions[0]) < 4:
        drafter._add_position([0])
    network, embed, head = drafter._network, pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    read, states = [*text[1:], 3], states_of(plain_pair, text)
    for position in range(4):
        embedded = network.embed(torch.tensor(read), embed)
        state = by_the_book(network, embedded, states)
        symbols = network.with_blank(head(state)[None], state[None])[0].softmax(-1)
        torch.testing.assert_close(drafter._positions[0][position].probs, symbols, **SAME)
        states, read = torch.cat([states, state[None]]), [*read, int(symbols.argmax())]
    assert hidden_width(pair.target) == state.shape[-1]
    expected = Prefixes.empty(begun).next(begun)[0]
    torch.testing.assert_close(first.scores[0], expected[first.ids[0]].log(), **SAME)
