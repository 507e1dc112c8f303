"""Summaries of rows on a device, CUDA graphs outside timed runs of `bench`, and ties caused by rounding."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import random_models as table
import torch
from conftest import build_draft, build_model
from head_tensors import random_policy
from specstop.decode import Settings, Speculator, device_policies, model_source, summaries
from specstop.decode.benchmark import bench, count_differences
from specstop.decode.drafters import model as model_drafter
from specstop.decode.hooks import Hook
from specstop.decode.loop import Request
from specstop.decode.models import cuda
from specstop.decode.models.cuda import CudaGraphModel
from specstop.decode.models.device import Copy
from specstop.decode.models.pair import join
from specstop.decode.records import Generation
from specstop.decode.summaries import columns_on_device, launch, summarise_on_device
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.features import CHAIN_FEATURES, SIBLING_FEATURES, Columns, DrawnTokens, summarise
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.rules import Derived
from tape import recorder, simulate_graphs

NEW = 10


# Summaries of rows


@pytest.fixture
def graphs(monkeypatch):
    """Simulate CUDA graphs for models and summaries."""
    simulated = simulate_graphs(monkeypatch)
    monkeypatch.setattr(cuda, "MIN_SLOTS", 16)
    for module in (model_source, model_drafter):
        monkeypatch.setattr(module, "open_cache", functools.partial(CudaGraphModel, recorder=recorder))
    monkeypatch.setattr(summaries, "recorder", recorder)
    summaries.recorded_statistics.cache_clear()
    yield simulated
    summaries.recorded_statistics.cache_clear()


def compare_summaries(width: int, temperature: float, processed: bool, device: str) -> None:
    """Compare summaries of changing numbers of rows with those of the host's kernel."""
    generator = torch.Generator().manual_seed(2)
    for count in (1, 3, 1, 2, 4, 3, 1):
        logits, scores, sampled = 3 * torch.randn(3, count, width, generator=generator)
        logits[:, ::2] = logits[:, ::2].round()  # many are equal
        of = sorted(torch.randint(count, (count + 1,), generator=generator).tolist())
        ids = torch.randint(width, (count + 1,), generator=generator).tolist()
        rows = [(row, token, 0, 0, 2, 1) for row, token in zip(of, ids, strict=True)]
        drawn = DrawnTokens.of(rows, np.zeros(count + 1))
        columns = Columns(("top1", "top10", "entropy", "drawn_prob", "path_logprob", "noisy_margin"))
        weights = sampled if processed else None
        host = summarise(
            columns.needs, logits.numpy(), drawn, temperature, sampled.numpy() if processed else None, scores.numpy()
        )
        on = [None if part is None else part.to(device) for part in (logits, weights, scores)]
        assert on[0] is not None
        there = summarise_on_device(columns.needs, on[0], drawn, temperature, *on[1:])
        expected, actual = (columns(one, drawn, temperature) for one in (host, there))
        np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("temperature", "processed"), [(0.0, False), (0.7, False), (0.7, True)])
@pytest.mark.parametrize("width", [48, summaries.LONG_ROW, summaries.LONG_ROW + 700])
def test_recorded_summaries_are_those_of_the_host(width, temperature, processed, graphs):
    compare_summaries(width, temperature, processed, "cpu")
    assert 0 < graphs.recorded <= 4 < graphs.played + graphs.recorded, "3 rows are read as 4"


