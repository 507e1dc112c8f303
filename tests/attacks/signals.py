"""Ctrl-C at random moments: a command ends with 130 and one line, or had ended before; nothing is half-written.

Each case runs one command as a process of its own and sends it SIGINT after a random share of the time that the
undisturbed command took; a fifth of them wait until something is being written. What it leaves must be whole: a trace goes
on to the same rows, a policy or a report is the undisturbed one or not there, no file of a temporary name stays, and the
inputs have not changed by a byte.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from kills import same_rows
from specstop.collect.prompts import read_prompts
from specstop.collect.run import collect
from specstop.collect.store import load_trace
from specstop.decode.models.pair import load_pair
from specstop.policies.errors import SpecstopError
from specstop.policies.files import STAGE_PREFIX, sha256, staging_path
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder

from .profiles import chain_profile
from .random_pair import save_pair

COUNT, QUICK = 60, 3
"""Signals in a full run, and in a quick one, which has none for the demo."""

COMMANDS = ("collect", "train", "evaluate", "demo")
AIMED = 0.2
HEADS = ("mlp", "xgboost", "logistic", "tokens")
RUN = "from specstop.cli.main import run; run()"
DEMO = """
import specstop.cli.commands.demo as command
from specstop.cli.main import run
kept = command.quiet_libraries
def begin():
    from functools import partial
    from importlib import import_module
    from specstop.decode.profile.measuring import Effort
    kept()
    demo = import_module("specstop.train.demo.demo")
    demo.Sizes = partial(
        demo.Sizes, live=2, tokens=16, depth=3, heads=("logistic", "mlp"), effort=Effort(repetitions=2)
    )
