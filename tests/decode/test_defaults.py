"""The loop makes its own tensors where and of which kind it needs them, whatever torch's defaults are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.policies.registry import load_policy

MATCH = ("fixed:3", "confidence:0.4", "roc:0.4", "bandit", "online", "eagle:8", "opt:0.5", "gain:0.1", "c2t:2")
RUNS = [(spec, tree, "match") for spec in MATCH for tree in (None, "3,2,1")] + [("entropy:1", "2,2", "rejection")]


def rounds(pair: Pair, prompt: list[int]) -> list[object]:
    """Return text and rounds of all runs."""
    found: list[object] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec, tree, mode in RUNS:
            settings = Settings(0.7, 10, 4, tree=tree, verification=mode)
            done = Speculator(pair, load_policy(spec), settings).generate(prompt, 7)
            found.append((spec, tree, done.tokens, [(r.drafted, r.verified, r.accepted) for r in done.rounds]))
    return found


@pytest.fixture
def restored() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("default", ["device", "dtype"])
@pytest.mark.usefixtures("restored")
def test_chains_and_trees_do_not_depend_on_torchs_defaults(
    pair: Pair, prompt_ids: list[list[int]], default: str
) -> None:
    expected = rounds(pair, prompt_ids[3])
    if default == "device":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(torch.float16)
    assert rounds(pair, prompt_ids[3]) == expected
