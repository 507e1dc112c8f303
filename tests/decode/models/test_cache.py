"""The preallocated cache: reading in pieces, with roll-backs, gives the logits of one full forward."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCABULARY
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair

NEAR = {"sdpa": 1e-10, "eager": 1e-4}  # eager attention takes its softmax in float32 whatever the dtype


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, pair: Pair, eager_pair: Pair) -> torch.nn.Module:
    return (pair if request.param == "sdpa" else eager_pair).target


def near(model: torch.nn.Module) -> float:
    return NEAR[model.config._attn_implementation]


@torch.no_grad()
def full(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_reading_in_pieces_with_roll_backs_equals_one_forward(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cached = CachedModel(model, 40, VOCABULARY)
    text = torch.zeros(1, 0, dtype=torch.int64)
    for step in range(12):
        new = tokens(1, 1 + int(torch.randint(0, 5, (), generator=generator)), seed=100 * seed + step)
        text = torch.cat([text, new], 1)
        logits = cached.read(new)
        assert cached.length == text.shape[1]
        torch.testing.assert_close(logits, full(model, text)[:, -new.shape[1] :], atol=near(model), rtol=0)
        keep = text.shape[1] - int(torch.randint(0, 4, (), generator=generator))
        cached.roll_back(max(0, min(keep, 30)))
        text = text[:, : cached.length]


@torch.no_grad()
def test_rows_asks_for_the_last_rows_only(model: torch.nn.Module) -> None:
    text = tokens(1, 9)
    logits = CachedModel(model, 20, VOCABULARY).read(text, rows=3)
    torch.testing.assert_close(logits, full(model, text)[:, -3:], atol=near(model), rtol=0)


@torch.no_grad()
def test_a_mask_hides_what_it_says_under_each_backend(model: torch.nn.Module) -> None:
    """Two branches after one prefix, read in one call, are what each is alone."""
    prefix, branches = tokens(1, 6), tokens(1, 2, seed=1)
    cached = CachedModel(model, 20, VOCABULARY)
    cached.read(prefix)
    mask = torch.cat([torch.ones(2, 6), torch.eye(2)], 1).bool()[None, None]
    both = cached.read(branches, 0, mask, torch.tensor([[6, 6]]))
    for i in range(2):
        alone = full(model, torch.cat([prefix, branches[:, i : i + 1]], 1))[:, -1]
        torch.testing.assert_close(both[:, i], alone, atol=near(model), rtol=0)


@torch.no_grad()
def test_the_backend_needs_the_form_it_gets(eager_pair: Pair) -> None:
    """A boolean mask is added as 0 and 1 under eager attention, and hides nothing; `read` takes either form."""
    text, model = tokens(1, 6), eager_pair.target
    causal = torch.ones(6, 6).tril().bool()[None, None]
    right = CachedModel(model, 6, VOCABULARY).read(text, 0, causal)
    wrong = model(text, attention_mask=causal).logits
    torch.testing.assert_close(right, full(model, text), atol=near(model), rtol=0)
    torch.testing.assert_close(CachedModel(model, 6, VOCABULARY).read(text, 0, causal), right, atol=0, rtol=0)
    assert (wrong - right).abs().max() > 0.1


@torch.no_grad()
def test_buffers_are_allocated_once(pair: Pair) -> None:
    cached = CachedModel(pair.target, 12, VOCABULARY)
    cached.read(tokens(1, 4))
    places = [layer.keys.data_ptr() for layer in cached._layers]
    for _ in range(3):
        cached.read(tokens(1, 4))
        cached.roll_back(4)
    assert [layer.keys.data_ptr() for layer in cached._layers] == places


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_float32_or_float64_and_as_wide_as_asked(pair: Pair, dtype: torch.dtype) -> None:
    import copy

    logits = CachedModel(copy.deepcopy(pair.target).to(dtype), 8, 30).read(tokens(1, 3))
    assert logits.shape == (1, 3, 30)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
