"""Drafters on hidden states of the target: what they receive, what they propose, and that the text stays the target's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from conftest import NEW
from random_models import SCALED, build
from small_drafters import new_round, proposed, small_drafter, small_network
from specstop.decode.drafters import LookupDrafter, TrainedDrafter, find_drafters, save_drafter, with_drafter
from specstop.decode.drafters.ctc import SYMBOLS, Prefixes, Trie, collapse_symbols, collapsed_length, count_candidates
from specstop.decode.drafters.networks import LayerNetwork, output_layer
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.topology import chain, parse_tree
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength

SAME = {"atol": 1e-9, "rtol": 0.0}  # float64, in another order of operations


@torch.no_grad()
def states_of(pair: Pair, text: list[int]) -> torch.Tensor:
    return pair.target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]


class Layers(LookupDrafter):
    """Requests several layers and compares them with a whole forward pass of the target."""

    layers = (0, 1, -1)

    def begin(self, stream: int) -> None:
        super().begin(stream)
        self.text: list[int] = []

    @torch.no_grad()
    def committed(self, stream: int, tokens: Sequence[int], states: torch.Tensor | None) -> None:
        super().committed(stream, tokens, None)
        self.text += tokens
        layers = self.pair.target(torch.tensor([self.text]), output_hidden_states=True).hidden_states
        expected = torch.cat([layers[layer][0] for layer in self.layers], -1)[-len(tokens) :]
        torch.testing.assert_close(states, expected, **SAME)


@pytest.mark.parametrize("tree", [None, "3,2,1"])
def test_a_drafter_receives_the_layers_that_it_requests_of_every_committed_token(plain_pair, prompt_ids, tree):
    drafter = Layers(plain_pair)
    drafter.pair = plain_pair
    text = Speculator(plain_pair, FixedLength(3), Settings(0.0, NEW, tree=tree), drafters=[drafter]).generate(
        prompt_ids[3]
    )
    assert sum(r.accepted for r in text.rounds) > 0
    assert drafter.text == [*prompt_ids[3], *text.tokens][: len(drafter.text)] and len(drafter.text) > len(
        prompt_ids[3]
    )


@torch.inference_mode()
def test_medusa_scores_by_the_state_and_hydra_by_the_path_too(pair, plain_pair):
    text = [5, 8, 9, 7]
    hidden, embed = states_of(plain_pair, text)[-1:], pair.target.get_input_embeddings()
    for kind in ("medusa", "hydra"):
        drafter = small_drafter(kind, pair)
        drafter.committed(0, text, states_of(plain_pair, text))
        round, network = new_round([3], parse_tree("2,1"), {1: 30, 2: 31}), drafter._network
        proposed(drafter, round, 0)
        rows = proposed(drafter, round, 1, 2)
        for row, token in zip(rows, (30, 31), strict=True):
            path = embed(torch.tensor([[3, token]])) if kind == "hydra" else None
            torch.testing.assert_close(row, network.outputs[1](network.state(1, hidden, path))[0], **SAME)
        assert torch.equal(rows[0], rows[1]) == (kind == "medusa")
        deep = new_round([3], chain(4), dict.fromkeys(range(1, 5), 5))
        assert not torch.isfinite(proposed(drafter, deep, 4)).any(), "there are three heads"


def reference_state(network: LayerNetwork, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return the last state of the layer over a whole text, without a cache, with explicit attention."""
    count = len(embedded)
    cos, sin = network.rotations(count, embedded.device, embedded.dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("sqhd,skhd->shqk", q, k) / (q.shape[-1] ** 0.5)
        scores = scores.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf)
        assert scores.shape[1] == network.shape.attention_heads
        return torch.einsum("shqk,skhd->sqhd", scores.softmax(-1), v)

    return network(embedded[None], states[None], (cos, sin), attend)[0, -1]


@torch.inference_mode()
def test_the_layer_reads_the_targets_states_and_then_its_own(pair, plain_pair):
    text, drafter = [5, 8, 9, 7, 11], small_drafter("layer", pair)
    network, embed, head = drafter._network, pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    drafter.reserve(1, 40)
    for old, new in (([], text), (text, [3, 30])):  # a first round, and one after two accepted tokens
        text = [*old, *new]
        target_states = states_of(plain_pair, text)
        drafter.committed(0, new, target_states[len(old) :])
        round = new_round([3], parse_tree("2,2,1"), {1: 30, 2: 31, 5: 12, 6: 13})
        assert drafter.backlog().tolist() == [len(new) + (0 if not old else 1)]
        for rows in ((0,), (1, 2), (5, 6)):
            scores = proposed(drafter, round, *rows)
        for row, token in zip(scores, (12, 13), strict=True):
            read, states = [*text[1:], 3], target_states
            for following in (31, token):
                states = torch.cat([states, reference_state(network, embed(torch.tensor(read)), states)[None]])
                read.append(following)
            torch.testing.assert_close(row, head(reference_state(network, embed(torch.tensor(read)), states)), **SAME)


# CTC


def test_chances_of_prefixes_are_sums_over_all_alignments():
    """Three tokens and a blank at four positions: 256 alignments, each prefix of up to four tokens."""
    positions = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(-1)
    chance: dict[tuple[int, ...], float] = {}
    for alignment in itertools.product(range(4), repeat=4):
        share = float(torch.stack([positions[0, t, symbol] for t, symbol in enumerate(alignment)]).prod())
        tokens = tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != 3)
        for end in range(len(tokens) + 1):
            chance[tokens[:end]] = chance.get(tokens[:end], 0.0) + share
    for length in range(4):
        for prefix in itertools.product(range(3), repeat=length):
            extended = Prefixes.empty(positions)
            for token in prefix:
                extended = extended.extended(torch.tensor([token]), positions)
            expected = [chance.get((*prefix, token), 0.0) for token in range(3)]
            assert extended.next(positions)[0].tolist() == pytest.approx(expected, abs=1e-15)
    assert [collapsed_length(symbols, 9) for symbols in ([], [9], [1, 1], [1, 9, 1], [9, 1, 2, 2])] == [0, 0, 1, 2, 2]


