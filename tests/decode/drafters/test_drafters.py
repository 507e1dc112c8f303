"""Drafters beside a draft model: prompt lookup, and heads that answer every depth from the target's hidden state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEW, VOCABULARY
from contract_policies import TEST_POLICIES
from small_drafters import new_round, proposed
from specstop.decode.drafters import Drafter, LookupDrafter, ModelDrafter, Proposal, find_drafter
from specstop.decode.drafters.spec import change_paths, parse_spec, paths_of
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair, load_pair
from specstop.decode.plain import plain_texts
from specstop.decode.records import Generation
from specstop.decode.round_state import RoundState, Rows
from specstop.decode.settings import Settings
from specstop.decode.topology import chain, parse_tree
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from torch import Tensor

TREES = [None, "4", "3,2,1", "parents:-1,-1,0,0,1,2,5"]


def looked_up(pair: Pair, text: list[int], longest: int = 3, anchor: int | None = None) -> dict[int, float]:
    """Weights of what lookup proposes after the text, by token."""
    drafter = LookupDrafter(pair, longest)
    drafter.reserve(1, 64)
    whole = text if anchor is None else [*text, anchor]
    drafter.committed(0, whole[:-1], None)
    row = proposed(drafter, new_round(whole[-1:], chain(3)), 0)[0]
    return {t: float(row[t].exp()) for t in torch.isfinite(row).nonzero()[:, 0].tolist()}


def generate(
    pair: Pair, prompts: Sequence[list[int]], policy: StopPolicy, settings: Settings, drafter: object
) -> list[Generation]:
    speculator = Speculator(pair, policy, settings, drafter=drafter)
    return [speculator.generate(prompt, stream_key(0, f"p{i}")) for i, prompt in enumerate(prompts)]


def plain(pair: Pair, prompts: Sequence[list[int]], temperature: float = 0.0) -> list[list[int]]:
    keys = [stream_key(0, f"p{i}") for i in range(len(prompts))]
    return plain_texts(pair, prompts, keys, NEW, temperature).tokens


def test_lookup_counts_what_followed_and_prefers_the_later_of_equals(pair: Pair) -> None:
    weights = looked_up(pair, [5, 8, 5, 9, 5, 9, 5, 7, 5])  # 5 was followed by 8, 9, 9, 7
    assert {t: round(w) for t, w in weights.items()} == {8: 1, 9: 2, 7: 1}
    assert weights[9] > weights[7] > weights[8]


def test_lookup_takes_the_longest_suffix_that_came_before(pair: Pair) -> None:
    text = [4, 5, 6, 20, 9, 5, 6, 21, 9, 6, 22, 4, 5, 6]
    assert list(looked_up(pair, text)) == [20]
    assert list(looked_up(pair, text, longest=2)) == [20, 21]
    assert list(looked_up(pair, text, longest=1)) == [20, 21, 22]


def test_lookup_that_knows_nothing_proposes_nothing(pair: Pair) -> None:
    assert looked_up(pair, [4, 5, 6, 7]) == {}
    assert looked_up(pair, [4]) == {}
    generation = generate(pair, [[40]], FixedLength(4), Settings(0.0, 3), LookupDrafter(pair))[0]
    first = generation.rounds[0]
    assert (first.drafted, first.verified, first.accepted, first.committed) == (0, 0, 0, 1)


def test_lookup_follows_each_branch_of_a_tree_by_its_own_tokens(pair: Pair) -> None:
    text = [5, 8, 30, 5, 9, 31, 5]
    drafter = LookupDrafter(pair)
    drafter.reserve(1, 64)
    drafter.committed(0, text[:6], None)
    round = new_round([5], parse_tree("2,2"), {1: 9, 2: 8})
    rows = proposed(drafter, round, 0)
    assert torch.isfinite(rows[0]).nonzero()[:, 0].tolist() == [8, 9]
    rows = proposed(drafter, round, 1, 2)
    assert [torch.isfinite(row).nonzero()[:, 0].tolist() for row in rows] == [[31], [30]]
    drafter.committed(0, [5, 9], None)
    assert not torch.isfinite(proposed(drafter, new_round([44], parse_tree("2,2")), 0)).any()
    drafter.reserve(1, 64)
    assert not torch.isfinite(proposed(drafter, new_round([5], chain(1)), 0)).any(), "a new text"


def test_lookup_knows_each_text_of_a_batch_by_itself(pair: Pair) -> None:
    """A sparse proposal has a row for each place, stream by stream, as long as the longest."""
    drafter, texts = LookupDrafter(pair), [[5, 8, 5, 9, 5], [6, 7, 6], [4, 3]]
    drafter.reserve(3, 64)
    for stream, text in enumerate(texts):
        drafter.committed(stream, text[:-1], None)
    round = new_round([text[-1] for text in texts], chain(2))
    sparse = drafter.propose(round, 0, [(stream, [0]) for stream in range(3)])
    assert sparse.ids is not None and sparse.ids.shape == sparse.scores.shape == (3, 2)
    rows = sparse.dense(VOCABULARY)
    assert [torch.isfinite(row).nonzero()[:, 0].tolist() for row in rows] == [[8, 9], [7], []]
    alone = LookupDrafter(pair)
    alone.reserve(1, 64)
    alone.committed(0, texts[0][:-1], None)
    assert torch.equal(proposed(alone, new_round([5], chain(2)), 0)[0], rows[0])


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("tree", TREES)
def test_text_with_lookup_is_the_targets(
    pair: Pair, prompt_ids: list[list[int]], tree: str | None, verification: str
) -> None:
    """Each policy at one temperature, at the other one with the next tree: `benchmarks/drafters.py` decodes at both."""
    prompts = [[*p, *p, *p] for p in prompt_ids[1::3]]
    for number, policy in enumerate((FixedLength(4), Confidence(0.3))):
        temperature = (0.0, 0.7)[(TREES.index(tree) + number) % 2]
        settings = Settings(temperature, NEW, tree=tree, verification=verification)
        made = generate(pair, prompts, policy, settings, LookupDrafter(pair))
        if verification == "match" or temperature == 0.0:
            assert [list(g.tokens) for g in made] == plain(pair, prompts, temperature)
        assert sum(r.drafted for g in made for r in g.rounds) > 0
        assert any(r.drafted == 0 for g in made for r in g.rounds)
        assert all(r.backlog == 0 for g in made for r in g.rounds)
    if verification == "match":
        repeated = [5, 6, 7, 8, 9] * 4
        greedy = generate(pair, [repeated], FixedLength(4), Settings(0.0, NEW, tree=tree), LookupDrafter(pair))[0]
        assert list(greedy.tokens) == plain(pair, [repeated])[0]


@pytest.mark.parametrize("name", ["trimming", "selecting", "from-anchor", "reads-history"])
def test_lookup_goes_with_every_sort_of_policy(pair: Pair, prompt_ids: list[list[int]], name: str) -> None:
    prompts = [[*p, *p] for p in prompt_ids[::2]]
    made = generate(pair, prompts, TEST_POLICIES[name], Settings(0.7, NEW, verification="match"), LookupDrafter(pair))
    assert [list(g.tokens) for g in made] == plain(pair, prompts, 0.7)


def test_drafters_by_name(pair: Pair) -> None:
    assert isinstance(find_drafter("model", pair), ModelDrafter)
    lookup = find_drafter("lookup:7", pair)
    assert isinstance(lookup, LookupDrafter)
    assert lookup._indexes[0].longest == 7
    for name in ("lookup:", "model:3", "medusa", "medusa:", "medusa?x=1", "suffix+modle", ""):
        with pytest.raises(
            InputError, match=r"^drafter: expected one of model, lookup:LONGEST, .*, ctc-released:PATH, .*, not "
        ) as error:
            find_drafter(name, pair)
        assert repr(name.rpartition("+")[2]) in str(error.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lookup:0", "lookup: expected for longest a whole number of 1 or more, not 0"),
        ("lookup:x", "lookup: expected for longest a whole number of 1 or more, not 'x'"),
        ("lookup?longest=-1", "lookup: expected for longest a whole number of 1 or more, not -1"),
        ("lookup?longest=2.5", "lookup: expected for longest a whole number of 1 or more, not 2.5"),
        ("lookup:4?longest=4", "longest is given twice; give it once"),
        ("lookup?length=4", "got an unexpected keyword argument 'length'; it takes longest"),
        ("suffix?confidence=0.5", "got an unexpected keyword argument 'confidence'; it takes path, keep"),
        ("suffix?keep=false", "suffix: expected for keep 0 or 1, not 'false'"),
        ("suffix?keep=2", "suffix: expected for keep 0 or 1, not 2"),
        ("suffix?keep=1&keep=0", "keep is given twice; give it once"),
    ],
)
def test_options_are_of_their_kind(pair: Pair, name: str, why: str) -> None:
    with pytest.raises(InputError, match=f"^drafter.*{re.escape(why)}$"):
        find_drafter(name, pair)


class Heads(Drafter):
    """Medusa-like: head j scores the token at depth j + 1 from the target's last hidden state before the roots.

    A head is the target's own output matrix with noise, so that some of what it says is accepted.
    """

    layers, readable = (-1,), 128

    def __init__(self, pair: Pair, depth: int) -> None:
        generator = torch.Generator().manual_seed(5)
        weight = pair.target.lm_head.weight
        self.heads = [
            weight + 0.2 * j * torch.randn(weight.shape, generator=generator, dtype=weight.dtype) for j in range(depth)
        ]
        self.passes, self.seen = 0, []

    def reserve(self, streams: int, tokens: int) -> None:
        assert streams == 1

    def begin(self, stream: int) -> None:
        assert stream == 0
        self.text: list[int] = []

    def backlog(self) -> Array:
        return np.zeros(1, dtype=np.int64)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        assert states is not None and len(states) == len(tokens)
        self.text += tokens
        self.hidden = states[-1:]
        self.seen.append((list(self.text[-len(tokens) :]), list(self.text), states.clone()))

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        ((stream, fed),) = rows
        assert stream == 0
        if depth == 0:
            self.passes += 1
            self.rows = [torch.nn.functional.linear(self.hidden, head) for head in self.heads]
        return Proposal(self.rows[depth].expand(len(fed), -1))


class Half(StopPolicy):
    """Drafts the whole tree, then verifies the first branch of each node and what stands below."""

    name, max_depth = "half", 3

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        n = tree.parent.shape[1]
        first = [i for i in range(n) if i == tree.parent[0].tolist().index(int(tree.parent[0, i]))]
        kept = np.zeros_like(tree.drawn)
        for node in first:
            parent = int(tree.parent[0, node])
            kept[0, node] = parent < 0 or bool(kept[0, parent])
        return kept


@pytest.mark.parametrize("tree", [None, "3,2,1", "parents:-1,-1,0,0,1,2"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_heads_on_the_target_get_its_hidden_state_and_leave_the_text_alone(
    plain_pair: Pair, prompt_ids: list[list[int]], tree: str | None, temperature: float
) -> None:
    prompt_ids = prompt_ids[::2]
    expected = plain(plain_pair, prompt_ids, temperature)
    for policy in (FixedLength(3), Half()):
        heads = Heads(plain_pair, 4)
        made = generate(
            plain_pair,
            prompt_ids,
            policy,
            Settings(temperature, NEW, tree=tree, max_depth=4, verification="match"),
            heads,
        )
        assert [list(g.tokens) for g in made] == expected
        rounds = [r for g in made for r in g.rounds]
        assert heads.passes == sum(r.drafted > 0 for r in rounds), "one pass a round answers all depths"
        assert 0 < sum(r.accepted for r in rounds) < sum(r.verified for r in rounds)
        if isinstance(policy, Half) and tree is not None:
            assert all(r.verified < r.drafted for r in rounds if r.drafted > 2)
            assert max(r.verified for r in rounds) == 3
        with torch.no_grad():
            for new, text, hidden in heads.seen[::3]:
                states = plain_pair.target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
                torch.testing.assert_close(hidden, states[0, -len(new) :], atol=1e-9, rtol=0)


def test_no_other_drafter_pays_for_hidden_states(pair: Pair, prompt_ids: list[list[int]]) -> None:
    for drafter in (ModelDrafter(pair), LookupDrafter(pair)):
        speculator = Speculator(pair, FixedLength(2), Settings(0.0, 6), drafter=drafter)
        speculator.generate(prompt_ids[3])
        assert speculator._source.target.states is None


def test_one_drafter_may_serve_one_loop_after_the_other(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """Trees of different shapes: what was kept for the last one does not serve the next."""
    drafter, expected = ModelDrafter(pair), plain(pair, prompt_ids[4:6])
    for parents in ("-1,-1,0,1", "-1,-1,-1,0", "-1,-1,1,0"):
        settings = Settings(0.0, NEW, tree=f"parents:{parents}")
        again = generate(pair, prompt_ids[4:6], FixedLength(4), settings, drafter)
        fresh = generate(pair, prompt_ids[4:6], FixedLength(4), settings, ModelDrafter(pair))
        assert [list(g.tokens) for g in again] == expected
        assert [[r.accepted for r in g.rounds] for g in again] == [[r.accepted for r in g.rounds] for g in fresh]


def test_vocabulary_of_lookup_is_the_pairs(pair: Pair) -> None:
    drafter = LookupDrafter(pair)
    assert proposed(drafter, new_round([5], chain(1)), 0).shape == (1, VOCABULARY)


class Layers(Heads):
    """Wants the states of several layers, and scores by the last."""

    layers = (0, 1, -1)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        assert states is not None
        self.several = states
        super().committed(stream, tokens, states[:, -16:])


def test_a_drafter_is_told_of_the_layers_that_it_wants(plain_pair: Pair, prompt_ids: list[list[int]]) -> None:
    for policy in (FixedLength(3), TEST_POLICIES["from-anchor"]):
        layers = Layers(plain_pair, 6)
        made = generate(plain_pair, prompt_ids[2:4], policy, Settings(0.0, NEW), layers)
        assert [list(g.tokens) for g in made] == plain(plain_pair, prompt_ids[2:4])
        with torch.no_grad():
            states = plain_pair.target(torch.tensor([layers.text]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0] for layer in Layers.layers], -1)[-len(layers.several) :]
        torch.testing.assert_close(layers.several, expected, atol=1e-9, rtol=0)


def test_lookup_needs_no_draft_model(pair: Pair, pair_folder: Path, prompt_ids: list[list[int]]) -> None:
    alone = load_pair(pair_folder / "target", dtype="float64")
    prompts = [[*p, *p, *p] for p in prompt_ids[2:5]]
    assert alone.draft is None and alone.vocabulary == pair.vocabulary and alone.eos == pair.eos
    made = generate(alone, prompts, FixedLength(4), Settings(0.7, NEW, verification="match"), LookupDrafter(alone))
    assert [list(g.tokens) for g in made] == plain(pair, prompts, 0.7)
    with pytest.raises(InputError, match="this needs a draft model: give `draft`"):
        Speculator(alone, FixedLength(4))


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("model", "model"),
        ("lookup:4", "lookup"),
        ("suffix:a+b.txt?confidence=0.6+hydra:c/d+hydra-v2", "suffix hydra"),
        ("hydra:/a/llama+hydra-v2", "hydra"),
        ("lookup+suffix+model", "lookup suffix model"),
        ("suffix:a+model", "suffix model"),
        ("suffix?path=a+b.txt&keep=1", "suffix"),
    ],
)
def test_a_plus_sign_joins_drafters_or_is_part_of_a_path(spec: str, names: str) -> None:
    assert [part.name for part in parse_spec(spec)] == names.split()


def test_paths_of_a_spec_are_changed() -> None:
    def moved(spec: str) -> str:
        return change_paths(spec, lambda path: f"/x/{path}")

    assert moved("suffix:notes.txt") == "suffix:/x/notes.txt"
    assert moved("suffix?path=a.txt&keep=1") == "suffix:/x/a.txt?keep=1"
    both = moved("suffix:a+b.txt?confidence=0.6+hydra:c/d+hydra-v2")
    assert both == "suffix:/x/a+b.txt?confidence=0.6+hydra:/x/c/d+hydra-v2"
    assert paths_of(both) == ["/x/a+b.txt", "/x/c/d+hydra-v2"]
    for same in ("model", "lookup:4", "suffix?keep=1+model", "copycat?path=a"):
        assert moved(same) == same
