"""Losslessness against theory, on models that are a table of bigram logits: their distribution is known."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CHAINS, TREES
from conditionals import pit
from contract_policies import TEST_POLICIES
from noise_tables import NOISE_POLICIES, Table, noise_case, plain_on_noise, speculate_on_noise
from scipy import stats
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from torch import Tensor

FALSE_ALARM = 1e-4
SHAPES = (*CHAINS, *TREES, "3,2,1")
POLICIES = [
    FixedLength(0),
    FixedLength(1),
    FixedLength(4),
    TEST_POLICIES["trimming"],
    TEST_POLICIES["from-anchor"],
    TEST_POLICIES["selecting"],
]


class Bigram(torch.nn.Module):
    """The next token's logits are the row of the last one; tells the cache how much it has read."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table, self.dtype, self.device = table, table.dtype, table.device
        text = SimpleNamespace(num_hidden_layers=1, max_position_embeddings=None, vocab_size=len(table))
        self.config = SimpleNamespace(get_text_config=lambda: text, _attn_implementation="sdpa")

    def forward(self, input_ids: Tensor, past_key_values: Any, logits_to_keep: int, **rest: Any) -> SimpleNamespace:
        states = torch.zeros(1, 1, input_ids.shape[1], 1)
        past_key_values.update(states, states, 0)
        return SimpleNamespace(logits=self.table[input_ids[:, -logits_to_keep:]])


def bigrams(vocabulary: int, seed: int, eos: tuple[int, ...] = ()) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
    q = p + 0.7 * torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
    return Pair(Bigram(p), Bigram(q), None, vocabulary, eos)  # type: ignore[arg-type]


def table_of(pair: Pair) -> Tensor:
    return pair.target.table  # type: ignore[return-value]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize(("vocabulary", "eos"), [(2, ()), (3, (2,)), (5, (1, 4))])
def test_any_noise_gives_the_text_of_plain_sampling_with_it(
    policy: StopPolicy, vocabulary: int, eos: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(9)
    new, lengths = 12, []
    for trial in range(25):
        pair = bigrams(vocabulary, trial, eos)
        noise = -(-torch.rand(40, vocabulary, generator=generator, dtype=torch.float64).log()).log()
        expected, last = [], trial % vocabulary
        while len(expected) < new and not (expected and last in eos):
            last = int((torch.log_softmax(table_of(pair)[last] / 0.9, -1) + noise[2 + len(expected)]).argmax())
            expected.append(last)
        speculator = Speculator(
            pair, policy, Settings(0.9, new, verification="match"), source=lambda key, window, noise=noise: Table(noise)
        )
        assert list(speculator.generate([0, trial % vocabulary]).tokens) == expected
        lengths.append(len(expected))
    assert not eos or len(set(lengths)) > 3


@pytest.mark.parametrize("drafter", ["model", "lookup"])
@pytest.mark.parametrize("tree", SHAPES)
def test_any_noise_gives_the_text_of_plain_sampling_in_any_tree(tree: str, drafter: str) -> None:
    """On tables of the whole prefix: each policy with one of the drafters, with the other one on the next tree."""
    chance, half = random.Random(f"{tree} {drafter}"), (SHAPES.index(tree) + (drafter == "lookup")) % 2
    accepted = 0
    for policy in list(NOISE_POLICIES)[half::2]:
        case = noise_case(tree, drafter, policy, chance)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # policies that fail say so
            generation = speculate_on_noise(case)
        assert list(generation.tokens) == plain_on_noise(case), case
        accepted += sum(r.accepted for r in generation.rounds)
    assert accepted > 0


@pytest.mark.parametrize("policy", [FixedLength(3), TEST_POLICIES["trimming"]], ids=lambda p: p.name)
def test_three_tokens_over_many_keys_have_the_targets_distribution(policy: StopPolicy) -> None:
    """Chi-square over the 27 outcomes of 3 tokens from 2,000 keys, one round of drafting among them."""
    pair, count = bigrams(3, 1), 2000
    speculator = Speculator(pair, policy, Settings(1.0, 3, verification="match"))
    observed, drafted = torch.zeros(27), 0
    for i in range(count):
        generation = speculator.generate([0], stream_key(0, str(i)))
        a, b, c = generation.tokens
        observed[9 * a + 3 * b + c] += 1
        drafted += sum(r.accepted for r in generation.rounds)
    p = torch.softmax(table_of(pair), -1)
    expected = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten() * count
    assert float(expected.min()) > 5
    assert drafted > count / 4
    assert stats.chisquare(observed.numpy(), expected.numpy(), sum_check=False).pvalue > FALSE_ALARM


def test_a_perfect_draft_is_always_accepted_and_an_opposite_one_never() -> None:
    pair = bigrams(5, 3)
    twin = Pair(pair.target, pair.target, None, 5)
    opposite = Pair(pair.target, Bigram(-table_of(pair)), None, 5)  # type: ignore[arg-type]
    for other, efficiency in ((twin, 5), (opposite, 1)):
        rounds = Speculator(other, FixedLength(4), Settings(0.0, 31)).generate([0]).rounds
        assert all(r.committed == efficiency for r in rounds if not r.cut)


@pytest.mark.parametrize(
    ("mode", "tree"),
    [("rejection", "chain:3"), ("rejection", "2,1"), ("rejection_replace", "2,2"), ("block", "chain:3")],
)
def test_a_real_model_s_tokens_come_as_often_as_in_plain_sampling(pair: Pair, mode: str, tree: str) -> None:
    """Of 160 texts of four tokens each, against the target's own conditionals along the text; see `pit`."""
    policy = Confidence(0.3, 3)
    speculator = Speculator(pair, policy, Settings(0.7, 4, ignore_eos=True, verification=mode, tree=tree))
    prompt, keys = [5, 9, 11], [stream_key(1, f"{mode} {i}") for i in range(160)]
    generations = [speculator.generate(prompt, key) for key in keys]
    assert sum(r.accepted for g in generations for r in g.rounds) > 30
    shares = pit(pair, prompt, [list(g.tokens) for g in generations], 0.7)
    assert len(shares) == 640
    assert stats.kstest(shares, "uniform").pvalue > FALSE_ALARM


def test_the_test_on_a_real_model_sees_a_lossy_mode(pair: Pair) -> None:
    speculator = Speculator(pair, FixedLength(3), Settings(0.7, 4, ignore_eos=True, verification="typical"))
    prompt = [5, 9, 11]
    texts = [list(speculator.generate(prompt, stream_key(1, str(i))).tokens) for i in range(160)]
    assert stats.kstest(pit(pair, prompt, texts, 0.7), "uniform").pvalue < FALSE_ALARM