def test_vocabularies_of_one_padded_width_have_recordings_of_their_own(graphs):
    for width in (summaries.LONG_ROW + 1024, summaries.LONG_ROW + 700):
        compare_summaries(width, 0.7, True, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("width", [48, 128256])
def test_summaries_on_a_gpu_are_those_of_the_host(width):
    summaries.recorded_statistics.cache_clear()
    for temperature, processed in ((0.0, False), (0.7, False), (0.7, True)):
        compare_summaries(width, temperature, processed, "cuda")
    assert summaries.recorder(torch.device("cuda:0")).works, "no recording failed"
    assert summaries.recorded_statistics.cache_info().hits, "a shape is recorded when it comes for the second time"


def test_columns_of_chains_are_those_of_the_host():
    generator = torch.Generator().manual_seed(2)
    columns = Columns((*CHAIN_FEATURES, *SIBLING_FEATURES, "drawn_token", "above_token"))
    logits, scores, sampled = 3 * torch.randn(3, 5, 48, generator=generator)
    tokens, paths = scores.argmax(-1), torch.rand(5, generator=generator).log().double()
    lead = torch.tensor([torch.inf, 0.1, -2.0, 1e9, 0.5]).double()
    rows = [(row, token, row + 7, 0, 1, 3) for row, token in enumerate(tokens.tolist())]
    drawn = DrawnTokens.of(rows, paths.numpy())
    drawn.lead = lead.numpy()
    summary = summarise(columns.needs, logits.numpy(), drawn, 0.7, sampled.numpy(), scores.numpy())
    at = torch.stack([torch.arange(5), tokens], 1)
    launched = launch(columns.needs, logits, at, 1, 0.7, sampled, scores)
    parts, parents = launched.parts(launched.values), torch.arange(7.0, 12.0)
    path = parts[3][:, 0] + paths
    actual = columns_on_device(columns.codes[:, 0].tolist(), parts, tokens.double(), parents, 3, path, lead)
    np.testing.assert_allclose(actual, columns(summary, drawn, 0.7), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("batch", "works"), [(1, True), (2, True), (1, False)])
def test_draft_steps_after_a_stop_are_skipped(batch, works, prompt_ids, graphs, monkeypatch):
    """Recorded calls, which the host launches before it knows that the device has stopped; without such graphs it decides."""
    monkeypatch.setattr(device_policies, "recorder", functools.cache(recorder))
    monkeypatch.setattr(Copy, "has_arrived", lambda copy: False)
    if not works:
        monkeypatch.setattr(graphs.graph_class, "begin_capture_to_if_node", Mock(side_effect=RuntimeError))
    target, policy = build_model(), random_policy("logistic", Derived([0.0, 0.2, 0.3, 0.3]), 4)
    pair, requests = join(target, build_draft(target)), [Request(ids, 1) for ids in prompt_ids[:3]]
    texts = []
    for hooks in (
        [type("Observer", (Hook,), {"on_draft_step": Mock()})()],
        [],
    ):  # the host decides if steps are observed
        speculator = Speculator(pair, policy, Settings(0.7, 20, verification="match"), batch=batch, hooks=hooks)
        speculator.run(requests)
        assert not (hooks and graphs.skipped)
        texts.append([(text.tokens, [round[:9] for round in text.rounds]) for text in speculator.run(requests)])
    assert texts[0] == texts[1] and (graphs.skipped > 1) == works


# `bench`


class Wandering(StopPolicy):
    """Drafts another length in every round."""

    name, max_depth = "wandering", 5

    def start(self, streams: int, keys: Array) -> State:
        return keys % 7

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < state[:, None] % 6), state

    def observe(self, outcome: Any, state: State) -> State:
        return state + 5


@pytest.mark.parametrize(("tree", "batch"), [("2,2,1", 1), (None, 3)])
def test_nothing_is_recorded_while_it_is_timed(prompt_ids, graphs, tree, batch):
    """Policies of varying lengths; prompts that reach further sizes of attention one after the other."""
    target = build_model()
    prompts = [[*ids] * (i + 1) for i, ids in enumerate(prompt_ids[:3])]
    policies, settings = [Wandering(), Confidence(0.2, 5), FixedLength(2)], Settings(0.7, NEW, 5, tree=tree)
    lines = bench(join(target, build_draft(target)), prompts, policies, settings=settings, batch=batch)
    assert graphs.recorded > 0
    assert [line.recordings for line in lines] == [0] * 4


def test_only_nearly_equal_scores_are_a_tie():
    settings, prompts = Settings(0.0, 8), table.prompts(2)
    target = table.build("llama", torch.float32)
    pair = join(target, target)

    def texts(change: Any = lambda token: token) -> list[Generation]:
        plain = [Speculator(pair, FixedLength(0), settings).generate(prompt) for prompt in prompts]
        return [dataclasses.replace(g, tokens=(*g.tokens[:3], change(g.tokens[3]), *g.tokens[4:])) for g in plain]

    changed = [texts()[0], texts(lambda token: (token + 1) % table.VOCABULARY)[1]]
    assert count_differences(pair, settings, prompts, texts(), texts()) == (0, 0)
    assert count_differences(pair, settings, prompts, changed, texts()) == (0, 1)
    with torch.no_grad():  # every token has a twin with the same score
        target.lm_head.weight[1::2] = target.lm_head.weight[::2]
    assert count_differences(pair, settings, prompts, texts(lambda token: token ^ 1), texts()) == (2, 0)
    half = table.build("llama", torch.bfloat16)
    lines = bench(join(half, table.noisy(half)), prompts, [FixedLength(3)], settings=settings)
    assert all(line.wrong == 0 and line.same_text + line.ties == len(prompts) for line in lines)
