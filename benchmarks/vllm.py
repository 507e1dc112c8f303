"""Inside vLLM: our proposer with fixed lengths, rules and a learned policy beside plain decoding and vLLM's own drafters.

    python benchmarks/vllm.py --check

Run it where vLLM is installed beside specstop (docs/vllm.md). Each engine is a process of its own that stays up; rounds turn
from one to the next, so that a machine that changes its pace favours none. Requests arrive one by one as others end, so many
at a time. Texts at temperature 0 are compared with plain vLLM's, with requests that are aborted on the way; where they
differ, the target's two best logits tell a tie. Without vLLM it says so in one line and ends well. The last line is one JSON
object; with `--check` the exit code is 1 where a bar falls short.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bars import Bars, arguments
from pairs import effort, pair_folder

HERE = str(Path(__file__).parent)
sys.path[:] = [path for path in sys.path if path != HERE]  # `import vllm` means the library, not this file

SIZES, ROUNDS, PROMPTS, TOKENS = (1, 4, 8, 16), 5, 40, 128
TIE = 1e-3
"""Apart by less than so much, two logits of float32 models may change places with the order of a sum."""

CLASS = "specstop.decode.engines.vllm.Proposer"
T_95 = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""Student's t at 95%, by rounds."""


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--policy", help="a policy folder; default: one that is trained here for vLLM")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.worker:
        return work(json.loads(options.worker))
    bars = Bars()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: nothing was run (docs/vllm.md says how to install it)")
        return bars.finish(options, "nothing: vLLM is not installed", whole=False)
    if options.quick:
        print("a run takes minutes of all cores, --quick or not: nothing was run; leave out --quick")
        return bars.finish(options, "nothing", whole=False)
    folder = pair_folder(options)
    with tempfile.TemporaryDirectory() as scratch:
        policy = options.policy or train_policy(options, folder, Path(scratch))
        measure(bars, options, folder, policy)
    return bars.finish(options, f"{PROMPTS} prompts of {TOKENS} tokens at {SIZES} requests, {options.rounds} rounds")


def train_policy(options: argparse.Namespace, folder: Path, scratch: Path) -> str:
    """Return a policy trained on the pair's training prompts, for what vLLM hands to a drafter."""
    from specstop.collect import collect, read_prompts
    from specstop.decode import load_pair, measure_profile
    from specstop.train import train

    pair = load_pair(folder / "target", folder / "draft")
    prompts = read_prompts(folder / "prompts-train.jsonl", 120)
    traces = collect(pair, prompts, scratch / "traces", depth=8, max_new_tokens=TOKENS)
    ids = [pair.tokenizer(prompt.text).input_ids for prompt in prompts[:8]]
    profile = measure_profile(pair, ids, depth=8, new_tokens=64, effort=effort(options))
    train(traces, profile, host="vllm", out=scratch / "policy")
    return str(scratch / "policy")


def modes(folder: Path, policy: str) -> dict[str, dict[str, Any]]:
    """Return vLLM's options by name of an engine."""
    draft = str(folder / "draft")

    def ours(spec: str, most: int = 8) -> dict[str, Any]:
        return {
            "speculative_config": {"method": "custom_class", "model": CLASS, "num_speculative_tokens": most},
            "additional_config": {"specstop": {"draft": draft, "policy": spec, "rows": max(SIZES)}},
        }

    return {
        "plain": {},
        "draft_model:3": {"speculative_config": {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}},
        "ngram:3": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        "ours fixed:2": ours("fixed:2"),
        "ours fixed:3": ours("fixed:3"),
        "ours learned": ours(policy),
    }


