"""Collection: the cost of dense traces, agreement of dense and live traces, memory, and interrupted runs.

    python benchmarks/collect.py --check
    python benchmarks/collect.py --part kills

- `speed`: without the target's part, the dense collector labels at least 6 times as many positions per second as the
  live loop, and collection takes at most 1.3 times the time of generation. Under `rejection` and `block` it takes at
  most 1.1 and 2.5 times the time of `match`.
- `agreement`: rows of live rounds at full depth equal the dense rows at the same anchors. At most 1 of 500 differ
  (ties), and features agree within 2e-3.
- `completions`: texts that transformers samples are labelled as they are: acceptance by depth is that of
  generated texts, and texts of another temperature are refused.
- `memory`: collecting long texts takes at most 100 MiB more than collecting short ones.
- `kills`: collecting processes, 1 to 3 at a time, are killed at random moments and resumed. The rows are those of an
  undisturbed run, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Run, alternate, peak_mib, quotients, ratio_of_sums, spread
from specstop.decode import plain_texts, stream_key
from specstop.decode.prompts import encode_prompts

import specstop as ss

DEPTH, TREE = 12, "4,2,2,1"
POSITIONS, UNROLLING, MODES = 6.0, 1.3, {"rejection": 1.1, "block": 2.5}
FEATURES, ROWS, MIB = 2e-3, 1 / 500, 100.0


def speed(run: Run) -> None:
    """Time generation, dense and live traces in alternation."""
    count, new = run.choose((8, 128), (2, 8))
    prompts, encoded = run.prompts("test", count), run.encoded("test", count)
    keys = [stream_key(0, name) for name, _ in encoded]
    numbers = iter(range(10_000))

    def collected(**options: Any) -> ss.Trace:
        options = {"depth": DEPTH, "max_new_tokens": new, "verification": "match", **options}
        return ss.collect(run.pair, prompts, run.folder(f"speed-{next(numbers)}"), **options)

    for temperature in run.choose((0.0, 0.7), (0.7,)):
        where = f"T={temperature:g}"
        ids = [tokens for _, tokens in encoded]
        methods = {
            "generation": lambda: plain_texts(run.pair, ids, keys, new + DEPTH, temperature, noise=True),  # noqa: B023
            "dense": lambda: collected(temperature=temperature),  # noqa: B023
            "tree": lambda: collected(temperature=temperature, depth=4, tree=TREE),  # noqa: B023
            "live": lambda: collected(temperature=temperature, collector="live", policy=f"fixed:{DEPTH}"),  # noqa: B023
        }
        if temperature:
            methods |= {mode: lambda mode=mode: collected(temperature=0.7, verification=mode) for mode in MODES}
        seconds = alternate(methods, run.choose(3, 1), warm_up=run.choose(1, 0))
        dense, live = (methods[name]() for name in ("dense", "live"))
        times = live.to_pandas(["seconds", "verify_s"])
        drafting = float((times["seconds"] - times["verify_s"]).sum())
        unrolling = [max(d - g, 1e-9) for d, g in zip(seconds["dense"], seconds["generation"], strict=True)]
        rate = spread([dense.row_count / s / (live.row_count / drafting) for s in unrolling])
        run.bar(f"{where}: positions per second of drafting, dense over live", rate, at_least=POSITIONS)
        ratio = quotients(seconds["dense"], seconds["generation"])
        run.bar(f"{where}: collection over generation, chains of {DEPTH}", ratio, at_most=UNROLLING)
        run.row(f"{where}: collection over generation, {TREE}", quotients(seconds["tree"], seconds["generation"]))
        for mode, limit in MODES.items() if temperature else ():
            run.bar(f"{where}: {mode} over match", quotients(seconds[mode], seconds["dense"]), at_most=limit)


def agreement(run: Run) -> None:
    """Compare live rows with dense rows."""
    prompts, new = run.prompts("test", run.choose(10, 3)), run.choose(128, 12)
    for temperature in run.choose((0.0, 0.7), (0.7,)):
        for tree in (None, TREE):
            options = {
                "temperature": temperature, "max_new_tokens": new, "verification": "match", "tree": tree,
                "depth": 4 if tree else DEPTH,
            }  # fmt: skip
            where = f"{tree or 'chain'}-T={temperature:g}"
            dense = ss.collect(run.pair, prompts, run.folder(f"dense-{where}"), **options)
            policy = f"fixed:{options['depth']}"
            live = ss.collect(
                run.pair, prompts, run.folder(f"live-{where}"), collector="live", policy=policy, **options
            )
            different, compared, largest = _differences(live, dense)
            share, limit = different / compared, max(ROWS, 1 / compared)
            run.bar(f"{where}: share of rows that differ", share, at_most=limit, always=True)
            run.bar(f"{where}: largest difference of a feature", largest, at_most=FEATURES, always=True)


def _differences(live: ss.Trace, dense: ss.Trace) -> tuple[int, int, float]:
    """Return rows that differ, rows compared, and the largest relative difference of a feature where tokens are equal."""
    features = [name for name in live.header.features if name in dense.header.features]
    tables = [
        trace.to_pandas(["prompt_id", "anchor", "tokens", "accepted", "observed", *extra, *features])
        for trace, extra in ((live, ["drawn"]), (dense, []))
    ]
    both = tables[0].merge(tables[1], on=["prompt_id", "anchor"], suffixes=("", "_dense"))
    columns = {name: np.array(both[name].tolist()) for name in both.columns}
    drawn = columns["drawn"].astype(bool)
    known = columns["observed"].astype(bool) & columns["observed_dense"].astype(bool)
    same = ((columns["tokens"] == columns["tokens_dense"]) | ~drawn).all(1)
    same &= ((columns["accepted"] == columns["accepted_dense"]) | ~known).all(1)
    largest = 0.0
    for name in features:
        one, other = columns[name], columns[f"{name}_dense"]
        apart = np.abs(one - other) / np.maximum(np.abs(other), 1.0)
        valid = np.isfinite(apart) & (same[:, None] & drawn if apart.ndim == 2 else same)
        largest = max(largest, float(apart[valid].max(initial=0.0)))
    return int((~same).sum()), len(same), largest


def completions(run: Run) -> None:
    """Collect texts that transformers has sampled."""
    count, new = run.choose((60, 128), (6, 12))
    prompts = run.prompts("train", count)
    options = {"depth": 8, "temperature": 0.7, "max_new_tokens": new, "verification": "match"}
    sampled = {temperature: _sampled(run.stock, prompts, new + 8, temperature) for temperature in (0.7, 1.0)}
    given = ss.collect(run.pair, prompts, run.folder("completions"), completions=sampled[0.7], **options)
    generated = ss.collect(run.pair, prompts, run.folder("generated"), **options)
    lengths = [
        trace.to_pandas(["prompt_id", "accepted_length"]).groupby("prompt_id")["accepted_length"].mean()
        for trace in (given, generated)
    ]
    both = sorted(set(lengths[0].index) & set(lengths[1].index))
    ratio = ratio_of_sums([lengths[0][name] for name in both], [lengths[1][name] for name in both])
    covers = ratio.low is None or ratio.low <= 1.0 <= (ratio.high or 1.0)
    run.row("mean accepted length, completions over generated texts", ratio)
    run.bar("interval of completions over generated texts contains 1", float(covers), at_least=1.0)
    try:
        ss.collect(run.pair, prompts, run.folder("refused"), completions=sampled[1.0], **options)
        refused = 0
    except ss.SpecstopError:
        refused = 1
    run.bar("texts of temperature 1 refused at 0.7", refused, at_least=1)


@torch.inference_mode()
def _sampled(stock: ss.Pair, prompts: Sequence[ss.Prompt], new: int, temperature: float) -> dict[str, list[int]]:
    """Return texts by prompt id, sampled by transformers."""
    torch.manual_seed(1)
    library: Any = stock.target
    texts = {}
    for prompt, (_, ids) in zip(prompts, encode_prompts(stock, prompts), strict=True):
        row = torch.tensor([ids])
        out = library.generate(
            row, attention_mask=torch.ones_like(row), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            max_new_tokens=new,
        )  # fmt: skip
        texts[prompt.id] = out[0, len(ids) :].tolist()
    return texts


def memory(run: Run) -> None:
    """Compare the peak memory of processes that collect short and long texts."""
    peaks = [
        run.apart(_peak, run.pair_folder, run.folder(f"memory-{new}"), new) for new in run.choose((128, 512), (8, 12))
    ]
    run.bar("peak memory, long over short texts, MiB", peaks[1] - peaks[0], at_most=MIB, note=f"{peaks[0]:.0f} MiB")


def _peak(folder: Path, out: Path, new: int) -> float:
    """Return the peak memory of this process while it collects texts of `new` tokens, in MiB."""
    torch.set_num_threads(1)
    pair, prompts = ss.load_pair(folder / "target", folder / "draft"), ss.read_prompts(folder / "prompts-test.jsonl", 4)
    options = {"depth": DEPTH, "max_new_tokens": new, "temperature": 0.7, "verification": "match"}
    return peak_mib(lambda: ss.collect(pair, prompts, out, **options))


def kills(run: Run) -> None:
    """Kill collecting processes at random moments."""
    if run.smoke and len(run.options.part) > 1:
        return  # starting processes takes longer than a smoke run may; `--smoke --part kills` runs it
    chance, limit = random.Random(0), run.choose(60, 1)
    started = time.perf_counter()
    if _start(run, run.folder("undisturbed"), 0, 1).wait():
        raise RuntimeError("collect ended with an error")
    expected, seconds = ss.load_trace(run.folder("undisturbed")), time.perf_counter() - started
    total = number = different = 0
    while total < limit:
        world, out, codes = 1 + number % 3, run.folder(f"killed-{number}"), [-signal.SIGKILL]
        while any(codes):
            processes = [_start(run, out, rank, world) for rank in range(world)]
            if total < limit:
                time.sleep(seconds * (0.3 + 0.7 * chance.random()))
                for process in processes:
                    total += process.poll() is None
                    process.kill()
            codes = [process.wait() for process in processes]
            if set(codes) - {0, -signal.SIGKILL}:
                raise RuntimeError(f"collect ended with exit codes {codes}")
        trace = ss.load_trace(out)
        different += bool(trace.header.differences(expected.header)) or not trace.table().equals(expected.table())
        number += 1
    run.row("killed processes", total, f"{number} traces of {expected.row_count} rows, by 1 to 3 processes")
    run.bar("traces that differ after kills", different, at_most=0, always=True)


def _start(run: Run, out: Path, rank: int, world: int) -> subprocess.Popen[bytes]:
    """Start one process of a distributed collection."""
    pair, limit, shards = run.pair_folder, run.choose(96, 4), run.choose(24, 2)
    words = ["--target", pair / "target", "--draft", pair / "draft", "--prompts", pair / "prompts-train.jsonl"]
    words += ["--limit", limit, "--depth", 4, "--temperature", 0.7, "--max-new-tokens", run.choose(24, 6)]
    words += ["--extra", f"shards={shards}", "--resume", "--quiet", "--out", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= {"RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {}
    command = [sys.executable, "-c", "from specstop.cli.main import run; run()", "collect", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(Run(__doc__, [speed, agreement, completions, memory, kills]).execute())
