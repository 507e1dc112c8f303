"""Attention to a long text in parts: what attention to all of it gives, on the CPU and on a device."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCABULARY, build_model
from specstop.decode.models import attention as attention_module
from specstop.decode.models.attention import Part, divided_attention, grouped_attention
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.engine import CompactModel
from tape import recorder, simulate_graphs
from torch.nn import functional

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("queries", "seen"), [(1, 4096), (1, 700), (3, 4000), (9, 5)])
def test_parts_add_up_to_the_whole(queries: int, seen: int, device: str) -> None:
    """Parts of which nothing is seen add nothing."""
    generator, dtype = torch.Generator().manual_seed(3), torch.float32
    query, key, value = (
        torch.randn(1, heads, count, 32, generator=generator).to(device)
        for heads, count in ((2, queries), (2, 4096), (2, 4096))
    )
    mask = torch.full((1, 1, queries, 4096), torch.finfo(dtype).min / 2)
    for row in range(queries):
        mask[..., row, : max(seen - row, 1)] = 0.0
    mask = mask.to(device)
    whole = functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask.double())
    parts = divided_attention(query, key, value, mask, None)
    torch.testing.assert_close(parts, whole.to(dtype), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_a_recorded_compact_model_attends_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where queries that share a head are grouped."""
    divided: list[int] = []

    def noted(query: torch.Tensor, key: torch.Tensor, *rest: object) -> torch.Tensor:
        divided.append(key.shape[2])
        return divided_attention(query, key, *rest)  # type: ignore[arg-type]

    graphs = simulate_graphs(monkeypatch)
    monkeypatch.setattr(attention_module, "is_divided", lambda query, key, mask: key.shape[2] >= 512)
    monkeypatch.setattr(attention_module, "divided_attention", noted)
    longest = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 700}
    model = build_model(**longest).float()
    compact = CompactModel(model)
    compact._grouped = True
    reference, recorded = (
        CachedModel(model, 640, VOCABULARY),
        CudaGraphModel(compact, 640, VOCABULARY, recorder=recorder),  # type: ignore[arg-type]
    )
    tokens = torch.randint(1, VOCABULARY, (1, 640), generator=torch.Generator().manual_seed(1))
    steps = [(at, at + 2) for at in range(300, 310, 2)], [(at, at + 3) for at in range(500, 530, 3)]
    reads = [(0, 300), *steps[0], (310, 500), *steps[1]]
    for first, end in reads:
        expected, found = (cache.read_parts([Part(0, tokens[0, first:end])]) for cache in (reference, recorded))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert set(divided) == {512, 768} and graphs.recorded >= 2
    divided.clear()
    states = torch.ones(1, 2, 512, 8)
    assert grouped_attention(compact, torch.ones(1, 4, 1, 8), states, states, None)[0].shape == (1, 1, 4, 8)
    assert not divided, "where all is seen"
