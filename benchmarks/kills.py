"""Kill collecting processes at random moments, start them again, and compare the rows with those of an undisturbed run.

    python benchmarks/kills.py --check
    python benchmarks/kills.py --quick

The same command runs as 1, 2 and 3 processes (RANK, WORLD_SIZE), each killed by SIGKILL at its own moment, mostly while it
collects or writes, sometimes while it loads. When a trace is complete the next one begins. A small random pair is built on
the spot: only files and processes are at stake. The last line printed is one JSON object; with `--check` the exit code is
1 where a bar falls short.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from bars import NO_PAIR, Bars, arguments
from specstop.collect import Trace, check_trace, load_trace
from specstop.collect.schema import Header
from specstop.collect.store import read_header
from specstop.policies.files import MANIFEST, STAGE_PREFIX
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, EOS = 64, 5
SHARDS = 48
PROMPTS = 384
WORLDS = (1, 2, 3)
EARLY = 0.1
"""Share of the kills that fall before collecting begins."""
AIMED = 0.2
"""Share of the others that are aimed at a write, which is short."""
PATIENCE_S = 3600.0


@dataclass
class Tally:
    """What happened: kills by number of processes, by what they left, and how complete traces compared."""

    kills: Counter[int] = field(default_factory=Counter)
    within_a_write: int = 0
    early: int = 0
    traces: Counter[int] = field(default_factory=Counter)
    different: int = 0
    twice: int = 0
    failures: list[str] = field(default_factory=list)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(
        __doc__, NO_PAIR, out="folder for the pair, the traces and the figures; default: a temporary one"
    )
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs in all (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    kills = 6 if options.quick else options.kills
    folder = options.out or Path(tempfile.mkdtemp(prefix="specstop-kills-"))
    begin = time.perf_counter()
    build_pair(folder)
    bench = Bench(folder, random.Random(options.seed))
    for number, world in enumerate(WORLDS):
        bench.disturb(world, kills // len(WORLDS) + (number < kills % len(WORLDS)))
    tally = bench.tally
    if options.out is None:
        shutil.rmtree(folder)
    done = sum(tally.kills.values())
    complete = sum(tally.traces.values())
    met = not (tally.different or tally.twice or tally.failures) and min(tally.traces[w] for w in WORLDS) > 0
    text = f"{tally.different} different traces, {tally.twice} rows twice, {len(tally.failures)} failures; none"
    bars = Bars()
    bars.add("traces after kills", complete, met, f"{complete} of {bench.rows} rows, {text}")
    for line in tally.failures:
        print("failed:", line)
    bars.figures |= {
        "kills": dict(tally.kills), "kills before collecting": tally.early,
        "kills within a write": tally.within_a_write, "complete traces": dict(tally.traces),
        "different": tally.different, "rows twice": tally.twice, "failures": tally.failures, "rows": bench.rows,
        "shards": SHARDS, "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip
    return bars.finish(options, f"{done} kills, {complete} complete traces", whole=done >= 100)


class Bench:
    """Runs and kills the command on one pair; the undisturbed run comes first and says how long a shard takes."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance, self.tally, self.started = folder, chance, Tally(), 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["specstop.cli.main", "specstop.collect.run", "specstop.decode.models.pair"]
        )
        self._undisturbed(folder / "undisturbed", 1)
        self.expected = load_trace(folder / "undisturbed")
        written = [path.stat().st_mtime for path in (folder / "undisturbed" / "data").iterdir()]
        self.shard_s = (max(written) - min(written)) / (SHARDS - 1)
        self.rows = self.expected.row_count

    def disturb(self, world: int, kills: int) -> None:
        """Kill so many processes of `world`, each time starting all of them again; compare every complete trace."""
        number = 0
        out = self.folder / f"{world}-{number}"
        while self.tally.kills[world] < kills:
            self._turn(out, world, kills)
            if (out / "header.json").exists() and Trace(out, read_header(out)).complete:
                self._undisturbed(out, world)
                self._compare(out, world)
                number += 1
                out = self.folder / f"{world}-{number}"
        self._undisturbed(out, world)
        self._compare(out, world)

    def _undisturbed(self, out: Path, world: int) -> None:
        """Run the command to its end: the last kill too is followed by a --resume."""
        self._settle([self._start(out, rank, world)[0] for rank in range(world)])

    def _turn(self, out: Path, world: int, kills: int) -> None:
        """Start all processes and kill each at its moment, as long as kills are left."""
        started = [self._start(out, rank, world) for rank in range(world)]
        due = []
        for process, ready in started:
            early = self.chance.random() < EARLY
            while not early and not ready.exists() and process.is_alive():
                time.sleep(0.001)
            wait = self.chance.random() * (0.2 if early else 3 * world * self.shard_s)
            due.append((time.perf_counter() + wait, process, early))
        for moment, process, early in sorted(due, key=lambda item: item[0]):
            if self.tally.kills[world] >= kills:
                continue
            time.sleep(max(0.0, moment - time.perf_counter()))
            aimed = not early and self.chance.random() < AIMED
            while aimed and process.is_alive() and not staged_by(process, out):
                time.sleep(0.0002)
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed = process.exitcode == -signal.SIGKILL
            self.tally.kills[world] += killed
            self.tally.early += killed and early
            self.tally.within_a_write += staged_by(process, out)
        self._settle([process for process, _ in started])

    def _start(self, out: Path, rank: int, world: int) -> tuple[ForkServerProcess, Path]:
        """Start one process; the file that comes with it appears when collecting begins."""
        self.started += 1
        ready = self.folder / f"ready-{self.started}"
        place = {"RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {}
        command = ["collect", "--target", self.folder / "target", "--draft", self.folder / "draft", "--prompts",
                   self.folder / "prompts.jsonl", "--depth", 4, "--temperature", 0.7, "--max-new-tokens", 24,
                   "--extra", f"shards={SHARDS}", "--resume", "--quiet", "--out", out]  # fmt: skip
        process = self.context.Process(target=child, args=([*map(str, command)], place, ready))
        process.start()
        return process, ready

    def _settle(self, processes: list[ForkServerProcess]) -> None:
        """Wait until they have ended, killed or well."""
        for process in processes:
            process.join(PATIENCE_S)
            if process.exitcode not in (0, -signal.SIGKILL):
                self.tally.failures.append(f"a process ended with {process.exitcode}")
                process.kill()

    def _compare(self, out: Path, world: int) -> None:
        trace = check_trace(out)
        self.tally.traces[world] += 1
        self.tally.different += not (trace.complete and same_rows(trace, self.expected))
        keys = trace.table(["sequence", "anchor"])
        self.tally.twice += trace.row_count - len(set(zip(*keys.to_pydict().values(), strict=True)))
        left = [path for path in out.rglob(".*") if path.name not in (".", MANIFEST)]
        if left:
            # The next run would remove them; none may be taken for a part of the trace.
            self.tally.failures.append(f"left behind in {out.name}: {', '.join(p.name for p in left)}")
        print(f"{world} processes, {self.tally.kills[world]} kills: {out.name} has {trace.row_count} rows", flush=True)


def staged_by(process: ForkServerProcess, out: Path) -> bool:
    """Whether a file that this process was writing lies there."""
    return any(path.name.endswith(f".{process.pid}") for path in out.rglob(f"{STAGE_PREFIX}*"))


def same_rows(first: Trace, second: Trace) -> bool:
    """Whether two traces of one run hold the same bits, provenance left out."""
    headers: list[Header] = [first.header, second.header]
    return not headers[0].differences(headers[1]) and bool(first.table().equals(second.table()))


def child(arguments: list[str], place: dict[str, str], ready: Path) -> None:
    """Run the command line in a fresh process; tell when collecting begins."""
    import specstop.collect.run as collecting
    from specstop.cli import main as command

    torch.set_num_threads(1)
    os.environ.update(place)
    record = collecting.record

    def announced(*args: Any, **options: Any) -> Trace:
        ready.touch()
        return record(*args, **options)

    collecting.record = announced
    sys.argv = ["specstop", *arguments]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        command.run()


def build_pair(folder: Path) -> None:
    """Save a random target, the same with noise as its draft, their tokenizer, and prompts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.4, bos_token_id=1, eos_token_id=EOS,
        pad_token_id=0,
    )  # fmt: skip
    words = {"<pad>": 0, "<s>": 1, "<unk>": 2, "</s>": EOS}
    words |= {f"w{i}": i for i in range(3, VOCABULARY) if i != EOS}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    model = LlamaForCausalLM(config)
    for role in ("target", "draft"):
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn(weight.shape))
    chance = random.Random(1)
    lines = [" ".join(f"w{chance.randrange(6, VOCABULARY)}" for _ in range(2 + i % 6)) for i in range(PROMPTS)]
    records = [json.dumps({"id": f"p{i}", "prompt": line, "group": f"g{i % 3}"}) for i, line in enumerate(lines)]
    (folder / "prompts.jsonl").write_text("\n".join(records) + "\n")


if __name__ == "__main__":
    sys.exit(main())