command.quiet_libraries = begin
run()
"""
"""The demo with less of everything, which its command has no options for: in seconds, not minutes."""

WORDS, DEPTH, TOKENS, SHARDS = 24, 3, 16, 3


@dataclass(frozen=True)
class Ended:
    """A command that was sent a signal.

    Attributes:
        command: its arguments.
        code: exit code, as `subprocess` has it.
        out, err: output.
    """

    command: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def outcome(self) -> str:
        """One or two words for the tally."""
        before = "done before" if self.code == 0 else "before its first line"
        return f"{self.command[0]}: {'interrupted' if self.code > 0 else before}"

    def faults(self) -> list[str]:
        """Return what is wrong with how it ended."""
        if self.code == 0:
            return []
        if self.code == -signal.SIGINT and self.err.rstrip().endswith("KeyboardInterrupt"):
            return []  # before the first line of the command
        lines = self.err.splitlines()
        found = [] if self.code == 130 else [f"exit code {self.code}"]
        if len(lines) != 1 or not lines[0].startswith("specstop: "):
            found.append(f"said {self.err!r}")
        if self.out:
            found.append(f"wrote {self.out!r} to standard output")
        return found


class Bench:
    """Inputs, what the undisturbed commands make of them, and how long they take."""

    def __init__(self, room: Path) -> None:
        self.room, self.inputs = room, room / "inputs"
        pair = save_pair(self.inputs / "pair", words=WORDS)
        chance = random.Random(0)
        for side, count in (("train", 14), ("test", 6)):
            texts = [" ".join(f"w{chance.randrange(3, WORDS)}" for _ in range(1 + i % 5)) for i in range(count)]
            lines = [json.dumps({"id": f"{side} {i}", "prompt": text}) for i, text in enumerate(texts)]
            (pair / f"prompts-{side}.jsonl").write_text("\n".join(lines))
        self.pair = load_pair(pair / "target", pair / "draft")
        # With every head's decisions priced: `train` would time them otherwise, and no two policies would be alike.
        replace(chain_profile(), decision_s=dict.fromkeys(HEADS, 5e-5)).save(self.inputs / "profile.json")
        for side in ("train", "test"):
            self.collect(side, self.inputs / side)
        self.whole: dict[tuple[str, ...], tuple[Path, float]] = {}

    def collect(self, side: str, out: Path) -> None:
        """Collect what the other commands read."""
        pair = self.inputs / "pair"
        collect(
            self.pair, read_prompts(pair / f"prompts-{side}.jsonl"), out, target=str(pair / "target"),
            draft=str(pair / "draft"), depth=DEPTH, temperature=0.7, verification="match",
            max_new_tokens=TOKENS, shards=SHARDS,
        )  # fmt: skip

    def resume(self, out: Path) -> None:
        """Go on with what `collect` has left: in a process of its own too, for the last bits of a row depend on settings."""
        call = [*python("collect"), *self.command("collect", random.Random(0)), "--out", str(out), "--resume"]
        ended = subprocess.run(call, capture_output=True, text=True, env=environment())
        assert ended.returncode == 0, f"--resume ended with {ended.returncode}: {ended.stderr}"

    def command(self, name: str, chance: random.Random) -> tuple[str, ...]:
        """Return the arguments of a command, all but --out."""
        pair, profile = self.inputs / "pair", str(self.inputs / "profile.json")
        if name == "collect":
            return (name, "--target", str(pair / "target"), "--draft", str(pair / "draft"), "--prompts",
                    str(pair / "prompts-test.jsonl"), "--depth", str(DEPTH), "--temperature", "0.7", "--max-new-tokens",
                    str(TOKENS), "--extra", f"shards={SHARDS}", "--quiet")  # fmt: skip
        if name == "train":
            head = chance.choice(HEADS)
            return (name, "--head", head, "--traces", str(self.inputs / "train"), "--profile", profile, "--quiet")
        if name == "evaluate":
            return (name, "--traces", str(self.inputs / "test"), "--profile", profile, "--quiet")
        return (name, "--pair", str(pair), "--temperature", "1", "--quiet")

    def undisturbed(self, command: tuple[str, ...]) -> tuple[Path, float]:
        """Return where the command's own result is, and the seconds it took."""
        if command not in self.whole:
            out = self.room / "whole" / str(len(self.whole))
            began = time.monotonic()
            call = [*python(command[0]), *command, "--out", str(out)]
            subprocess.run(call, check=True, capture_output=True, env=environment())
            self.whole[command] = out, time.monotonic() - began
        return self.whole[command]

    def disturb(self, command: tuple[str, ...], place: Path, chance: random.Random) -> Ended:
        """Run the command into `place`/out, with temporary files in `place`/tmp, and send it a signal."""
        seconds = self.undisturbed(command)[1]
        (place / "tmp").mkdir(parents=True)
        process = subprocess.Popen(
            [*python(command[0]), *command, "--out", str(place / "out")], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment() | {"TMPDIR": str(place / "tmp")},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        due, aimed = time.monotonic() + chance.random() * seconds, chance.random() < AIMED
        while process.poll() is None and (not staged(place) if aimed else time.monotonic() < due):
            time.sleep(0.0005 if aimed else 0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        return Ended(command, process.returncode, out, err)

    def leavings(self, ended: Ended, place: Path) -> list[str]:
        """Return what is wrong with what the command left."""
        names = sorted(path.name for path in place.iterdir())
        # A demo that was interrupted keeps its complete stages in a folder beside its result.
        kept = {staging_path(place / "out").name} if ended.command[0] == "demo" and ended.code else set()
        found = [] if set(names) <= {"out", "tmp", *kept} else [f"left {names}"]
        left = [path for path in staged(place) if path.name not in kept]
        found += [f"left {path.relative_to(place)}" for path in (*left, *(place / "tmp").iterdir())]
        out, whole = place / "out", self.undisturbed(ended.command)[0]
        if ended.code == 0 and not out.exists():
            found.append("ended well without a result")
        if out.exists():
            try:
                CHECKS[ended.command[0]](self, out, whole, ended.code == 0)
            except (SpecstopError, AssertionError, OSError, ValueError) as error:
                found.append(f"left a broken result: {error}")
        return found


def check_trace(bench: Bench, out: Path, whole: Path, complete: bool) -> None:
    """What `collect` left goes on to the same rows."""
    assert not complete or load_trace(out).complete, "not complete"
    bench.resume(out)
    assert same_rows(load_trace(out), load_trace(whole)), "other rows"


def check_policy(bench: Bench, out: Path, whole: Path, complete: bool) -> None:
    """What `train` left is a policy, and the same one."""
    load_policy_folder(out)
    assert contents(out) == contents(whole), "another policy"


def check_report(bench: Bench, out: Path, whole: Path, complete: bool) -> None:
    """What `evaluate` left is the whole report; a folder for it may be there already."""
    assert contents(out) == contents(whole) or not (complete or contents(out)), "another report, or a part of one"


def check_demo(bench: Bench, out: Path, whole: Path, complete: bool) -> None:
    """Each part of what `demo` left is whole."""
    parts = {path.name for path in out.iterdir()}
    assert parts <= {path.name for path in whole.iterdir()}, f"unknown parts {sorted(parts)}"
    for side in ("train", "test"):
        if (out / f"traces-{side}" / "index.json").exists():
            assert same_rows(load_trace(out / f"traces-{side}"), load_trace(whole / f"traces-{side}")), "other rows"
    if (out / "profile.json").exists():
        Profile.load(out / "profile.json")
    for policy in (out / "policies").glob("*"):
        load_policy_folder(policy)
    names = [set(contents(folder / "report")) for folder in (out, whole)]
    assert names[0] == names[1] or not (complete or names[0]), "a part of a report"


CHECKS: dict[str, Callable[[Bench, Path, Path, bool], None]] = {
    "collect": check_trace, "train": check_policy, "evaluate": check_report, "demo": check_demo,
}  # fmt: skip


def python(command: str) -> list[str]:
    """Return how a command line begins that runs a command with this interpreter."""
    return [sys.executable, "-c", DEMO if command == "demo" else RUN]


def environment() -> dict[str, str]:
    """Return what processes are run with: as many threads as here, since the last bits of a row depend on that."""
    return os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def staged(folder: Path) -> list[Path]:
    """Return what has a temporary name below `folder`."""
    # `os.walk` goes on where a folder has gone since it was listed, as stages do.
    return [
        Path(at, name)
        for at, *names in os.walk(folder)
        for some in names
        for name in some
        if name.startswith(STAGE_PREFIX)
    ]


def contents(folder: Path) -> dict[str, str]:
    """Return the checksums of a folder's files, the options left out: they name the folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.yaml"]
    return {str(path.relative_to(folder)): sha256(path) for path in paths}


def attack(count: int, seed: int, room: Path) -> tuple[Counter[str], list[str]]:
    """Send `count` signals; return how often what happened, and the faults found."""
    chance, seen = random.Random(seed), Counter[str]()
    bench = Bench(room)
    before, faults = contents(bench.inputs), []
    for case in range(count):
        command = bench.command(COMMANDS[case % len(COMMANDS)], chance)
        place = room / f"case-{case}"
        ended = bench.disturb(command, place, chance)
        seen[ended.outcome] += 1
        found = [*ended.faults(), *bench.leavings(ended, place)]
        if contents(bench.inputs) != before:
            found.append("inputs have changed")
            before = contents(bench.inputs)
        faults += [f"case {case}, {' '.join(command[:3])}: {fault}" for fault in found]
    return seen, faults