class Engine:
    """A process that has vLLM with some options."""

    def __init__(self, name: str, folder: Path, options: dict[str, Any]) -> None:
        task = json.dumps({"folder": str(folder), "options": options})
        environment = os.environ | {
            "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        self.name, command = name, [sys.executable, __file__, "--worker", task]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, **task: Any) -> dict[str, Any]:
        """Return what the process answers: the one line of its output that is ours."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"ours"'):
                return dict(json.loads(line)["ours"])
        raise RuntimeError(f"the engine {self.name} ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def work(task: dict[str, Any]) -> int:
    """Be such a process: serve prompts as the lines of the input say, until there are no more."""
    from vllm import LLM, SamplingParams

    folder = Path(task["folder"])
    engine = LLM(
        model=str(folder / "target"), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=max(SIZES),
        **task["options"],
    ).llm_engine  # fmt: skip
    lines = (folder / "prompts-test.jsonl").read_text().splitlines()[:PROMPTS]
    prompts = [json.loads(line)["prompt"] for line in lines]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    spent = getattr(getattr(getattr(runner, "drafter", None), "drafting", None), "spent", None)
    number = 0
    for line in sys.stdin:
        asked = json.loads(line)
        waiting, running, texts, number = list(enumerate(prompts)), {}, {}, number + 1
        before = (0.0, 0.0) if spent is None else (spent.all_s, spent.model_s)
        begin, aborted = time.perf_counter(), 0
        while waiting or running:
            while waiting and len(running) < asked["size"]:
                at, prompt = waiting.pop(0)
                running[f"{number}-{at}"] = at
                engine.add_request(f"{number}-{at}", prompt, params)
                if asked["abort"] and at % 5 == 4:
                    engine.add_request(f"{number}-{at}-aborted", prompt, params)
            for output in engine.step():
                if asked["abort"] and output.request_id.endswith("aborted") and len(output.outputs[0].token_ids) > 9:
                    engine.abort_request([output.request_id])
                    aborted += 1
                if output.finished and output.request_id in running:
                    texts[running.pop(output.request_id)] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - begin
        after = (0.0, 0.0) if spent is None else (spent.all_s, spent.model_s)
        answer = {
            "seconds": seconds, "tokens": sum(map(len, texts.values())), "aborted": aborted,
            "outside": (after[0] - before[0]) - (after[1] - before[1]), "texts": [texts[at] for at in range(len(prompts))],
        }  # fmt: skip
        print(json.dumps({"ours": answer}), flush=True)
    return 0


def measure(bars: Bars, options: argparse.Namespace, folder: Path, policy: str) -> None:
    """Compare texts, then speeds in turn."""
    engines = [Engine(name, folder, told) for name, told in modes(folder, policy).items()]
    try:
        first = {engine.name: engine.ask(size=max(SIZES), abort=True) for engine in engines}
        plain = first["plain"]["texts"]
        rates: dict[tuple[str, int], list[float]] = {}
        outside: dict[int, list[float]] = {}
        wrong = {name: differences(answer["texts"], plain) for name, answer in first.items()}
        for turn in range(options.rounds):
            for size in SIZES:
                for engine in engines if turn % 2 == 0 else engines[::-1]:
                    answer = engine.ask(size=size, abort=False)
                    rates.setdefault((engine.name, size), []).append(answer["tokens"] / answer["seconds"])
                    wrong[engine.name] |= differences(answer["texts"], plain)
                    if engine.name == "ours learned":
                        outside.setdefault(size, []).append(answer["outside"] / answer["seconds"])
    finally:
        for engine in engines:
            engine.close()
    judge(bars, folder, rates, outside, wrong, plain)


def differences(texts: list[list[int]], plain: list[list[int]]) -> set[tuple[int, int]]:
    """Return (prompt, place) where texts first differ from the plain ones."""
    return {
        (at, next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs)))
        for at, (mine, theirs) in enumerate(zip(texts, plain, strict=True))
        if mine != theirs
    }


def judge(
    bars: Bars,
    folder: Path,
    rates: dict[tuple[str, int], list[float]],
    outside: dict[int, list[float]],
    wrong: dict[str, set[tuple[int, int]]],
    plain: list[list[int]],
) -> None:
    """Hold what was found against the bars."""
    for name, found in wrong.items():
        if name.startswith("ours"):
            ties = [gap for gap in gaps(folder, found, plain) if gap < TIE]
            text = f"{len(found)} texts differ from plain vLLM's, {len(ties)} at ties"
            bars.add(f"{name}: texts", len(found), len(ties) == len(found), text)
    table = {f"{name} at {size}": mean(found) for (name, size), found in rates.items()}
    bars.figures["tokens_per_s"] = {name: round(rate, 1) for name, rate in table.items()}
    for name, rate in bars.figures["tokens_per_s"].items():
        print(f"      {name}: {rate} tokens/s")
    for size in SIZES:
        fixed = max(("ours fixed:2", "ours fixed:3"), key=lambda name: table[f"{name} at {size}"])
        theirs = max(("plain", "draft_model:3", "ngram:3"), key=lambda name: table[f"{name} at {size}"])
        mine = rates["ours learned", size]
        to_fixed, low, high = ratio(mine, rates[fixed, size])
        met = low > 1.0 if size <= 4 else high >= 0.99
        bars.add(f"learned to {fixed} at {size}", to_fixed, met, f"{to_fixed:.3f} ({low:.3f} to {high:.3f})")
        to_theirs, low, high = ratio(mine, rates[theirs, size])
        text = f"{to_theirs:.3f} ({low:.3f} to {high:.3f})"
        bars.add(f"learned to vLLM's best ({theirs}) at {size}", to_theirs, low > 1.0, text)
    share = mean(outside[8])
    bars.add("outside the draft model at 8", share, share <= 0.1, f"{share:.1%} of the time, bar 10%")


def ratio(mine: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios by round, and its 95% interval."""
    logs = [math.log(a / b) for a, b in zip(mine, theirs, strict=True)]
    half = T_95.get(len(logs), 2.3) * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean(logs)), math.exp(mean(logs) - half), math.exp(mean(logs) + half)


def gaps(folder: Path, found: set[tuple[int, int]], plain: list[list[int]]) -> list[float]:
    """Return how far apart the target's two best logits are at these (prompt, place)."""
    if not found:
        return []
    import torch
    from specstop.decode import load_pair

    pair = load_pair(folder / "target", folder / "draft", engine="plain")
    lines = (folder / "prompts-test.jsonl").read_text().splitlines()
    out = []
    for at, place in sorted(found):
        ids = pair.tokenizer(json.loads(lines[at])["prompt"]).input_ids + plain[at][:place]
        with torch.inference_mode():
            best = pair.target(input_ids=torch.tensor([ids])).logits[0, -1].topk(2).values
        out.append(float(best[0] - best[1]))
    return out


if __name__ == "__main__":
    sys.exit(main())
