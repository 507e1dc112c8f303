"""The rule for SGLang: the steps with the most tokens a second, and SGLang's own where nothing else is asked for.

The interface is that of the classes of SGLang's wheel.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specstop.decode.engines.sglang import MEMORY, CostedSteps, costed_steps_factory, rule_entry

CANDIDATES = {1: [1, 2, 4], 8: [0, 1, 2]}


def rule(acceptance: float = 0.8, row: float = 0.1, strength: float = 1.0) -> dict:
    """Return a rule in which a step of k costs 1 + row x k x batch."""
    return rule_entry([acceptance] * 4, {size: [1 + row * k * size for k in range(5)] for size in (1, 8)}, strength)


def best(acceptance: list[float], seconds: list[float], candidates: list[int]) -> int:
    def rate(steps: int) -> float:
        tokens, survive = 1.0, 1.0
        for chance in acceptance[:steps]:
            survive *= chance
            tokens += survive
        return tokens / seconds[steps]

    return max(candidates, key=rate)


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("row", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("size", [1, 4, 8, 64])
def test_the_steps_are_those_with_the_most_tokens_a_second(acceptance: float, row: float, size: int) -> None:
    policy = CostedSteps(CANDIDATES, rule(acceptance, row))
    known = min(size, 8)  # beyond the last size of the table its seconds hold
    expected = best([acceptance] * 4, [1 + row * k * known for k in range(5)], CANDIDATES[8 if size >= 8 else 1])
    assert policy.get_steps_for_batch(size) == expected
    assert policy.candidate_steps == [0, 1, 2, 4]


def test_what_is_accepted_moves_the_steps() -> None:
    policy = CostedSteps(CANDIDATES, rule(0.9, 0.1))
    assert policy.get_steps_for_batch(1) == 4
    moved = [policy.on_verify_complete([0], 1) for _ in range(20)]
    assert 1 in moved and policy.get_steps_for_batch(1) == 1
    tried = sum(MEMORY**n for n in range(20))
    assert policy._tried[0] == pytest.approx(tried) and policy._passed[0] == 0.0
    back = [policy.on_verify_complete([1], 1) for _ in range(200)]
    assert any(step is not None and step > 1 for step in back)


def test_batches_are_filled_up_to_recorded_sizes() -> None:
    policy = CostedSteps(CANDIDATES, rule())
    assert policy.cuda_graph_bs_for_step(4) is None
    policy.set_cuda_graph_bs([8, 1, 4])
    assert policy.cuda_graph_bs_for_step(4) == [1, 4] and policy.cuda_graph_bs_for_step(0) == [8]
    assert policy.get_steps_for_batch(5) in CANDIDATES[8]


@pytest.mark.parametrize("wrong", [{"acceptance": [0.5]}, {"seconds": {"1": [1.0, 1.1]}}, {"seconds": {}}])
def test_a_rule_that_lacks_steps_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="expected acceptance and seconds of all steps up to 4"):
        CostedSteps(CANDIDATES, rule() | wrong)


def test_without_our_object_the_engine_s_own_rule_runs(tmp_path: Path) -> None:
    made = costed_steps_factory(lambda steps, path: ("theirs", steps, path))
    plain, ours = tmp_path / "plain.json", tmp_path / "ours.json"
    entries = {str(size): {"candidate_steps": steps} for size, steps in CANDIDATES.items()}
    plain.write_text(json.dumps(entries))
    ours.write_text(json.dumps({**entries, "specstop": rule()}))
    assert made(3) == ("theirs", 3, None)
    assert made(initial_steps=3, cfg_path=str(plain)) == ("theirs", 3, str(plain))
    assert isinstance(made(3, str(ours)), CostedSteps)
