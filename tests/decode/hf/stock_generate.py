"""What transformers' own `generate` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from conftest import NEW
from specstop.decode.models.pair import Pair
from torch import Tensor


def inputs(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """A batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def stock(pair: Pair, prompts: Sequence[Sequence[int]], **more: Any) -> Tensor:
    return pair.target.generate(**inputs(prompts), **{"max_new_tokens": NEW, "do_sample": False, **more})
