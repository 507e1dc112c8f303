"""The loop on a CUDA device: the same text as plain decoding there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import build_draft, build_model
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import join, load_pair
from specstop.decode.plain import plain_texts
from specstop.policies.baselines.fixed import Confidence, FixedLength
from specstop.policies.contract import StopPolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("policy", [FixedLength(4), Confidence(0.3, 6)], ids=lambda p: p.name)
def test_text_on_cuda_is_that_of_plain_decoding(
    policy: StopPolicy, temperature: float, prompt_ids: list[list[int]]
) -> None:
    target = build_model()
    pair = join(target.cuda(), build_draft(target).cuda())
    for key, prompt in enumerate(prompt_ids[:4]):
        generation = Speculator(pair, policy, Settings(temperature, 24)).generate(prompt, key)
        assert list(generation.tokens) == plain_texts(pair, [prompt], [key], 24, temperature).tokens[0]


@pytest.mark.parametrize("places", ["cpu", '{"model.layers.1": "cpu", "": "cuda:0"}', "auto"])
def test_a_target_placed_elsewhere_writes_the_same_texts(places: str, pair_folder: Path) -> None:
    pytest.importorskip("accelerate")
    folders = pair_folder / "target", pair_folder / "draft"
    pair, placed = (load_pair(*folders, device="cuda:0", dtype="float64", device_map=m) for m in (None, places))
    assert placed.fingerprint == pair.fingerprint and placed.device == pair.device
    for key in range(3):
        here, there = (Speculator(p, FixedLength(4), Settings(0.7, 24)).generate([3, 4], key) for p in (pair, placed))
        assert here.tokens == there.tokens
