"""Live loop, replay, single rounds and the cost-to-go fit play the same rounds: one function drafts, one plays a round."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode import rounds
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.policies.fixed import Confidence
from specstop.policies.profile import Profile
from specstop.train.replay.bounds.cost_to_go import CostToGo
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from specstop.train.replay.run import replay
from specstop.train.replay.arrays import trace_arrays


def test_replay_loads_no_model_library() -> None:
    """transformers would take 140 MiB of it, and most of its start."""
    code = "import sys, specstop.train.replay.run; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What drafted, by the function that it was called from."""
    callers: Counter[str] = Counter()
    draft: Callable[..., Any] = rounds.draft

    def counting(*args: Any) -> Any:
        code = sys._getframe(1).f_code
        callers["play_round" if code is rounds.play_round.__code__ else code.co_name] += 1
        return draft(*args)

    monkeypatch.setattr(rounds, "draft", counting)
    return callers


POLICY = Confidence(0.4, DEPTH)


def test_live_rounds(pair: Pair, prompt_ids: list[list[int]], played: Counter[str]) -> None:
    count = 0
    for tree in (None, "2,2,1"):
        for mode in ("match", "rejection"):
            settings = Settings(0.7, NEW, tree=tree, verification=mode)
            count += len(Speculator(pair, POLICY, settings).generate(prompt_ids[2]).rounds)
    assert played == {"play_round": count}


def test_replayed_rounds_and_rounds_of_scripted_lengths(
    traces: dict[float, Trace], profile: Profile, played: Counter[str]
) -> None:
    arrays = trace_arrays(traces[0.7])
    turns = int(replay(arrays, POLICY, profile).rounds.max())
    assert played == {"play_round": turns}
    costs = CostToGo(arrays, profile)
    for length in (0, 3):
        played.clear()
        visits = costs.play(torch.full_like(costs.bound, length)).visits
        by_text = torch.zeros(arrays.sequences, dtype=torch.int64).index_add(0, arrays.owner, visits.long())
        assert played == {"play_round": int(by_text.max())}


def test_single_rounds(
    pair: Pair, prompts: list[Prompt], profile: Profile, played: Counter[str], tmp_path: Path
) -> None:
    live: dict[str, Any] = {"collector": "live", "verification": "rejection", "policy": POLICY, "explore": 1.0}
    trace = collect(pair, prompts[:3], tmp_path / "t", depth=DEPTH, temperature=0.7, max_new_tokens=12, **live)
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS)
    played.clear()
    evaluate_rounds(arrays, POLICY, profile)
    assert played == {"play_round": int(arrays.rows.max())}
