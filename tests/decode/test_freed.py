"""What a loop holds is freed with it, at once: its caches do not wait for Python to look for cycles."""

from __future__ import annotations

import gc
import weakref

import pytest
from specstop.decode.hooks import Hook
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.policies.contract import StopPolicy
from specstop.policies.fixed import Confidence, FixedLength


@pytest.mark.parametrize("hook", [None, Hook()])
@pytest.mark.parametrize(
    ("policy", "tree"), [(FixedLength(3), None), (Confidence(0.4, 4), None), (FixedLength(2), "2,1")]
)
def test_a_loop_frees_its_caches(
    pair: Pair, prompt_ids: list[list[int]], policy: StopPolicy, tree: str | None, hook: Hook | None
) -> None:
    loop = Speculator(
        pair, policy, Settings(0.7, 12, tree=tree, verification="match"), hooks=[] if hook is None else [hook]
    )
    loop.generate(prompt_ids[0], 1)
    held = [weakref.ref(part) for part in (loop, loop._source, loop._source.target, loop._drafter)]
    gc.disable()
    try:
        del loop
        assert [part() for part in held] == [None] * len(held)
    finally:
        gc.enable()
