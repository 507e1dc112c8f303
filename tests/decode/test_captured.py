"""Fixed shapes: the same logits and texts as with a growing cache, step by step on the CPU and recorded on CUDA."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCABULARY, build_draft, build_model
from specstop.decode import Settings, Speculator, parse_tree
from specstop.decode import loop as loop_module
from specstop.decode.cache import CachedModel
from specstop.decode.captured import CapturedModel, open_cache
from specstop.decode.pair import Pair, join
from specstop.policies import FixedLength

TREE = parse_tree("2,2,1")


def readings(cache: CachedModel, device: str = "cpu") -> list[torch.Tensor]:
    """Return logits of a prompt, single tokens, several, trees, and what follows a compaction; each size three times."""
    generator, out = torch.Generator().manual_seed(4), []

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (1, count), generator=generator).to(device)

    out.append(cache.read(tokens(70), 1))
    for _ in range(4):
        out += [cache.read(tokens(1), 1), cache.read(tokens(3))]
        base = cache.length
        row = tokens(len(TREE))[0].tolist()
        out.append(cache.read_tree(row[:3], base, TREE, [], [0, 1, 2]))
        out.append(cache.read_tree([row[4]], base, TREE, [0, 1, 2], [4]))
        cache.keep(base, [base, base + 2])
    return out


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fixed_shapes_give_the_same_logits(pair: Pair, eager_pair: Pair, attention: str) -> None:
    model = (pair if attention == "sdpa" else eager_pair).target
    for hidden in (False, True):
        grown = CachedModel(model, 120, VOCABULARY, hidden)
        fixed = CapturedModel(model, 120, VOCABULARY, hidden)
        near = 1e-10 if attention == "sdpa" else 1e-4  # eager attention takes its softmax in float32
        for a, b in zip(readings(grown), readings(fixed), strict=True):
            torch.testing.assert_close(b, a, atol=near, rtol=near)
        assert (grown.states is None) == (fixed.states is None) == (not hidden)


def test_buffers_are_made_once_for_each_number_of_tokens(pair: Pair) -> None:
    cache = CapturedModel(pair.target, 120, VOCABULARY)
    with torch.no_grad():
        readings(cache)
        calls = dict(cache._calls)
        cache.roll_back(0)
        readings(cache)
    assert cache._calls == calls and {count for count, _ in calls} == {1, 3}


def test_texts_with_fixed_shapes_are_the_same(
    pair: Pair, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for tree in (None, "2,2,1"):
        settings = Settings(0.7, 20, tree=tree)
        texts = [Speculator(pair, FixedLength(3), settings).generate(ids, 5).tokens for ids in prompt_ids]
        with monkeypatch.context() as patch:
            patch.setattr(loop_module, "open_cache", CapturedModel)
            fixed = [Speculator(pair, FixedLength(3), settings).generate(ids, 5).tokens for ids in prompt_ids]
        assert fixed == texts


def test_the_cpu_takes_the_growing_cache(pair: Pair) -> None:
    assert type(open_cache(pair.target, 8, VOCABULARY)) is CachedModel


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_recorded_calls_give_the_same_logits() -> None:
    target = build_model()
    model = join(target.cuda(), build_draft(target).cuda()).target
    grown, fixed = CachedModel(model, 120, VOCABULARY), open_cache(model, 120, VOCABULARY)
    assert isinstance(fixed, CapturedModel)
    for a, b in zip(readings(grown, "cuda"), readings(fixed, "cuda"), strict=True):
        torch.testing.assert_close(b, a, atol=1e-9, rtol=1e-9)
