"""What the loop does otherwise where the models lie on a GPU: how it times, how wide its logits are, what it refuses late."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerator import Accelerator, to_device
from conftest import VOCABULARY, build_draft, build_model
from specstop.decode import Settings, Speculator
from specstop.decode.hooks import Timer
from specstop.decode.models.device import wide_linear, widen
from specstop.decode.models.pair import Pair, join
from specstop.decode.profile import add_decisions, decisions as decisions_module
from specstop.policies import FixedLength
from specstop.policies.errors import PairError, SpecstopWarning
from specstop.policies.fixed import Confidence
from specstop.policies.measurements import Measurements
from specstop.policies.profile import Profile
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Stream:
    """A device that takes 2 s for each thing it is given, the host 1 s for each reading of its clock."""

    def __init__(self) -> None:
        self.busy_until, self.waits = 0.0, 0

    def event(self, enable_timing: bool) -> Any:
        stream = self

        class Event:
            at = -1.0

            def record(self, on: object) -> None:
                stream.busy_until += 2.0
                self.at = stream.busy_until

            def synchronize(self) -> None:
                stream.waits += 1

            def elapsed_time(self, later: Event) -> float:
                assert stream.waits, "events have no time before they are reached"
                return 1e3 * (later.at - self.at)

        return Event()


def test_laps_on_a_gpu_are_read_from_its_stream_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    watch = Timer(torch.device("cuda:1"))
    for phase in ("draft", "verify", "draft"):
        watch.add(phase, watch.mark())
    assert stream.waits == 0
    assert watch.laps == {"draft": [2.0, 2.0], "verify": [2.0]}
    assert watch.laps["draft"] == [2.0, 2.0] and stream.waits == 1


def model_with(head: nn.Module, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(device=torch.device(device), dtype=dtype, get_output_embeddings=lambda: head)


def test_half_precision_gives_float32_logits_on_a_gpu() -> None:
    with FakeTensorMode():
        head = nn.Linear(8, 5, bias=False, device="meta")
        head.weight = nn.Parameter(torch.empty(5, 8, dtype=torch.bfloat16, device="cuda"), requires_grad=False)
        x = torch.empty(1, 3, 8, dtype=torch.bfloat16, device="cuda")
        for other in (model_with(head, "cpu"), model_with(head, dtype=torch.float32), model_with(nn.Identity())):
            widen(other)
            assert head(x).dtype == torch.bfloat16
        widen(model_with(head))
        logits = head(x)
        assert (logits.shape, logits.dtype, logits.device.type) == ((1, 3, 5), torch.float32, "cuda")


def test_two_tokens_that_half_precision_ties_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.matmul
    monkeypatch.setattr(torch, "mm", lambda a, b, dtype: product(a.to(dtype), b.to(dtype)))  # what CUDA sums
    head = nn.Linear(2, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[16.0, 0.0], [16.0, 0.03125]]))
        head.bias.zero_()
        x = torch.ones(1, 1, 2, dtype=torch.bfloat16)
        assert head(x).tolist() == [[[16.0, 16.0]]]
        assert wide_linear(x, head.weight, head.bias).tolist() == [[[16.0, 16.03125]]]


def test_vocabularies_that_differ_by_padding_go_together() -> None:
    target, draft = build_model(vocab_size=VOCABULARY + 16), build_model(seed=1)
    assert join(target, draft).vocabulary == VOCABULARY + 16
    draft.generation_config.eos_token_id = 5
    with pytest.raises(PairError, match="different vocabularies: 64 and 48 tokens"):
        join(target, draft)
    with pytest.raises(PairError, match="different vocabularies"):
        join(build_model(vocab_size=VOCABULARY + 512), build_model(seed=1))


@pytest.mark.parametrize("mode", ["match", "block"])
def test_broken_logits_on_a_device_end_the_run_in_one_line(mode: str) -> None:
    target = build_model(num_hidden_layers=1)
    with Accelerator(), torch.no_grad():
        pair = Pair(to_device(target), to_device(build_draft(build_model(num_hidden_layers=1))), None, VOCABULARY)
        speculator = Speculator(pair, FixedLength(2), Settings(0.7, 20, verification=mode, ignore_eos=True))
        committed: list[int] = []

        def spoil(new: list[int]) -> None:
            committed.extend(new)
            target.lm_head.weight.mul_(float("nan"))

        with pytest.raises(PairError, match="the target's logits are not finite"):
            speculator.generate([3, 4], 1, spoil)
    assert len(committed) == 1, "the first token, before the weights were spoiled"


@pytest.mark.parametrize("here", [True, False])
def test_decisions_are_timed_where_the_profile_was_measured(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    policy, asked = Confidence(0.3), []

    def measure(policy: object, vocabulary: int, temperature: float, device: torch.device, *rest: object) -> Any:
        asked.append(device)
        return Measurements()

    monkeypatch.setattr(policy, "name", "unpriced")
    monkeypatch.setattr(decisions_module, "measure_decision", measure)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * here)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: ("A100", "H100")[number])
    known = dataclasses.replace(profile, facts={"device": "H100"})
    if here:
        add_decisions(known, [policy], VOCABULARY)
    else:
        with pytest.warns(SpecstopWarning, match="the profile is of H100, which is not here"):
            add_decisions(known, [policy], VOCABULARY)
    assert asked == [torch.device("cuda:1" if here else "cpu")]
