"""Rows of an engine's rounds: features and labels are those of the finished texts, none is lost or twice."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from simulated_engine import Engine, Request
from specstop.collect.engines.through_vllm import RoundRecorder, engine_features
from specstop.collect.exploring import exploring
from specstop.collect.live import LiveCollector
from specstop.collect.schema import PromptTask
from specstop.decode.drafters import find_drafter
from specstop.decode.engines.drafting import Drafting, Options
from specstop.decode.engines.vllm import Proposer
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.policies.registry import load_policy

K, NEW = 4, 20


@pytest.fixture(scope="module")
def requests(endless_pair: Pair) -> list[Request]:
    chance = np.random.default_rng(4)
    prompts = [[int(t) for t in chance.integers(17, 48, n)] for n in chance.integers(2, 9, 8)]
    texts = plain_texts(endless_pair, prompts, [0] * len(prompts), NEW, 0.0).tokens
    return [Request(f"r{i}", p, list(t)) for i, (p, t) in enumerate(zip(prompts, texts, strict=True))]


def serve(
    pair: Pair, requests: list[Request], policy: str, explore: float = 0.0, gentle: bool = False, seed: int = 0
) -> tuple[RoundRecorder, Engine]:  # fmt: skip
    """Run requests in a simulated engine; return the recorder of its drafts and the engine."""
    chosen = load_policy(policy)
    chosen = exploring(chosen, explore, K) if explore else chosen
    proposer = cast(Proposer, SimpleNamespace(drafting=None))
    options = Options(3, K, 128, pair.vocabulary)
    recorder = RoundRecorder(proposer, options)
    proposer.drafting = drafting = Drafting(find_drafter("model", pair), chosen, options, observer=recorder)
    engine = Engine([Request(r.name, r.prompt, r.answer) for r in requests], 3, seed, gentle=gentle)

    def propose(sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        at = [i for i, new in enumerate(sampled) if new]
        drafts = drafting.propose([tokens[i, : lengths[i]] for i in at], [engine.names[i] for i in at])
        out: list[list[int]] = [[] for _ in sampled]
        for i, draft in zip(at, drafts, strict=True):
            out[i] = draft
        return out

    engine.run(propose)
    return recorder, engine


def finished_rows(recorder: RoundRecorder, engine: Engine) -> dict[str, Mapping[str, Any]]:
    """Return the rows of each finished request."""
    texts, rows = recorder.take(), {}
    for at, request in enumerate(engine.finished):
        parts = [text for text in texts if text.name == request.name]
        columns = recorder.rows(parts, PromptTask(at, request.name, "", request.prompt), request.answer)
        assert columns is not None
        rows[request.name] = columns
    return rows


def test_rounds_are_those_that_the_live_collector_records(endless_pair: Pair, requests: list[Request]) -> None:
    """Greedy, undisturbed: the same rounds of the same texts, features within float32 rounding, labels equal."""
    rows = finished_rows(*serve(endless_pair, requests, "confidence:0.3", gentle=True))
    live = LiveCollector(endless_pair, load_policy("confidence:0.3"), Settings(0.0, NEW, K, ignore_eos=True))
    compared = 0
    for theirs in live.rows([PromptTask(i, r.name, "", r.prompt) for i, r in enumerate(requests)]):
        mine = rows[theirs["prompt_id"][0]]
        # The loop stops where the limit is; an engine drafts on and commits no more than the limit.
        inside = theirs["anchor"] + K + 1 <= NEW
        count = int(inside.sum())
        for name in (
            *("anchor", "drawn", "sent", "tokens", "accepted_length", "decisions", "backlog", "committed"),
            *("accepted", "observed"),
        ):
            assert np.array_equal(np.asarray(mine[name])[:count], np.asarray(theirs[name])[inside]), name
        for name in (*engine_features(0.0), "draft_prob", "anchor_token", "before_token"):
            assert np.allclose(mine[name][:count], theirs[name][inside], rtol=1e-4, atol=1e-5), name
        compared += count
    assert compared > 40
    assert not any(name.startswith("noisy_") for name in engine_features(0.7))


def test_labels_are_what_followed_and_no_round_is_lost_or_twice(endless_pair: Pair, requests: list[Request]) -> None:
    """Preempted, moved, aborted, trimmed: every draft that the engine was given has its row, once, with what came of it."""
    rounds = 0
    for seed in range(3):
        recorder, engine = serve(endless_pair, requests, "fixed:3", seed=seed)
        rows = finished_rows(recorder, engine)
        for request in engine.finished:
            mine = rows[request.name]
            given = [(context, draft, new) for context, draft, new in request.rounds if context > len(request.prompt)]
            assert mine["anchor"].tolist() == [context - len(request.prompt) for context, *_ in given]
            assert mine["committed"].tolist() == [len(new) for *_, new in given]
            for at, (context, draft, _) in enumerate(given):
                after = request.answer[context - len(request.prompt) :]
                agreed = next((j for j, t in enumerate(draft) if j >= len(after) or after[j] != t), len(draft))
                if draft:  # a request that came back from preemption has lost its draft
                    assert mine["tokens"][at][mine["sent"][at]].tolist() == draft
                    assert mine["accepted_length"][at] == agreed
            assert mine["cut"].tolist()[-1] and mine["text_tokens"][0] == NEW
            assert (mine["verify_s"] >= 0).all() and (mine["seconds"] >= mine["draft_s"])[mine["seconds"] > 0].all()
            rounds += len(given)
    assert rounds > 60


def test_rounds_that_explore_are_marked(endless_pair: Pair, requests: list[Request]) -> None:
    rows = finished_rows(*serve(endless_pair, requests, "fixed:1", explore=0.5, gentle=True))
    drawn = np.concatenate([one["drawn"].sum(1) for one in rows.values()])
    explored = np.concatenate([one["explored"] for one in rows.values()])
    assert set(drawn[explored]) == {K} and set(drawn[~explored]) == {1}
    assert 0.25 < explored.mean() < 0.75
