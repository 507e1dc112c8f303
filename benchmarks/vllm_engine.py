"""vLLM in a process of its own, which stays up and is asked by lines of JSON: it binds threads and keeps its models until it
ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "NUMBA_NUM_THREADS": "1",
}  # fmt: skip
"""One thread for numba: where cores are few, those of vLLM's n-gram drafter and torch's wait for each other."""
CLASS = "specstop.decode.engines.vllm.Proposer"
MOST = 16
"""Requests side by side."""
BLOCKS = 160
"""Of 128 tokens each, in vLLM's cache: enough for `MOST` requests and as many aborted ones; its own choice is ten times that,
and a dozen engines wait for their turns."""
LAST_LINES = 20
"""Of what an engine logged, shown where it dies."""


def ours(folder: Path, policy: str, depth: int = 8, **more: Any) -> dict[str, Any]:
    """Return vLLM's options for our proposer; `more` joins its settings."""
    told = {"draft": str(folder / "draft"), "policy": policy, "rows": MOST, **more}
    return {
        "speculative_config": {"method": "custom_class", "model": CLASS, "num_speculative_tokens": depth},
        "additional_config": {"specstop": told},
    }


def theirs(folder: Path, method: str, length: int) -> dict[str, Any]:
    """Return vLLM's options for a drafter of its own."""
    more = {"draft_model": {"model": str(folder / "draft")}, "ngram": {"prompt_lookup_max": 3}}[method]
    return {"speculative_config": {"method": method, "num_speculative_tokens": length, **more}}


class Engine:
    """A process that has vLLM with some options, started when it is first asked.

    Args:
        name: for messages.
        folder: of the pair.
        options: of `LLM`.
        mended: expanding temperatures is replaced, which vllm-cpu 0.32.0 gets wrong.
    """

    def __init__(self, name: str, folder: Path, options: Mapping[str, Any], *, mended: bool = False) -> None:
        self.name, self._task = name, json.dumps({"folder": str(folder), "options": options, "mended": mended})
        self._process: subprocess.Popen[str] | None = None
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the engine

    @property
    def started(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("vllm.py")), "--worker", self._task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
        return self._process

    def ask(self, do: str, **task: Any) -> dict[str, Any]:
        """Return what the process answers: the one line of its output that is ours."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"do": do, **task}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith('{"ours"'):
                return dict(json.loads(line)["ours"])
        status = process.wait()
        self._said.seek(0)
        last = "".join(self._said.readlines()[-LAST_LINES:])
        raise RuntimeError(f"the engine {self.name} ended with {status}:\n{last}")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._said.close()


@contextlib.contextmanager
def engines(folder: Path, options: Mapping[str, Mapping[str, Any]], *, mended: bool = False) -> Iterator[list[Engine]]:
    """Yield engines of these options by name."""
    made = [Engine(name, folder, told, mended=mended) for name, told in options.items()]
    try:
        yield made
    finally:
        for engine in made:
            engine.close()


def work(task: Mapping[str, Any]) -> int:
    """Be such a process: do as the lines of the input say, until there are no more."""
    if task["mended"]:
        mend()
    from vllm import LLM

    llm = LLM(
        model=str(Path(task["folder"]) / "target"), dtype="float32", enforce_eager=True, max_model_len=512,
        max_num_seqs=MOST, block_size=128, num_gpu_blocks_override=BLOCKS, **task["options"],
    )  # fmt: skip
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"ours": {"serve": serve, "sample": sample}[asked.pop("do")](llm, **asked)}), flush=True)
    return 0


def serve(
    llm: Any, prompts: Sequence[str], tokens: int, size: int, abort: bool = False, policy: str = ""
) -> dict[str, Any]:
    """Serve prompts, `size` at a time, the next one arriving as one ends; under another policy of ours, if one is named.

    With `abort` every fifth comes twice, and one of the two is aborted on the way. `shares` are seconds by prompt: those of a
    step are shared out among the requests in it. `full` is tokens/s as long as another prompt is waiting, so `size` run.
    """
    from vllm import SamplingParams

    # Token ids are enough, as for profiles: a server makes text of them in another process than its engine's.
    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
    waiting, running, texts, number = list(enumerate(prompts)), {}, {}, time.monotonic_ns()
    drafting = drafting_of(llm)
    if policy:
        from specstop.policies.registry import load_policy

        drafting.use(load_policy(policy))
    spent = drafting.spent if drafting else None
    before, aborted, shares = (spent.all_s, spent.model_s) if spent else (0.0, 0.0), 0, [0.0] * len(prompts)
    begin = last = time.perf_counter()
    written, full = dict[str, int](), None
    while waiting or running:
        while waiting and len(running) < size:
            at, prompt = waiting.pop(0)
            running[f"{number}-{at}"] = at
            engine.add_request(f"{number}-{at}", prompt, params)
            if abort and at % 5 == 4:
                engine.add_request(f"{number}-{at}-aborted", prompt, params)
        if not waiting and full is None and written:
            full = sum(written.values()) / (last - begin)
        outputs, now = engine.step(), time.perf_counter()
        for at in running.values():
            shares[at] += (now - last) / len(running)
        last = now
        for output in outputs:
            name = output.request_id
            written[name] = len(output.outputs[0].token_ids)
            if abort and name.endswith("aborted") and len(output.outputs[0].token_ids) > 9 and not output.finished:
                engine.abort_request([name])
                aborted += 1
            if output.finished and name in running:
                texts[running.pop(name)] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - begin
    after = (spent.all_s, spent.model_s) if spent else (0.0, 0.0)
    return {
        "seconds": seconds,
        "shares": shares,
        "tokens": sum(map(len, texts.values())),
        "full": full,
        "aborted": aborted,
        "outside": (after[0] - before[0]) - (after[1] - before[1]),
        "memory": memory(),
        "texts": [texts[at] for at in range(len(prompts))],
    }


def sample(llm: Any, prompt: str, seeds: Sequence[int], tokens: int) -> dict[str, Any]:
    """Return the first tokens of texts sampled at temperature 0.7, one for each seed."""
    from vllm import SamplingParams

    told = {"temperature": 0.7, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    outputs = llm.generate([prompt] * len(seeds), [SamplingParams(seed=s, **told) for s in seeds], use_tqdm=False)
    return {"texts": [list(output.outputs[0].token_ids) for output in outputs]}


def drafting_of(llm: Any) -> Any:
    """Return our drafting inside an engine; None of others."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return getattr(getattr(runner, "drafter", None), "drafting", None)


def memory() -> float:
    """Return the MiB of memory that the process holds now."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def mend() -> None:
    """Have temperatures reach the verification: vllm-cpu 0.32.0 fills a copy of what it then reads."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, ends: Any, count: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        repeats = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(repeats)

    rejection_sampler.expand_batch_to_tokens = expand
