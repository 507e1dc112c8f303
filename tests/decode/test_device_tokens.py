"""Drafts of a fixed length stay on the device until they are verified."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from specstop.decode.hooks import Hook
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair
from specstop.decode.round_state import RoundState
from specstop.decode.settings import Settings
from specstop.policies.fixed import Confidence, FixedLength
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Counts the tensors that are read on the host: the host would wait for a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

    def tolist(self, tensor: torch.Tensor) -> Any:
        self.count += 1
        return tensor.numpy().tolist()


class Rounds(Hook):
    """Records, by round, how many waits there were after each draft step, and whether the host knew the tokens."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.steps = waits, list[list[tuple[int, bool]]]()

    def on_draft_step(self, round: RoundState, depth: int) -> None:
        if depth == 1:
            self.steps.append([])
        self.steps[-1].append((self.waits.count, round.device_tokens is None))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_fixed_length_is_drafted_and_sent_without_a_wait(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch, temperature: float, batch: int
) -> None:
    waits = Waits()
    rounds = Rounds(waits)
    loop = Speculator(
        pair, FixedLength(3), Settings(temperature, 24, verification="match"), hooks=[rounds], batch=batch
    )
    sent: list[int] = []
    read = CachedModel.read_parts

    def read_parts(self: CachedModel, parts: Any) -> Any:
        logits = read(self, parts)
        if self is loop.target:
            sent.append(waits.count)
        return logits

    monkeypatch.setattr(CachedModel, "read_parts", read_parts)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.tolist(tensor))
    with waits:
        loop.run([Request(prompt, key) for key, prompt in enumerate(prompt_ids[:batch])])
    drafted = [steps for steps in rounds.steps if len(steps) == 3]
    assert len(drafted) > 3
    for steps in drafted[1:]:  # the first logits of a text are checked at once
        assert len({count for count, _ in steps}) == 1 and not any(on_host for _, on_host in steps)
        assert steps[0][0] in sent, "the target reads the candidates without a wait"


def test_a_policy_that_reads_features_knows_each_token(pair: Pair, prompt_ids: list[list[int]]) -> None:
    rounds = Rounds(Waits())
    Speculator(pair, Confidence(0.1), Settings(0.0, 24), hooks=[rounds]).generate(prompt_ids[0])
    assert all(on_host for steps in rounds.steps for _, on_host in steps)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_end_of_text_in_a_chain_ends_its_round(pair: Pair, prompt_ids: list[list[int]], temperature: float) -> None:
    """Candidates after it do not count, whether the host knew it while they were drafted or not."""

    settings, ended = Settings(temperature, 40, verification="match"), 0
    for eos in range(0, 48, 5):
        ending = dataclasses.replace(pair, eos=(eos,))
        fixed, called = (
            [Speculator(ending, policy, settings).generate(prompt, 1) for prompt in prompt_ids[:3]]
            for policy in (FixedLength(4), Confidence(0.0, 4))
        )
        for text, other in zip(fixed, called, strict=True):
            assert text.tokens == other.tokens
            rounds, others = (
                [(r.drafted, r.verified, r.accepted, r.committed, r.cut, r.backlog) for r in one.rounds]
                for one in (text, other)
            )
            assert rounds == others
            ended += sum(r.drafted < 4 and r.context < len(text.tokens) for r in text.rounds)
    assert ended > 3
