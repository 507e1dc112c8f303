"""Noisy margins where tokens are left out: by how likely they are, they still count; by a grammar, they do not."""

from __future__ import annotations

import pytest
import torch
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import gumbel
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

TEMPERATURE, KEY, BOUND = 0.7, 91, 30.0


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


class Margins(StopPolicy):
    """Drafts all it may and remembers its margins, by round and node."""

    name, features, max_depth = "margins", ("noisy_margin", "noisy_lead"), 4

    def __init__(self) -> None:
        self.rounds: list[tuple[list[Array], DraftTree]] = []
        self.shown: list[Array] = []

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.shown.append(step.features[0].copy())
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> None:
        self.rounds.append((self.shown, tree))
        self.shown = []


def weights(pair: Pair, prefix: list[int]) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(pair.draft(torch.tensor([prefix])).logits[0, -1] / TEMPERATURE, -1)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), lambda w: w > -torch.inf),
        (SamplingParams(top_k=1), lambda w: w >= w.max()),
        (SamplingParams(top_k=5), lambda w: w >= w.topk(5).values[-1]),
        (SamplingParams(min_p=0.3), lambda w: w >= w.max() + torch.tensor(0.3).log()),
    ],
    ids=["all", "top-k 1", "top-k 5", "min-p"],
)
def test_a_token_that_a_filter_left_out_counts_without_noise(
    pair: Pair, prompt_ids: list[list[int]], sampling: SamplingParams, kept: object
) -> None:
    policy = Margins()
    made = Speculator(
        pair, policy, Settings(TEMPERATURE, 16, 4, sampling=sampling, ignore_eos=True, verification="match")
    ).generate(prompt_ids[4], KEY)
    checked = 0
    drafted = [record for record in made.rounds if record.drafted]
    for (shown, tree), record in zip(policy.rounds, drafted, strict=True):
        text = [*prompt_ids[4], *made.tokens[: record.anchor]]
        for depth, features in enumerate(shown, 1):
            prefix = [*text, *tree.tokens[0, : depth - 1].tolist()]
            weight = weights(pair, prefix)
            noise = gumbel(KEY, torch.tensor([len(prefix)]), len(weight), torch.float64)[0]
            stays = kept(weight)  # type: ignore[operator]
            own = int(tree.tokens[0, depth - 1])
            others = torch.arange(len(weight)) != own
            rivals = (weight + noise)[others & stays], weight[~stays]
            ahead = [weight[own] + noise[own] - rivals[0].max()] if len(rivals[0]) else []
            ahead += [weight[own] - rivals[1].max()] if len(rivals[1]) else []
            expected = min(float(min(ahead)), BOUND)
            assert features[0].tolist() == pytest.approx([expected, expected], abs=1e-5)
            checked += 1
    assert checked > 10


def test_what_a_grammar_forbids_is_no_rival(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """Draft and target obey the same one, so the only token that it allows is accepted for sure."""
    only = PrefixConstrainedLogitsProcessor(lambda batch, ids: [20 + len(ids) % 5], num_beams=1)
    policy = Margins()
    made = Speculator(
        pair, policy, Settings(TEMPERATURE, 12, 4, sampling=SamplingParams(processors=(only,)), verification="match")
    ).generate(prompt_ids[4], KEY)
    assert all(features[0].tolist() == [BOUND, BOUND] for shown, _ in policy.rounds for features in shown)
    assert all(record.accepted == record.drafted for record in made.rounds)


@pytest.mark.parametrize("tree", ["3,2", "parents:-1,-1,0,0,1"])
def test_siblings_and_filters(pair: Pair, prompt_ids: list[list[int]], tree: str) -> None:
    """Every margin stays within the lead over what was left out, and finite."""
    policy = Margins()
    Speculator(
        pair, policy, Settings(TEMPERATURE, 16, 4, tree=tree, sampling=SamplingParams(top_k=3), verification="match")
    ).generate(prompt_ids[4], KEY)
    margins = torch.cat([torch.from_numpy(features) for shown, _ in policy.rounds for features in shown])
    assert len(margins) > 10 and bool((margins.abs() <= BOUND).all())
    assert bool((margins[:, 1] <= margins[:, 0] + 1e-6).all())
