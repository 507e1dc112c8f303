"""The loop on a CUDA device: the same text as plain decoding there."""

from __future__ import annotations

import copy
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
from specstop.policies.contract import StopPolicy
from specstop.policies.fixed import Confidence, FixedLength

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MUST_RECORD = pytest.mark.filterwarnings("error::specstop.policies.errors.SpecstopWarning")
"""Calls that cannot be recorded would run as they are, with the same texts."""


def pair_there() -> Pair:
    target = build_model()
    draft = build_draft(target)
    return join(target.cuda(), draft.cuda())


@MUST_RECORD
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("policy", [FixedLength(4), Confidence(0.3, 6)], ids=lambda p: p.name)
@pytest.mark.parametrize("engine", ["plain", "compact"])
def test_text_on_cuda_is_that_of_plain_decoding(
    policy: StopPolicy, temperature: float, engine: str, prompt_ids: list[list[int]]
) -> None:
    pair = with_engine(pair_there(), engine)
    prompts = prompt_ids[:4]
    expected = [list(text) for text in plain_texts(pair, prompts, range(4), 24, temperature).tokens]
    for tree in (None, "2,2,1"):
        speculator = Speculator(pair, policy, Settings(temperature, 24, tree=tree, verification="match"))
        assert [list(speculator.generate(prompt, key).tokens) for key, prompt in enumerate(prompts)] == expected
        beside = Speculator(pair, policy, Settings(temperature, 24, tree=tree, verification="match"), batch=3)
        requests = [Request(prompt, key) for key, prompt in enumerate(prompts)]
        assert [list(text.tokens) for text in beside.run(requests)] == expected
        assert any(call.play for call in beside._source.target._memory.calls.values()), "recorded"


@MUST_RECORD
@pytest.mark.parametrize("kind", [*DRAFTERS, "suffix", "lookup"])
def test_drafters_on_cuda_leave_the_text_alone(kind: str, prompt_ids: list[list[int]]) -> None:
    pair = pair_there()
    expected = [list(text) for text in plain_texts(pair, prompt_ids[:4], range(4), 24, 0.7).tokens]
    for tree, batch in ((None, 1), ("2,2,1", 1), (None, 3), ("2,2,1", 3)):
        own = with_drafter(pair, kind) if kind in ("suffix", "lookup") else pair
        drafter = None if own is not pair else small_drafter(kind, pair)
        speculator = Speculator(
            own, FixedLength(3), Settings(0.7, 24, tree=tree, verification="match"), batch=batch, drafter=drafter
        )
        requests = [Request(prompt, key) for key, prompt in enumerate(prompt_ids[:4])]
        assert [list(text.tokens) for text in speculator.run(requests)] == expected


ON_GPU = "model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"
HALF_ON_CPU = {**dict.fromkeys(ON_GPU, 0), "model.layers.1": "cpu"}


@pytest.mark.parametrize("places", ["cpu", json.dumps(HALF_ON_CPU), "auto"])
def test_a_target_placed_elsewhere_writes_the_same_texts(places: str, pair_folder: Path) -> None:
    pytest.importorskip("accelerate")
    folders = pair_folder / "target", pair_folder / "draft"
    pair, placed = (load_pair(*folders, device="cuda:0", dtype="float64", device_map=m) for m in (None, places))
    assert placed.fingerprint == pair.fingerprint and placed.device == pair.device
    for key in range(3):
        here, there = (
            Speculator(p, FixedLength(4), Settings(0.7, 24, verification="match")).generate([3, 4], key)
            for p in (pair, placed)
        )
        assert here.tokens == there.tokens


@torch.no_grad()
def test_a_pair_on_cuda_is_recorded_and_compact(pair_folder: Path) -> None:
    pair = load_pair(pair_folder / "target", pair_folder / "draft", device="cuda", dtype="float32")
    plain = load_pair(pair_folder / "target", pair_folder / "draft", device="cuda:0", dtype="float32", engine="plain")
    assert pair.engines == ("compact", "compact") and plain.engines == ("plain", "plain") and pair.device.index == 0
    tokens = torch.randint(1, pair.vocabulary, (1, 60), generator=torch.Generator().manual_seed(1)).cuda()
    caches = [open_cache(one.target, 60, pair.vocabulary) for one in (pair, plain)]
    for first, end in ((0, 40), *((at, at + 1) for at in range(40, 46)), *((at, at + 3) for at in range(46, 58, 3))):
        ours, theirs = (cache.read(tokens[:, first:end]) for cache in caches)
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    for cache in caches:
        assert isinstance(cache, CudaGraphModel) and cache._memory.recorder.works
        assert any(call.play for call in cache._memory.calls.values()), "recorded, and played"
    assert Compiled.works


@MUST_RECORD
@torch.no_grad()
def test_half_precision_in_parts_is_near_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past 2,048 slots, compact and recorded, beside the library's modules in float32."""
    model = build_model(head_dim=8, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2600).float()
    expected = CachedModel(copy.deepcopy(model), 2600, 48)
    compact = CompactModel(model.cuda().half())
    found = CudaGraphModel(compact, 2600, 48)  # type: ignore[arg-type]
    divided, whole = [], attention_module.divided_attention
    monkeypatch.setattr(attention_module, "divided_attention", lambda *args: divided.append(1) or whole(*args))
    tokens = torch.randint(1, 48, (1, 2560), generator=torch.Generator().manual_seed(2))
    off, all_of = [], []
    for first, end in (
        (0, 2500),
        *((at, at + 1) for at in range(2500, 2506)),
        *((at, at + 4) for at in range(2506, 2530, 4)),
    ):
        theirs, ours = expected.read(tokens[:, first:end]), found.read(tokens[:, first:end].cuda()).cpu()
        off.append((theirs - ours)[0, -4:])
        all_of.append(theirs[0, -4:])
    # Half precision rounds to one part in 2,048, which two layers of weights as wild as these make 2% of.
    assert float(torch.cat(off).norm()) < 0.06 * float(torch.cat(all_of).norm())
    assert divided and any(call.play for call in found._memory.calls.values())
