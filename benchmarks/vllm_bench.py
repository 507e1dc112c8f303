"""What the parts of `vllm.py` work with: the pair, and a folder for what commands of ours make on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bars import Bars
from specstop.policies.files import write_json
from vllm_engine import ENVIRONMENT

COMMAND = (sys.executable, "-c", "import sys; from specstop.cli.main import run; sys.exit(run())")
SIZES, PROMPTS, TOKENS, DEPTH = (1, 4, 8, 16), 40, 128, 8


@dataclass(frozen=True)
class Bench:
    """What parts work with.

    Attributes:
        bars: where figures go.
        folder: of the pair.
        room: for what is made on the way.
        rounds: of each comparison of speeds.
    """

    bars: Bars
    folder: Path
    room: Path
    rounds: int

    def prompts(self, count: int = PROMPTS) -> list[str]:
        """Return texts of test prompts."""
        lines = (self.folder / "prompts-test.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt"] for line in lines[:count]]

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the JSON value of this name that the room keeps, made where there is none: what was cut off goes on."""
        path = self.room / "kept" / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_json(path, make())
        return json.loads(path.read_text(encoding="utf-8"))

    def run(self, name: str, *words: object) -> Path:
        """Return what a command of ours writes into the room, made where it is not there."""
        out, models = self.room / name, ("--target", self.folder / "target", "--draft", self.folder / "draft")
        if not out.exists():
            print(f"      {name}: specstop {words[0]} ...", flush=True)
            pair = models if words[0] in ("collect", "profile") else ()
            told = [*COMMAND, *words, *pair, "--out", out, *(["--quiet"] if words[0] != "import" else [])]
            ran = subprocess.run([*map(str, told)], capture_output=True, text=True, env=os.environ | ENVIRONMENT)
            if ran.returncode:
                raise RuntimeError(f"specstop {words[0]} ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
        return out

    def profile(self, drafter: str = "model") -> Path:
        """Return the engine's profile with a drafter."""
        where = self.folder / "prompts-train.jsonl"
        return self.run(
            f"engine{_mark(drafter)}.json", "profile", "--through", "vllm", "--prompts", where, "--depth", DEPTH,
            "--batch", ",".join(map(str, SIZES)), "--budget", 240, "--drafter", drafter,
        )  # fmt: skip

    def policy(self, rule: str = "", drafter: str = "model") -> str:
        """Return a policy trained on the pair's training prompts for the engine's costs; of a rule, and for a drafter."""
        traces = self.run(
            f"traces{_mark(drafter)}", "collect", "--prompts", self.folder / "prompts-train.jsonl", "--limit", 160,
            "--depth", DEPTH, "--drafter", drafter, "--max-new-tokens", TOKENS,
        )  # fmt: skip
        more = ("--rule", rule) if rule else ()
        words = ("train", "--traces", traces, "--profile", self.profile(drafter), "--for", "vllm", *more)
        return str(self.run(f"{rule or 'policy'}{_mark(drafter)}", *words))


def _mark(drafter: str) -> str:
    """Return what is added to the names of what is made with a drafter."""
    return "" if drafter == "model" else f"-{drafter.partition('?')[0]}"
