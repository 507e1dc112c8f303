"""What `bench` times on a GPU is played, not recorded; on the CPU a tape does what CUDA graphs do."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
import specstop.decode.benchmark as bench_module
from conftest import build_draft, build_model
from specstop.decode import Settings, Speculator, model_source
from specstop.decode.benchmark import bench, run_alternating
from specstop.decode.drafters import model as drafters_module
from specstop.decode.loop import Request
from specstop.decode.models import cuda as cuda_module
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.device import Recorded
from specstop.decode.models.pair import Pair, join
from specstop.decode.records import Generation
from specstop.policies import FixedLength
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.fixed import Confidence
from tape import Graphs, recorder, simulate_graphs

NEW = 14


class Wandering(StopPolicy):
    """Drafts another length in every round."""

    name, max_depth = "wandering", 5

    def start(self, streams: int, keys: Array) -> State:
        return keys % 7

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < state[:, None] % 6), state

    def observe(self, outcome: Any, state: State) -> State:
        return state + 5


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(cuda_module, "MIN_SLOTS", 16)
    for module in (model_source, drafters_module):
        monkeypatch.setattr(module, "open_cache", functools.partial(CudaGraphModel, recorder=recorder))
    return simulate_graphs(monkeypatch)


@pytest.fixture
def models() -> Pair:
    """Models of their own: recordings are kept by model."""
    target = build_model()
    return join(target, build_draft(target))


@pytest.mark.parametrize(("tree", "batch"), [(None, 1), ("2,2,1", 1), (None, 3)])
def test_nothing_is_recorded_while_it_is_timed(
    models: Pair,
    prompt_ids: list[list[int]],
    graphs: Graphs,
    tree: str | None,
    batch: int,
) -> None:
    """Policies of varying lengths, prompts that reach further sizes of attention one after the other."""
    prompts = [[*ids] * (i + 1) for i, ids in enumerate(prompt_ids[:4])]
    settings = Settings(0.7, NEW, 5, tree=tree)
    lines = bench(models, prompts, [Wandering(), Confidence(0.2, 5), FixedLength(2)], settings=settings, batch=batch)
    assert graphs.recorded > 0
    assert [line.recordings for line in lines] == [0] * 4
    assert all(line.to_dict()["recordings"] == 0 for line in lines)


class Recording:
    """A method that records a call in each of its first runs."""

    def __init__(self, times: int) -> None:
        self.left, self.runs = times, 0

    def run(self, requests: list[Request]) -> list[Generation]:
        self.runs += 1
        if self.left:
            self.left -= 1
            Recorded.fresh += 1
        return [Generation((self.runs,), (), 1, 0.0, 1.0) for _ in requests]


def test_a_turn_that_records_is_timed_again_and_the_rest_is_counted() -> None:
    counts = Counter[int]()
    soon, late = Recording(3), Recording(50)
    texts = run_alternating([soon, late], [("a", [1]), ("b", [2])], recordings=counts)
    assert counts == {0: 0, 1: 2}
    assert [text.tokens for text in texts[0]] == [(4,), (5,)] and soon.runs == 5
    assert late.runs == 1 + 2 * bench_module.MAX_TRIES


def test_what_passes_from_text_to_text_meets_each_once(
    models: Pair, prompt_ids: list[list[int]], graphs: Graphs
) -> None:
    class Counting(Wandering):
        carries: ClassVar[bool] = True
        seen: ClassVar[list[int]] = []

        def start(self, streams: int, keys: Array) -> State:
            self.seen.clear()
            return np.zeros(streams, dtype=np.int64)

        def observe(self, outcome: Any, state: State) -> State:
            self.seen.append(1)
            return state + 5

    run = Speculator(models, Counting(), Settings(0.0, NEW, 5))
    (texts,) = run_alternating([run], [(f"p{i}", ids) for i, ids in enumerate(prompt_ids[:3])])
    assert len(Counting.seen) == sum(len(text.rounds) for text in texts)
