"""`match` on random noise tables: the text of the loop, and of plain sampling with the same noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import SHAPINGS, Case, shaped
from contract_policies import SelectingByToken, Trimming, TrimmingSelecting
from deciders import DECIDERS
from oracle import Law, oracle_pair
from specstop.decode.drafters import find_drafters
from specstop.decode.loop import Settings, Speculator
from specstop.decode.records import Generation
from specstop.policies.contract import StopPolicy
from torch import Tensor

NOISE_POLICIES: dict[str, Callable[[], StopPolicy]] = {
    **DECIDERS,
    "trimming": Trimming,
    "trimming-selecting": TrimmingSelecting,
    "selecting-by-token": SelectingByToken,
}
"""`match` also allows policies that trim by what was drawn."""


class Table:
    """A source with the noise of a table, [position, token]."""

    def __init__(self, noise: Tensor) -> None:
        self.noise = noise

    def gumbel(self, position: int, count: int) -> Tensor:
        return self.noise[position : position + count]


@dataclass(frozen=True)
class NoiseCase:
    """A case of `enumeration`, its decider one of `NOISE_POLICIES`, with the seed of its noise."""

    case: Case
    seed: int

    @property
    def noise(self) -> Tensor:
        """[positions, V] Gumbel noise."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = len(self.case.prompt) + self.case.new + 8
        uniform = torch.rand(rows, self.case.vocabulary, generator=generator, dtype=torch.float64)
        return -(-uniform.clamp_min(1e-300).log()).log()


def noise_case(tree: str, drafter: str, policy: str, chance: random.Random) -> NoiseCase:
    """Return a case with a table, noise, prompt, temperature, processors and end of text by chance."""
    vocabulary = chance.randint(2, 6)
    prompt = tuple(chance.randrange(vocabulary) for _ in range(chance.randint(1, 6)))
    sampling = chance.choice([name for name in SHAPINGS if name != "shaped" or vocabulary > 2])
    kind = chance.choice(("dense", "mixed")) if vocabulary > 2 else "dense"
    seed, eos, new = chance.randrange(10**6), chance.random() < 0.3, chance.randint(6, 12)
    temperature, attention = chance.choice((1.0, 0.7, 1.6)), chance.choice(("sdpa", "eager"))
    case = Case(
        "match", tree, policy, kind, seed, sampling, eos, drafter, vocabulary, new, temperature, prompt, attention
    )
    return NoiseCase(case, chance.randrange(10**6))


def speculate_on_noise(what: NoiseCase) -> Generation:
    """Return the loop's generation."""
    case, noise = what.case, what.noise
    pair = oracle_pair(Law(case.vocabulary, case.seed, case.kind), case.ends, case.attention)
    settings = Settings(
        case.temperature, case.new, tree=case.tree, sampling=SHAPINGS[case.sampling], verification="match"
    )
    drafters = find_drafters(case.drafter, pair)
    policy = NOISE_POLICIES[case.decider]()
    speculator = Speculator(pair, policy, settings, source=lambda key, window: Table(noise), drafters=drafters)
    return speculator.generate(case.prompt, key=3)


def plain_on_noise(what: NoiseCase) -> list[int]:
    """Return the text of sampling one token at a time."""
    case, noise = what.case, what.noise
    law = Law(case.vocabulary, case.seed, case.kind)
    text = list(case.prompt)
    while len(text) < len(case.prompt) + case.new:
        probs = torch.tensor(shaped(law.rows(tuple(text))[0].tolist(), text, case), dtype=torch.float64)
        text.append(int((probs.log() + noise[len(text)]).argmax()))
        if text[-1] in case.ends:
            break
    return text[len(case.prompt) :]
