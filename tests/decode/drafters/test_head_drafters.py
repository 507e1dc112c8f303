"""Drafters on the target's hidden states: what they propose, and that the text stays the target's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from conftest import NEW, VOCABULARY
from contract_policies import TEST_POLICIES
from small_drafters import DRAFTERS, small_drafter
from specstop.decode.candidates import Candidates
from specstop.decode.drafters.heads.ctc import Prefixes, first_positions, tokens_said
from specstop.decode.drafters.heads.layer_network import LayerNetwork
from specstop.decode.loop import Speculator
from specstop.decode.models.hidden import hidden_width
from specstop.decode.models.pair import Pair
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
    for mode, tree in (("rejection", "2,2"), ("block", None), ("target_init", "2,2"), ("typical", "2,1")):
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
            found = [Candidates.at([end], tree) for _ in streams]
            feeding = [[0] for _ in streams]
            for depth in range(3):
                rows = (
                    drafter.propose(range(len(found)), found, feeding)
                    .dense(VOCABULARY)
                    .split([len(places) for places in feeding])
                )
                for own, some in zip(out, rows, strict=True):
                    own.append(some)
                for at, (number, here) in enumerate(zip(streams, found, strict=True)):
                    grown = [
                        here.add(place, row, 10 + number + depth + 2 * row)
                        for place in feeding[at] for row in tree.children[here.rows[place]]
                    ]  # fmt: skip
                    feeding[at] = grown[: 1 + number % 2]
            for at, number in enumerate(streams):
                path = [end, found[at].tokens[1]]
                texts_now = [*texts[number], *([20, found[at].tokens[1]] if end == 21 else []), *path]
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
        found = Candidates.at([3], tree)
        drafter.propose([0], [found], [[0]])
        places = [found.add(0, 1, 30), found.add(0, 2, 31)]
        rows = drafter.propose([0], [found], [places]).dense(VOCABULARY)
        network, embed = drafter._network, pair.target.get_input_embeddings()
        for row, token in zip(rows, (30, 31), strict=True):
            path = embed(torch.tensor([[3, token]])) if kind == "hydra" else None
            torch.testing.assert_close(row, network.logits(1, network.state(1, hidden, path))[0], **SAME)
        assert torch.equal(rows[0], rows[1]) == (kind == "medusa")
        assert not torch.isfinite(drafter.propose([0], [_deep(4)], [[4]]).dense(VOCABULARY)).any(), (
            "there are three heads"
        )


def _deep(depth: int) -> Candidates:
    found = Candidates.at([3], chain(depth))
    for node in range(depth):
        found.add(node, node + 1, 5)
    return found


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
        found = Candidates.at([3], tree)
        assert drafter.backlog().tolist() == [len(new) + (0 if not old else 1)]
        drafter.propose([0], [found], [[0]])
        first = [found.add(0, 1, 30), found.add(0, 2, 31)]
        drafter.propose([0], [found], [first])
        second = [found.add(first[1], 5, 12), found.add(first[1], 6, 13)]
        rows = drafter.propose([0], [found], [second]).dense(VOCABULARY)
        for row, token in zip(rows, (12, 13), strict=True):
            read, states = [*text[1:], 3], known
            for following in (31, token):
                states = torch.cat([states, by_the_book(network, embed(torch.tensor(read)), states)[None]])
                read.append(following)
            expected = head(by_the_book(network, embed(torch.tensor(read)), states))
            torch.testing.assert_close(row, expected, **SAME)


def test_ctc_has_a_slot_for_every_position_of_every_root(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """Sixteen roots of six positions, up to the end of the longest text: as with room for all of them from the start."""
    settings = Settings(0.7, NEW, tree="16,1", max_depth=2, verification="target_init", ignore_eos=True)
    made = []
    for beyond in (6, 16 * 6):
        drafter = small_drafter("ctc", pair, depth=6)
        assert drafter.beyond == 6
        drafter.beyond = beyond
        made.append(Speculator(pair, FixedLength(2), settings, drafter=drafter).generate(prompt_ids[4], 9).tokens)
    assert made[0] == made[1] and len(made[0]) == NEW


def test_a_text_may_be_longer_than_the_one_before_whose_roots_took_many_slots(
    pair: Pair, prompt_ids: list[list[int]]
) -> None:
    """The cache has room already then; positions have to be there as well."""
    drafter = small_drafter("ctc", pair, depth=6)
    made = []
    for new in (6, 30, 6):
        settings = Settings(0.7, new, tree="16,1", max_depth=2, verification="target_init", ignore_eos=True)
        made.append(Speculator(pair, FixedLength(2), settings, drafter=drafter).generate(prompt_ids[4], 9).tokens)
    assert made[0] == made[2] == made[1][:6] and len(made[1]) == 30


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
    assert [tokens_said(symbols, 9) for symbols in ([], [9], [1, 1], [1, 9, 1], [9, 1, 2, 2])] == [0, 0, 1, 2, 2]


@torch.inference_mode()
def test_ctc_draws_positions_as_deep_as_it_is_asked(pair: Pair, plain_pair: Pair) -> None:
    text = [5, 8, 9, 7]
    drafter = small_drafter("ctc", pair, depth=4)
    drafter.reserve(1, 40)
    drafter.committed(0, text, states_of(plain_pair, text))
    found, blank = Candidates.at([3], parse_tree("2,2,1")), pair.vocabulary
    first, place, drawn = drafter.propose([0], [found], [[0]]), 0, [drafter._said[0].best.shape[1]]
    assert first.ids is not None and first.ids.shape == (1, 32)
    begun = drafter._said[0].symbols
    for row in (2, 5):  # after a second candidate too
        place = found.add(place, row, 30 + row)
        deeper = drafter.propose([0], [found], [[place]])
        drawn.append(drafter._said[0].best.shape[1])
    said, symbols = drafter._said[0].best[0].tolist(), drafter._said[0].symbols
    for depth, count in enumerate(drawn, 1):
        # As many as say so many tokens, if that many do; not one more.
        assert count == 4 or tokens_said(said[:count], blank) >= depth
        assert tokens_said(said[: count - 1], blank) < depth
    prefix = Prefixes.empty(symbols)
    for token in (32, 35):
        prefix = prefix.extended(torch.tensor([token]), symbols)
    assert deeper.ids is not None
    torch.testing.assert_close(deeper.scores[0], prefix.next(symbols)[0][deeper.ids[0]].log(), **SAME)
    while drafter._said[0].best.shape[1] < 4:
        drafter._go_on([0])
    network, embed, head = drafter._network, pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    read, states = [*text[1:], 3], states_of(plain_pair, text)
    for position in range(4):
        embedded = network.embed(torch.tensor(read), embed)
        state = by_the_book(network, embedded, states)
        symbols = network.with_blank(head(state)[None], state[None])[0].softmax(-1)
        torch.testing.assert_close(drafter._said[0].symbols[0, position], symbols, **SAME)
        states, read = torch.cat([states, state[None]]), [*read, int(symbols.argmax())]
    assert hidden_width(pair.target) == state.shape[-1]
    expected = Prefixes.empty(begun).next(begun)[0]
    torch.testing.assert_close(first.scores[0], expected[first.ids[0]].log(), **SAME)
