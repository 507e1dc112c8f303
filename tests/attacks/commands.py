"""Command lines made at random, whose results are to land in, above, below and beside what they read.

Each command gets inputs, spelled differently, an output somewhere, and options, some of them wrong. Whatever
comes of it, no input and no file of the user's may change by a byte: the exit code is 2, with one line and nothing changed at
all, or 0, with a whole result at the output, nothing else changed, and nothing replaced but an older result.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from specstop.collect.store import load_trace
from specstop.policies.files import STAGE_PREFIX
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder

from .in_process import Answer, cli
from .workplace import DEPTH, NEW, contents, furnish, renew

COUNT, QUICK = 500, 40
"""Command lines of a full run, and of a quick one."""

OWN_PROCESS = 50
"""Every so manyth command line is run by a process of its own."""


@dataclass(frozen=True)
class Command:
    """A command to be attacked.

    Attributes:
        words: of the command line; those that begin with @ are inputs.
        whole: raises where the result is not whole; None = the command writes nothing.
        flags: that it takes besides `--overwrite`.
    """

    words: str
    whole: Callable[[Path], object] | None = None
    flags: tuple[str, ...] = ("--json", "--quiet")


def report(out: Path) -> None:
    """Read the JSON files of a report, a table or an export, and see the options beside it."""
    files = list(out.glob("*.json"))
    assert files and all(json.loads(file.read_text()) for file in files), "no JSON"
    assert (out / "run.yaml").is_file(), "no run.yaml"


def card(out: Path) -> None:
    """See the page of a folder for the hub."""
    assert (out / "README.md").is_file() and (out / "custom_generate" / "generate.py").is_file()


PAIR = "--target @pair/target --draft @pair/draft --dtype float64"
SMALL = f"--depth {DEPTH} --max-new-tokens {NEW}"
TRAIN = "train --traces @fit --profile @profile.json"
STEP = "--rule step --threshold 0.5"
COMMANDS = (
    Command(f"collect {PAIR} --prompts @prompts.jsonl {SMALL}", load_trace, ("--quiet", "--resume")),
    Command(f"collect {PAIR} --prompts @data {SMALL} --extra shards=2", load_trace, ("--quiet", "--resume")),
    Command(f"collect {PAIR} --prompts @alias.jsonl {SMALL} --extra completions=answer --config @collect.yaml", load_trace),
    Command(f"collect {PAIR} --prompts @prompts.jsonl {SMALL} --collector live --policy @policy", load_trace, ()),
    Command("import @records.jsonl", load_trace, ("--json",)),
    Command(f"{TRAIN} {STEP}", load_policy_folder),
    Command(f"train --traces @link --profile @profile.json {STEP}", load_policy_folder),
    Command(f"{TRAIN} {STEP} --head mlp --param epochs=1 --param width=4", load_policy_folder),
    Command("evaluate --traces @held --profile @profile.json --policy @policy", report),
    Command("evaluate --traces @held --train-traces @fit --profile @profile.json", report),
    Command("evaluate --traces @linked --profile @profile.json --policy fixed:2", report),
    Command("evaluate --traces @held --traces @linked --profile @profile.json --policy fixed:2", report),
    Command("deploy --to vllm --traces @fit --profile @profile.json --policy @policy", report),
    Command("deploy --to llama.cpp --traces @fit --held-out @held --profile @profile.json", report, ()),
    Command("deploy --to hf --policy @policy", card),
    Command("deploy --to onnx --policy @policy", Path.read_bytes),
    Command("import @weights.pt", load_policy_folder, ("--json",)),
    Command(f"profile {PAIR} --prompts @prompts.jsonl --depth 1 --repeats 1", Profile.load, ("--quiet",)),
    Command("demo --pair @pair", report),
    Command("evaluate --compare @a --compare @b", flags=("--json",)),
    Command("info @held", flags=("--json", "--check")),
    Command("evaluate --traces @live --profile @profile.json --policy fixed:1", flags=("--json",)),
    Command(f"decode w5 {PAIR} --policy @policy --max-new-tokens {NEW}"),
)  # fmt: skip

SLOW = ("demo",)
"""Commands that are only refused here: their work takes minutes."""

PLACES = (
    "new", "deep/er/new", "empty", "gone", "new\u00e9 \u732b", "old/trace", "old/policy", "old/report", "old/link",
    "old/profile.json", "mixed", "mine", "mine/new", "mine.txt", "old", ".", "here", "here/.", "home", "link/new",
    "collect.yaml",
)  # fmt: skip
"""Outputs, besides those made from the inputs."""

OUTSIDE = ("/dev/null", "/dev/null/x", "/proc/x", "/proc/self/x/y", "x" * 256, "y/" + "x" * 256, "")
PROGRESS = re.compile(r"[a-z ]+: \d+ of \d+, ")
"""How a line begins that says how far a command has come."""

WRONG = (
    "--seed x",
    "--config @none.yaml",
    "--config @profile.json",
    "--unknown",
    "--policy none:1",
)
"""Options that no command takes as they are."""


def spelled(path: Path, place: Path, chance: random.Random) -> str:
    """Return one of the spellings of a path, from the folder `here`."""
    plain = os.path.relpath(path, place / "here")
    if not os.path.lexists(path.parent):
        return str(path)
    return chance.choice(
        [
            str(path),
            str(path),
            plain,
            f"../pair/../{os.path.relpath(path, place)}",
            f"{path}/",
            f"{place}//{path.relative_to(place)}",
        ]
    )


def choose_out(inputs: list[Path], place: Path, chance: random.Random) -> Path:
    """Return an output: an input, above or below one, another place, or an impossible one."""
    kind = chance.randrange(6)
    given = chance.choice(inputs)
    if kind == 0:
        return given
    if kind == 1:
        return chance.choice([given.parent, place, given / "new", given / "data" / "new", given.parent / "new"])
    if kind == 2:
        return Path(chance.choice(OUTSIDE))
    return place / chance.choice(PLACES)


def build(place: Path, chance: random.Random) -> tuple[Command, list[str], Path | None, Path | None]:
    """Return a command, its command line, its output and its work folder."""
    command = chance.choice(COMMANDS)
    words, inputs, work = [], [], None
    for word in command.words.split():
        if word.startswith("@"):
            inputs.append(place / word[1:])
            word = spelled(inputs[-1], place, chance)
            if chance.random() < 0.02:
                word = chance.choice([str(place / "none"), str(place / "mine.txt"), str(place / "mine")])
        elif word == "%":
            work = chance.choice([place / "work", place / "work", place / "empty", *inputs, place / "fit" / "new"])
            word = spelled(work, place, chance)
        words.append(word)
    out = None
    if command.whole is not None:
        near = [path for path in inputs if words[0] not in SLOW or path.is_dir()]
        out = choose_out([*near, work] if work else near, place, chance)
        if words[0] in SLOW and not out.is_relative_to(place / "pair"):
            out = place / chance.choice(["pair", "pair/new", ".", "mine", "mine.txt", "mixed"])
        told = spelled(out, place, chance) if out.is_relative_to(place) else str(out)
        words += ["--out", told]
        words += ["--overwrite"] * (chance.random() < 0.7)
    words += [flag for flag in command.flags if chance.random() < 0.4]
    if chance.random() < 0.08:
        words += chance.choice(WRONG).replace("@", f"{place}/").split()
    return command, words, out, work


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Work in another folder for a while."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run(words: list[str], apart: bool) -> Answer:
    """Run a command line, in this process or in one of its own."""
    if not apart:
        return cli(*words)
    code = "from specstop.cli.main import run; run()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)


def faults_of(
    place: Path,
    before: dict[str, bytes | str | None],
    command: Command,
    answer: Answer,
    out: Path | None,
    work: Path | None,
) -> Iterator[str]:
    """Yield what is wrong with an answer, and with what the command has done to the folder."""
    after = contents(place)
    changed = {name for name in (*before, *after) if before.get(name, b"none") != after.get(name, b"none")}
    changed |= set(before) ^ set(after)
    if any(STAGE_PREFIX in name for name in after):
        yield f"left half-written: {[name for name in after if STAGE_PREFIX in name][:3]}"
    if answer.code == 2:
        lines = [line for line in answer.err.splitlines() if not PROGRESS.match(line)]
        if len(lines) != 1 or not lines[0].startswith("specstop: "):
            yield f"not one line: {answer.err[-300:]!r}"
        if changed:
            yield f"refused, and yet changed {sorted(changed)[:4]}"
        return
    if answer.code != 0:
        yield f"exit code {answer.code}: {answer.err[-300:]!r}"
        return
    reals = [Path(os.path.realpath(path)) for path in (out, work) if path is not None]
    reals += [path.with_name(path.name + ".run.yaml") for path in reals]
    for name in sorted(changed):
        path = place / name
        if not any(path.is_relative_to(real) or real.is_relative_to(path) for real in reals):
            yield f"changed {name}"
        elif name in before and before[name] is not None and not name.startswith("old/"):
            yield f"changed {name}, which was there before"
    if out is not None and command.whole is not None and changed:
        try:
            command.whole(Path(os.path.realpath(out)))
        except Exception as error:  # whatever it is, the result is not whole
            yield f"not whole: {type(error).__name__}: {str(error)[:200]}"


def attack(count: int, seed: int, room: Path) -> tuple[Counter[str], list[str]]:
    """Run `count` command lines; return how often what happened, and the faults found."""
    place = furnish(room / "first" / "place")
    first = shutil.copytree(place, room / "copy", symlinks=True)
    before = contents(place)
    seen: Counter[str] = Counter()
    faults = []
    for number in range(count):
        chance = random.Random(f"{seed}-{number}")
        command, words, out, work = build(place, chance)
        # What `datasets` keeps of a folder of prompts is its own affair, and goes where it is told to.
        home = {"HOME": str(place / "home"), "HF_HOME": str(room / "cache")}
        with mock.patch.dict(os.environ, home), working_in(place / "here"):
            answer = run(words, number % OWN_PROCESS == OWN_PROCESS - 1)
            found = list(faults_of(place, before, command, answer, out, work))
        faults += [f"{number} {' '.join(words)}: {fault}" for fault in found]
        seen[f"{words[0]}: {'fault' if found else {0: 'done', 2: 'refused'}.get(answer.code)}"] += 1
        if contents(place) != before:
            renew(place, first)
    return seen, faults