@torch.inference_mode()
def test_ctc_scores_all_alignments_of_as_many_positions_as_the_depth_requires(pair, plain_pair):
    """Each position is read after the best symbol of the one before, here without a cache."""
    text, drafter, symbols = [5, 8, 9, 7], small_drafter("ctc", pair, depth=4), []
    network, embed, head = drafter._network, pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    read, states = [*text[1:], 3], states_of(plain_pair, text)
    for _ in range(4):
        state = reference_state(network, network.embed(torch.tensor(read), embed), states)
        symbols.append(network.with_blank(head(state)[None], state[None])[0].softmax(-1))
        states, read = torch.cat([states, state[None]]), [*read, int(symbols[-1].argmax())]
    best = read[len(text) :]
    drafter.reserve(1, 40)
    drafter.committed(0, text, states_of(plain_pair, text))
    round = new_round([3], parse_tree("2,2,1"), {2: 32, 5: 35})
    for depth, row, path in ((0, 0, ()), (1, 2, (32,)), (2, 5, (32, 35))):
        count = next(n for n in range(1, 5) if n == 4 or collapsed_length(best[:n], pair.vocabulary) > depth)
        positions = torch.stack(symbols[:count])[None]
        prefixes = Prefixes.empty(positions)
        for token in path:
            prefixes = prefixes.extended(torch.tensor([token]), positions)
        proposal = drafter.propose(round, depth, [(0, [row])])
        expected = prefixes.next(positions)[0][proposal.ids[0]].log()
        torch.testing.assert_close(proposal.scores[0], expected, **SAME)


BLANK, ROOM = -1, parse_tree("ctc-released")


def sequences(trie: Trie) -> set[tuple[int, ...]]:
    return {(token, *below) for token, rest in trie.items() for below in {(), *sequences(rest)}}


def without_place(trie: Trie, row: int = 0) -> int:
    """Return the number of nodes that the topology has no row for, large sub-tries first."""
    rows, in_order = ROOM.children[row], sorted(trie.values(), key=count_candidates, reverse=True)
    placed = sum(without_place(below, at) for below, at in zip(in_order, rows, strict=False))
    return placed + sum(1 + count_candidates(below) for below in in_order[len(rows) :])


def test_released_candidates_are_medusas_paths_collapsed_and_all_have_a_place():
    rng = random.Random(3)
    cases = [[rng.sample(range(rng.choice((11, 14, 20, 80))), 10) for _ in range(4)] for _ in range(300)]
    for symbols in cases:
        for row in symbols:
            if rng.random() < 0.85:
                row[rng.choice((0, 0, 0, 1, 2, 3, 5, 9))] = BLANK
    for blanks in itertools.product((None, 0, 1, 2, 6), repeat=4):
        cases.append([[BLANK if k == at else 10 * p + k for k in range(10)] for p, at in enumerate(blanks)])
    for symbols in cases:
        paths: list[tuple[int, ...]] = [()]
        for row, parent in enumerate(SYMBOLS.parent[1:], 1):
            paths.append((*paths[parent], symbols[len(paths[parent])][SYMBOLS.children[parent].index(row)]))
        expected = {tuple(s for s, _ in itertools.groupby(path) if s != BLANK) for path in paths} - {()}
        trie = collapse_symbols(symbols, BLANK)
        assert sequences(trie) == expected
        assert without_place(trie) == 0


def test_released_ctc_drafts_fewer_nodes_than_medusas_tree(plain_pair, prompt_ids, tmp_path):
    output = plain_pair.target.get_output_embeddings().weight.float()
    network = small_network("ctc", output.shape[1], plain_pair.vocabulary, output, 4, 0.05)
    folder = save_drafter(TrainedDrafter("ctc", network, plain_pair.fingerprint["target"]), tmp_path / "ctc")
    pair = with_drafter(plain_pair, f"ctc-released:{folder}")
    speculator = Speculator(pair, FixedLength(4), Settings(0.0, 24, tree="ctc-released"))
    texts = [speculator.generate(prompt) for prompt in prompt_ids[:4]]
    assert [list(g.tokens) for g in texts] == plain_texts(plain_pair, prompt_ids[:4], [0] * 4, 24).tokens
    drafted = {r.drafted for g in texts for r in g.rounds}
    assert len(drafted) > 1 and max(drafted) < SYMBOLS.nodes
    assert pair.fingerprint["draft"] != with_drafter(plain_pair, f"ctc:{folder}").fingerprint["draft"]
    with pytest.raises(InputError, match="kind ctc"):
        find_drafters(f"medusa:{folder}", plain_pair)


# The output layer


@pytest.mark.parametrize("name", SCALED)
@torch.inference_mode()
def test_last_states_become_the_logits_of_models_that_scale_them(name):
    model, same = build(name, torch.float64), {"atol": 1e-12, "rtol": 0.0}
    out = model(torch.tensor([[5, 8, 9, 7, 11, 30]]), output_hidden_states=True)
    states = out.hidden_states[-1]
    torch.testing.assert_close(output_layer(model)(states), out.logits, **same)
    for kind in ("layer", "ctc"):
        torch.testing.assert_close(small_drafter(kind, join(model, None))._output(states), out.logits, **same)
    assert float((model.get_output_embeddings()(states) - out.logits).abs().max()) > 0.1
