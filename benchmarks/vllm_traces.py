"""Parts of `vllm.py` that are about traces: what the engine's say is so, also after kills, and predicts its speed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from specstop.policies.costs import CostTable
from specstop.policies.profile import Profile
from vllm_bench import COMMAND, DEPTH, PROMPTS, SIZES, TOKENS, Bench
from vllm_engine import ENVIRONMENT, Engine, engines, ours

ROUNDS, KILLS = 10_000, 10
FEATURES = 3e-5
"""By how much features may differ: drafts of a batch and of one text are sums in other orders."""

COLUMNS = (
    "prompt_id",
    "sequence",
    "anchor",
    "tokens",
    "accepted_length",
    "drawn",
    "committed",
    "text_tokens",
    "anchor_token",
)


def trace(bench: Bench) -> None:
    """The rounds of an engine's trace: features as the collector has them, counts as the texts say, texts without a gap."""
    from specstop.collect import load_trace
    from specstop.collect.engines.serving import engine_features

    told = ("--collector", "vllm", "--prompts", bench.folder / "prompts-train.jsonl", "--depth", 6)
    told = (*told, "--max-new-tokens", TOKENS, "--policy", "confidence:0.4", "--extra", "explore=0.1")
    rounds = load_trace(bench.run("live", "collect", *told))
    names = [*engine_features(0.0), "draft_prob"]
    rows = columns(rounds, (*COLUMNS, *names))
    texts, gaps = follow(rows)
    counts = wrong_counts(rows, texts)
    total = len(rows["anchor"])
    bench.bars.add(
        "rounds lost or twice", gaps, gaps == 0 and total >= ROUNDS, f"{gaps} of {total} rounds; none of 10,000"
    )
    bench.bars.add("accepted counts", counts, counts == 0, f"{counts} of {total} differ from the texts; none")
    compared, worst = features(bench, rows, texts, names)
    text = f"{worst:.1e} at most in {compared} drafts; {FEATURES:g}, relative to values above 1"
    bench.bars.add("features", worst, worst <= FEATURES and compared >= ROUNDS // 2, text)


def columns(found: Any, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return columns of a trace as arrays, [rows] or [rows, K]."""
    table = found.table(list(names))
    return {name: np.array(table.column(name).to_pylist()) for name in names}


def follow(rows: dict[str, np.ndarray]) -> tuple[dict[str, list[int]], int]:
    """Return the generated text of each prompt as its rounds tell it, and how many rounds do not follow the one before.

    A round holds the tokens that were accepted; what the target added is the anchor token of the next one.
    """
    texts: dict[str, list[int]] = {}
    gaps = 0
    for at, name in enumerate(rows["prompt_id"].tolist()):
        text = texts.setdefault(name, [])
        if not text:
            text.append(int(rows["anchor_token"][at]))
            gaps += int(rows["anchor"][at]) != 1
        last = at + 1 == len(rows["anchor"]) or rows["prompt_id"][at + 1] != name
        end = int(rows["text_tokens"][at] if last else rows["anchor"][at + 1])
        gaps += len(text) != rows["anchor"][at] or end != len(text) + int(rows["committed"][at])
        text += rows["tokens"][at, : min(int(rows["accepted_length"][at]), end - len(text))].tolist()
        if not last and len(text) < end:
            text.append(int(rows["anchor_token"][at + 1]))
    return texts, int(gaps)


def wrong_counts(rows: dict[str, np.ndarray], texts: dict[str, list[int]]) -> int:
    """Return how many rounds accepted another number of tokens than agree with the text that follows."""
    wrong = 0
    for at, name in enumerate(rows["prompt_id"].tolist()):
        after = texts[name][int(rows["anchor"][at]) :][: int(rows["drawn"][at].sum())]
        agreed = 0
        while agreed < len(after) and after[agreed] == rows["tokens"][at, agreed]:
            agreed += 1
        wrong += agreed != rows["accepted_length"][at]
    return int(wrong)


def features(
    bench: Bench, rows: dict[str, np.ndarray], texts: dict[str, list[int]], names: list[str]
) -> tuple[int, float]:
    """Return how many drafts were compared with the dense collector's on the same texts, and the largest difference."""
    from specstop.collect import collect, load_trace, read_prompts
    from specstop.decode import load_pair

    out = bench.room / "same-texts"
    if not out.exists():
        pair = load_pair(bench.folder / "target", bench.folder / "draft")
        prompts = [p for p in read_prompts(bench.folder / "prompts-train.jsonl") if len(texts.get(p.id, ())) > 1]
        collect(pair, prompts, out, depth=6, max_new_tokens=TOKENS, completions=texts)
    dense = columns(load_trace(out), ("prompt_id", "anchor", "tokens", *names))
    where = {key: at for at, key in enumerate(zip(dense["prompt_id"].tolist(), dense["anchor"].tolist(), strict=True))}
    keys = zip(rows["prompt_id"].tolist(), rows["anchor"].tolist(), strict=True)
    both = [(at, where[key]) for at, key in enumerate(keys) if key in where]
    mine, theirs = (np.array(side) for side in zip(*both, strict=True))
    drawn = rows["drawn"][mine] & (np.cumsum(rows["tokens"][mine] != dense["tokens"][theirs], 1) == 0)
    worst = 0.0
    for name in names:
        one, other = rows[name][mine][drawn], dense[name][theirs][drawn]
        apart = np.abs(one - other) / np.maximum(np.abs(other), 1.0)
        print(f"      {name}: {np.nanmax(apart):.1e}")
        worst = max(worst, float(np.nanmax(apart)))
    others = int((rows["drawn"][mine] & ~drawn).any(1).sum())
    print(f"      {len(mine)} drafts compared, {others} with a token that is another one by a tie")
    return len(mine), worst


def kills(bench: Bench) -> None:
    """A collection that is killed again and again has the rounds of one that was left alone."""
    from specstop.collect import load_trace

    chance, done = random.Random(0), 0
    told = [
        "collect",
        "--collector",
        "vllm",
        "--prompts",
        bench.folder / "prompts-train.jsonl",
        "--limit",
        96,
        "--depth",
        6,
    ]
    told += ["--extra", "shards=24", "--max-new-tokens", 48, "--policy", "confidence:0.4"]
    whole = load_trace(bench.run("undisturbed", *told))
    written = [path.stat().st_mtime for path in (whole.folder / "data").iterdir()]
    seconds, out = max(written) - min(written), bench.room / "killed"
    shutil.rmtree(out, ignore_errors=True)
    words = [
        *told,
        "--target",
        bench.folder / "target",
        "--draft",
        bench.folder / "draft",
        "--out",
        out,
        "--quiet",
        "--resume",
    ]
    while True:
        ran = subprocess.Popen(
            [*COMMAND, *map(str, words)], env=os.environ | ENVIRONMENT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        count = len(list(out.glob("data/*.parquet")))
        while done < KILLS and ran.poll() is None and len(list(out.glob("data/*.parquet"))) <= count:
            time.sleep(0.01)  # it is collecting once it has written a shard
        if done < KILLS:
            time.sleep(chance.random() * seconds / KILLS / 2)
            done += ran.poll() is None
            ran.send_signal(signal.SIGKILL)
        if ran.wait() == 0:
            break
        if ran.returncode != -signal.SIGKILL:
            raise RuntimeError(f"collect --resume ended with {ran.returncode}")
    names = ("sequence", "anchor", "tokens", "accepted_length", "committed", "text_tokens")
    one, other = (
        sorted(map(str, zip(*(side[name].tolist() for name in names), strict=True)))
        for side in (columns(found, names) for found in (whole, load_trace(out)))
    )
    lost, more = len(set(one) - set(other)), len(set(other) - set(one)) + len(other) - len(set(other))
    text = f"{lost} rounds lost, {more} twice or others, of {len(one)}, after {done} kills; none after 10"
    bench.bars.add("kills of the engine", lost + more, lost + more == 0 and done >= KILLS, text)


def share_of_batch(profile: Profile, batch: int) -> Profile:
    """Return the seconds of one request in rounds in which every request of the batch drafts as deep."""

    def share(context: float) -> CostTable:
        tokens = batch * (np.arange(profile.max_depth + 1) + 1)
        first, later = (float(of(batch, context)) / batch for of in (profile.first_draft_s, profile.draft_s))
        return CostTable(
            context, (first, first), 0.0, tuple((profile.verify_s(batch, tokens, context) / batch).tolist()), later
        )

    low, high = (share(table.context) for table in (profile.low, profile.high))
    return profile if batch == 1 else replace(profile, low=low, high=high, step_s=0.0, round_s=0.0)


def predict(bench: Bench) -> None:
    """The engine's profile predicts tokens/s of three policies: at 1 request on a trace of `LLM`, at 8 on one of a server."""
    from specstop.collect import load_trace
    from specstop.policies.registry import load_policy
    from specstop.train.evaluate.evaluate import evaluate

    learned, profile = bench.policy(), Profile.load(priced(bench))
    specs = {"fixed:2": "fixed:2", "confidence:0.4": "confidence:0.4", "learned": learned}
    prompts, rates = bench.prompts(), dict[tuple[str, int], list[float]]()
    with engines(bench.folder, {name: ours(bench.folder, spec) for name, spec in specs.items()}) as running:
        for turn in range(bench.rounds):
            for size in (1, 8):
                for engine in running[:: 1 - 2 * (turn % 2)]:
                    name = f"predict, {size} requests, {engine.name}, round {turn}"
                    found = bench.kept(name, partial(rate, engine, prompts, size))
                    rates.setdefault((engine.name, size), []).append(found)
    told = (
        "--collector",
        "vllm",
        "--prompts",
        bench.folder / "prompts-test.jsonl",
        "--limit",
        PROMPTS,
        "--depth",
        DEPTH,
    )
    for size in (1, 8):
        made = bench.run("live-1", "collect", *told, "--max-new-tokens", TOKENS) if size == 1 else served(bench)
        live = load_trace(made)
        report = evaluate(live, share_of_batch(profile, size), [load_policy(spec) for spec in specs.values()])
        for name, spec in specs.items():
            said, was = report[load_policy(spec).shown_name].tokens_per_s, mean(rates[name, size])
            text = f"{said:.1f} predicted, {was:.1f} tokens/s measured: {said / was - 1:+.1%}; 10%"
            bench.bars.add(f"{name} at {size} predicted", said / was, abs(said / was - 1) <= 0.1, text)


def priced(bench: Bench) -> Path:
    """Return the engine's profile with what decisions cost there."""
    told = ("--prompts", bench.folder / "prompts-train.jsonl", "--profile", bench.profile())
    return bench.run("priced.json", "profile", "--policy", "confidence:0.4", "--policy", bench.policy(), *told)


def rate(engine: Engine, prompts: list[str], size: int) -> float:
    """Return tokens/s while so many requests run, as is predicted; an engine that has done nothing yet first warms up."""
    if not engine.started:
        engine.ask("serve", prompts=prompts[:8], tokens=16, size=8)
    answer = engine.ask("serve", prompts=prompts, tokens=TOKENS, size=size)
    return float(answer["full"])


def served(bench: Bench) -> Path:
    """Return the trace that vLLM's server records of the test prompts, 8 requests side by side."""
    if (bench.room / "served").exists():
        return bench.room / "served"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = ours(bench.folder, f"fixed:{DEPTH}", traces=str(bench.room / "parts"))
    told["speculative_config"]["model"] = "specstop.collect.engines.serving.RecordingProposer"
    words = [
        "vllm.entrypoints.openai.api_server",
        "--model",
        bench.folder / "target",
        "--served-model-name",
        "target",
        "--port",
        port,
    ]
    words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", 512, "--max-num-seqs", 8]
    words += [word for name, value in told.items() for word in (f"--{name.replace('_', '-')}", json.dumps(value))]
    server = subprocess.Popen(
        [sys.executable, "-m", *map(str, words)], env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def post(prompt: str) -> int:
        asked = {"model": "target", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS}
        with urllib.request.urlopen(
            urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(asked).encode(),
                {"Content-Type": "application/json"},
            )
        ) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(0.5)
        with ThreadPoolExecutor(8) as threads:
            print(f"      the server wrote {sum(threads.map(post, bench.prompts()))} tokens")
    finally:
        server.terminate()
        server.wait()
    return bench.run("served", "import", bench.room / "parts")


def achievable(bench: Bench) -> None:
    """Print what a policy could reach over the best fixed length that knows all scalars, by the engine's profile.

    Its decisions are free. Printed beside it is what it reaches if they cost what the learned policy's do in the engine.
    """
    from specstop.collect import load_trace
    from specstop.policies.registry import load_policy
    from specstop.train.evaluate.evaluate import evaluate
    from specstop.train.fit.achievable import NAME, achievable_in_batches
    from specstop.train.fit.batch_rules import batch_rate
    from specstop.train.fit.rules import Part
    from specstop.train.replay.traces.arrays import trace_arrays

    told = ("--prompts", bench.folder / "prompts-test.jsonl", "--limit", PROMPTS, "--depth", DEPTH)
    held = load_trace(bench.run("held-out", "collect", *told, "--max-new-tokens", TOKENS))
    policies = [load_policy(bench.policy()), load_policy(bench.policy("batch"))]
    policies[0].label, policies[1].label = "learned", "joint"
    profile = Profile.load(bench.profile())
    found = bench.kept(
        "achievable", lambda: evaluate(held, profile, policies, achievable=True, batch=SIZES).details["batch"]
    )
    print(
        f"      by replay, to the best fixed length ({', '.join(map(str, found['best_fixed']))} at {SIZES} requests):"
    )
    for line in found["lines"]:
        bench.bars.figures[f"{line['name']} by replay"] = line["to_best_fixed"]
        told = ", ".join("{value:.3f} [{low:.3f}, {high:.3f}]".format(**one) for one in line["to_best_fixed"])
        print(f"      {line['name']}: {told}")
    arrays, names = trace_arrays(held), [f"fixed:{length}" for length in found["best_fixed"]]
    price = Profile.load(priced(bench)).decision(policies[0].cost_name)
    paid = profile.with_decisions({f"{NAME}?rule=batch": price})
    known, estimate = achievable_in_batches(arrays, paid)
    assert estimate.cost_name in paid.decision_s, "its decisions are paid for"
    rates = {
        size: batch_rate(estimate, [Part(known)], paid, size)
        / batch_rate(load_policy(name), [Part(arrays)], profile, size)
        for size, name in zip(SIZES, names, strict=True)
    }
    bench.bars.figures["achievable with decisions paid for, by replay"] = rates
    told = ", ".join(f"{rate:.3f} at {size}" for size, rate in rates.items())
    print(f"      achievable estimate with decisions paid for: {told}")
