"""Replay beside the live loop under filters, in float64: every round the same, every feature finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode import Pair, SamplingParams, Settings, Speculator, stream_key
from specstop.policies import DraftStep, FixedLength, StopPolicy
from specstop.policies.contract import Array, State
from specstop.policies.costs import CostTable
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays

DEPTH, TREE = 5, "3,2,1,1,1"
FILTERS = {
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k 20": SamplingParams(top_k=20),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "repetition penalty 1.2": SamplingParams(repetition_penalty=1.2),
}
TEMPERATURES = (0.5, 0.7, 1.0)
SHAPES = {"chain": None, "tree": TREE}


class ByNoise(StopPolicy):
    """Reads what the filters change: margins, the chance of the drawn token, its path; and trims by it."""

    name, trims, max_depth = "by-noise", True, DEPTH
    features = ("noisy_margin", "noisy_lead", "drawn_prob", "path_logprob", "mean_accepted")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep likely tokens that are well ahead."""
        margin, lead, chance, path, mean = np.moveaxis(step.features, -1, 0)
        return step.alive & (margin > 0.2) & (lead > -1.5) & (chance > 0.05) & (path > -5.0 - mean), state


@dataclass(frozen=True)
class Compared:
    """Rounds that were compared, those that differ, and features of the trace that are not finite."""

    rounds: int
    wrong: int
    not_finite: int


def policies() -> list[StopPolicy]:
    """Return plain decoding, fixed lengths, rules that read the draft's distribution or its noise, one with a memory."""
    specs = ("confidence:0.2", "product:0.1", "heuristic:2", "online:0.4")
    return [
        FixedLength(0),
        FixedLength(2),
        FixedLength(DEPTH),
        ByNoise(),
        *(load_policy(s).limited(DEPTH) for s in specs),
    ]


def no_costs() -> Profile:
    """Return a profile of made-up seconds: rounds do not hang on them but where a policy hears them."""
    table = CostTable(8.0, (1e-3, 1.1e-3), 2e-5, tuple(4e-3 + 1e-4 * n for n in range(DEPTH + 1)))
    return Profile(table, table, 3e-5, 2e-4, (5e-3, 1e-4), {}, 0.7)


def same_rounds(
    pair: Pair,
    prompts: Sequence[Prompt],
    tokens: int,
    sampling: SamplingParams,
    temperature: float,
    tree: str | None,
    room: Path,
) -> Compared:
    """Decode prompts live with several policies, replay them on a dense trace, and compare round for round.

    Args:
        pair: in float64.
        prompts: of words that its tokenizer knows.
        tokens: of each text.
        sampling, temperature, tree: of the sampling and the candidates.
        room: folder that does not exist yet, for the trace.
    """
    assert pair.tokenizer is not None
    settings = Settings(temperature, tokens, DEPTH, tree=tree, sampling=sampling, verification="match")
    trace = collect(
        pair, prompts, room, depth=DEPTH, tree=tree, temperature=temperature, verification="match",
        max_new_tokens=tokens, sampling=sampling,
    )  # fmt: skip
    arrays, profile = trace_arrays(trace), no_costs()
    not_finite = sum(int((~torch.isfinite(values)).sum()) for values in arrays.columns.values())
    rounds = wrong = 0
    for policy in policies():
        speculator = Speculator(pair, policy, settings, profile)
        live = []
        for prompt in prompts:
            made = speculator.generate(list(pair.tokenizer(prompt.text)["input_ids"]), stream_key(0, prompt.id))
            live.append([(r.anchor, r.drafted, r.verified, r.accepted) for r in made.rounds])
        log = replay(arrays, policy, profile).log.tolist()
        at = {name: number for number, name in enumerate(arrays.prompt_ids)}
        for prompt, played in zip(prompts, live, strict=True):
            mine = [tuple(line[1:]) for line in log if line[0] == at.get(prompt.id)]
            rounds += max(len(played), len(mine))
            wrong += sum(a != b for a, b in zip(played, mine, strict=False)) + abs(len(played) - len(mine))
    return Compared(rounds, wrong, not_finite)
