"""The loop on a CUDA device: the same text as plain decoding there, from recorded calls."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import build_draft, build_model
from small_drafters import DRAFTERS, small_drafter
from specstop.decode import with_drafter
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.models import attention as attention_module
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cuda import CudaGraphModel, open_cache
from specstop.decode.models.device import Compiled
from specstop.decode.models.engine import CompactModel
from specstop.decode.models.pair import Pair, join, load_pair, with_engine
from specstop.decode.plain import plain_texts
from specstop.policies.fixed import Confidence, FixedLength

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MUST_RECORD = pytest.mark.filterwarnings("error::specstop.policies.errors.SpecstopWarning")
"""Calls that cannot be recorded would be slower, with the same texts."""


def cuda_pair() -> Pair:
    target = build_model()
    return join(copy.deepcopy(target).cuda(), build_draft(target).cuda())


@MUST_RECORD
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("source", ["plain", "compact", *DRAFTERS, "suffix", "lookup"])
def test_the_text_is_that_of_plain_decoding(source: str, temperature: float, prompt_ids: list[list[int]]) -> None:
    pair, is_engine, drafts = cuda_pair(), source in ("plain", "compact"), source in DRAFTERS
    pair = with_engine(pair, source) if is_engine else pair if drafts else with_drafter(pair, source)
    prompts, thresholds = prompt_ids[:4], [Confidence(0.3, 6)] if is_engine else []
    expected = [list(text) for text in plain_texts(pair, prompts, range(4), 24, temperature).tokens]
    for policy, tree, batch in itertools.product([FixedLength(3), *thresholds], (None, "2,2,1"), (1, 3)):
        settings = Settings(temperature, 24, tree=tree, verification="match")
        drafter = small_drafter(source, pair) if drafts else None
        speculator = Speculator(pair, policy, settings, batch=batch, drafter=drafter)
        requests = [Request(prompt, key) for key, prompt in enumerate(prompts)]
        assert [list(text.tokens) for text in speculator.run(requests)] == expected
        assert any(call.play for call in speculator._source.target._memory.calls.values()), "recorded"


ON_GPU = "model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"
HALF_ON_CPU = {**dict.fromkeys(ON_GPU, 0), "model.layers.1": "cpu"}


@pytest.mark.parametrize("places", ["cpu", json.dumps(HALF_ON_CPU), "auto"])
def test_a_target_placed_elsewhere_writes_the_same_texts(places: str, pair_folder: Path) -> None:
    folders = pair_folder / "target", pair_folder / "draft"
    pairs = [load_pair(*folders, device="cuda:0", dtype="float64", device_map=m) for m in (None, places)]
    assert pairs[0].fingerprint == pairs[1].fingerprint and pairs[0].device == pairs[1].device
    for key in range(3):
        settings = Settings(0.7, 24, verification="match")
        texts = [Speculator(pair, FixedLength(4), settings).generate([3, 4], key).tokens for pair in pairs]
        assert texts[0] == texts[1]


@torch.no_grad()
def test_a_pair_on_cuda_is_recorded_and_compact(pair_folder: Path) -> None:
    folders = pair_folder / "target", pair_folder / "draft"
    pair = load_pair(*folders, device="cuda", dtype="float32")
    plain = load_pair(*folders, device="cuda:0", dtype="float32", engine="plain")
    assert pair.engines == ("compact", "compact") and plain.engines == ("plain", "plain") and pair.device.index == 0
    tokens = torch.randint(1, pair.vocabulary, (1, 60), generator=torch.Generator().manual_seed(1)).cuda()
    caches = [open_cache(one.target, 60, pair.vocabulary) for one in (pair, plain)]
    for first, end in ((0, 40), *((at, at + 1) for at in range(40, 46)), *((at, at + 3) for at in range(46, 58, 3))):
        ours, expected = (cache.read(tokens[:, first:end]) for cache in caches)
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
    for cache in caches:
        assert isinstance(cache, CudaGraphModel) and any(call.play for call in cache._memory.calls.values())
    assert Compiled.works


@MUST_RECORD
@torch.no_grad()
def test_attention_in_parts_in_half_precision_is_near_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past 2,048 slots, compact and recorded, compared with the library's modules in float32."""
    model = build_model(head_dim=8, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2600).float()
    reference = CachedModel(copy.deepcopy(model), 2600, 48)
    half = CudaGraphModel(CompactModel(model.cuda().half()), 2600, 48)  # type: ignore[arg-type]
    divided, attend = list[int](), attention_module.divided_attention
    monkeypatch.setattr(attention_module, "divided_attention", lambda *args: divided.append(1) or attend(*args))
    tokens = torch.randint(1, 48, (1, 2560), generator=torch.Generator().manual_seed(2))
    errors, logits = [], []
    steps = [(at, at + 1) for at in range(2500, 2506)] + [(at, at + 4) for at in range(2506, 2530, 4)]
    for first, end in [(0, 2500), *steps]:
        expected, rows = reference.read(tokens[:, first:end]), half.read(tokens[:, first:end].cuda()).cpu()
        errors.append((expected - rows)[0, -4:])
        logits.append(expected[0, -4:])
    # Half precision rounds to one part in 2,048, which two layers of such large weights amplify to 2%.
    assert float(torch.cat(errors).norm()) < 0.06 * float(torch.cat(logits).norm())
    assert divided and any(call.play for call in half._memory.calls.values())
