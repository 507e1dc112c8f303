"""What the host waits for where the models lie on a device, counted on a simulated one; texts are those of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerator import DEVICE, Accelerator, to_device
from conftest import EOS, VOCABULARY, build_draft, build_model
from small_drafters import small_drafter
from specstop.decode import Settings, Speculator, plain_texts
from specstop.decode.loop import Request
from specstop.decode.models.device import download, upload
from specstop.decode.models.pair import Pair
from specstop.policies import FixedLength

MODES = ("match", "rejection", "rejection_replace", "block", "typical")
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def pairs() -> tuple[Pair, Pair]:
    """The pair on the host and on the device."""
    target = build_model(num_hidden_layers=1)
    draft = build_draft(target)
    here = Pair(target, draft, None, VOCABULARY, (EOS,))
    with Accelerator(), torch.no_grad():
        there = [to_device(copy.deepcopy(model)) for model in (target, draft)]
        return here, Pair(there[0], there[1], None, VOCABULARY, (EOS,))


@pytest.mark.parametrize(("mode", "temperature"), [("match", 0.0), *((mode, 0.7) for mode in MODES)])
def test_a_chain_waits_once_a_token_and_twice_a_round(pairs: tuple[Pair, Pair], temperature: float, mode: str) -> None:
    settings = Settings(temperature, 12, ignore_eos=True, verification=mode)
    expected = Speculator(pairs[0], FixedLength(4), settings).generate(PROMPT, 7)
    with Accelerator() as device:
        speculator = Speculator(pairs[1], FixedLength(4), settings)
        speculator.generate(PROMPT, 2)
        device.count.clear()
        generation = speculator.generate(PROMPT, 7)
    assert generation.tokens == expected.tokens
    rounds, drafted = len(generation.rounds), sum(r.drafted for r in generation.rounds)
    assert drafted >= 2 * rounds
    assert device.count["reads"] <= 3 + drafted + 2 * rounds
    assert device.count["uploads"] <= 1, "the stream's key"


@pytest.mark.parametrize("mode", ["match", "rejection", "typical"])
def test_trees_give_the_same_text_there(pairs: tuple[Pair, Pair], mode: str) -> None:
    settings = Settings(0.7, 10, ignore_eos=True, verification=mode, tree="2,2,1")
    expected = Speculator(pairs[0], FixedLength(3), settings).generate(PROMPT, 7)
    with Accelerator() as device:
        generation = Speculator(pairs[1], FixedLength(3), settings).generate(PROMPT, 7)
    assert generation.tokens == expected.tokens
    if mode != "rejection":  # which tries one candidate after the other
        assert device.count["reads"] <= 3 + (3 + 2) * len(generation.rounds), "once a level, twice a round"


@pytest.mark.parametrize(
    ("kind", "tree", "batch"),
    [  # each kind, and the layer, which alone has a cache of what it proposed, on both; one CTC-drafter on either
        *((kind, None, 1) for kind in ("hydra", "ctc", "layer")),
        *((kind, "2,2,1", 2) for kind in ("medusa", "ctc-released", "layer")),
    ],
)
def test_heads_draft_there_too(pairs: tuple[Pair, Pair], kind: str, tree: str | None, batch: int) -> None:
    settings, requests = Settings(0.7, 8, tree=tree, verification="match"), [Request(PROMPT, 7), Request([7], 2)]
    here = Speculator(pairs[0], FixedLength(3), settings, batch=batch, drafter=small_drafter(kind, pairs[0]))
    expected = [text.tokens for text in here.run(requests)]
    with Accelerator(), torch.no_grad():
        drafter = small_drafter(kind, pairs[1], place=to_device)
        there = Speculator(pairs[1], FixedLength(3), settings, batch=batch, drafter=drafter)
        assert [text.tokens for text in there.run(requests)] == expected


def test_plain_decoding_of_a_batch_looks_up_now_and_then(pairs: tuple[Pair, Pair]) -> None:
    prompts, keys = [PROMPT, [7]], [1, 2]
    expected = plain_texts(pairs[0], prompts, keys, 24, 0.7)
    with Accelerator() as device:
        texts = plain_texts(pairs[1], prompts, keys, 24, 0.7)
    assert texts.tokens == expected.tokens
    assert device.count["reads"] <= 3 + max(map(len, texts.tokens)) // 8


def test_numbers_cross_over_and_come_back_as_they_were() -> None:
    with Accelerator() as device:
        tokens, scores = upload([[2**31 + 1, 5]], DEVICE), upload([0.1, -3.5e30], DEVICE)
        assert download(tokens, scores) == [[[2**31 + 1, 5]], torch.tensor([0.1, -3.5e30]).tolist()]
    assert device.count == {"sent": 2, "reads": 1, "launches": 3}
    assert download(torch.tensor([1, 2]), torch.tensor([[0.5]])) == [[1, 2], [[0.5]]]


def test_the_simulated_device_tells_host_and_device_apart() -> None:
    with Accelerator() as device:
        there = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="on the device and on the host"):
            there + torch.ones(3)
        assert bool((there + 1.0 == 2.0).all()) and there.tolist() == [1.0, 1.0, 1.0]
    assert device.count["reads"] == 2
