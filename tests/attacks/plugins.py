"""Misbehaving plugins: each is refused in one line, or reported once and replaced while the text stays what it was.

A misbehaviour is a package with an entry point, in a folder of its own on `sys.path`. It is met three times: by the list
(`specstop policies`), in replay, and live (`specstop decode`, a chain and a tree in turn). What each of them has to answer
is stated beside the misbehaviour. In every mode standard output is one JSON document or empty, and nothing is a traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import random
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from specstop.cli.main import run
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.models.pair import load_pair
from specstop.policies.costs import CostTable
from specstop.policies.errors import PolicyError
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays

from .random_pair import PROMPTS, save_pair

MODES = ("listing", "replay", "live")
REFUSED, FAILS, WORKS = "refused", "fails", "works"
"""What a policy can come to: it is not taken; it is, and fails when it is asked; or all goes well."""

SAYS = "PLUGIN SAYS"
"""What plugins print: the only lines on standard error that are not ours."""

CLASS = """
import os, random, sys, warnings
import numpy as np
import torch
from specstop.policies import StopPolicy

class Odd(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

{at_import}

class Mine(StopPolicy):
    features, max_depth, name = ("top1",), 4, "mine"

    def keep(self, step, state):
        return step.alive & (step.depth < 2), state

{body}
"""

RAISED = (
    "raise SystemExit", "raise SystemExit(0)", "sys.exit('bye')", "raise GeneratorExit", "raise StopIteration", "raise Odd",
    "raise Odd('out')", "raise Mute", "raise RuntimeError('two\\nlines \\x1b[2J \\udfff')", "1 / 0", "import no_such_module",
    "assert False", "raise MemoryError", "raise UserWarning('w' * 5000)", "[].pop()",
)  # fmt: skip
PRINTED = (f"print('{SAYS} hello')", f"sys.stdout.write('{SAYS} x\\n')", f"print('{SAYS} a', flush=True)")
ATTRIBUTES = (
    "features = 'top1'", "features = None", "features = 5", "features = ('entrpy',)", "features = ('top1', 'top1')",
    "features = (1,)", "features = {'top1': 1}", "features = property(lambda self: 1 / 0)", "hidden = 'draft_hidden'",
    "hidden = None", "hidden = ('state',)", "max_depth = '4'", "max_depth = -1",
    "max_depth = 2.5", "max_depth = None", "max_depth = True", "max_depth = property(lambda self: 4)", "first = -1",
    "first = '0'", "first = 0.5", "first = None", "name = ''", "name = None", "name = 7", "name = 'a\\nb'",
    "name = '\\udfff'", "trims = 1", "trims = 'no'", "carries = None", "reads_clock = 'never'", "joint = 2", "keep = None",
    "start = 3", "select = 'all'", "observe = []", "limited = lambda self, depth: None",
    "limited = lambda self, depth: sys.exit()", "sizes = 3",
)  # fmt: skip
MADE = (
    "Mine = 5", "Mine = None", "Mine = os.getpid", "def Mine(): return None", "class Mine: pass", "del Mine", "Mine = Mine()",
    "def Mine(): return type(StopPolicy())", "from dataclasses import dataclass\nMine = dataclass(frozen=True)(Mine)",
)  # fmt: skip
ANSWERS = (
    "None", "step.alive", "(None, state)", "(float('nan'), state)", "(step.alive.astype(int), state)",
    "(step.alive * float('nan'), state)", "(step.alive[:, :, None], state)", "(step.alive[:0], state)",
    "(torch.from_numpy(step.alive), state)", "(step.alive.astype(object), state)", "(step.alive, state, 1)",
    "([True], state)",
)  # fmt: skip
ITSELF = ("self.trims = True", "self.first = None", "self.max_depth = 'x'", "type(self).first = -1")


@dataclass(frozen=True)
class Case:
    """A misbehaviour: its module, what each mode has to come to, and the names it is registered under."""

    what: str
    source: str
    listing: str = WORKS
    replay: str = WORKS
    live: str = WORKS
    entries: dict[str, str] = field(default_factory=lambda: {"mine": "Mine"})


def _module(at_import: str = "", body: str = "", after: str = "") -> str:
    return CLASS.format(at_import=at_import, body=textwrap.indent(body, "    ")) + after


def _method(name: str, statement: str, returns: str) -> str:
    """Return a method that does something before it answers."""
    takes = {
        "__init__": "self",
        "start": "self, streams, keys",
        "keep": "self, step, state",
        "select": "self, tree, state",
    }
    return f"def {name}({takes.get(name, 'self, outcome, state')}):\n    {statement}\n    return {returns}"


KEPT = "step.alive & (step.depth < 2), state"
METHODS = {"start": "None", "keep": KEPT, "select": "None", "observe": "state"}


def _cases() -> Iterator[Case]:
    refused = {"listing": REFUSED, "replay": REFUSED, "live": REFUSED}
    fails = {"replay": FAILS, "live": FAILS}
    yield Case("a syntax error", "def broken(:", **refused)
    for statement in RAISED:
        yield Case(f"import: {statement}", _module(statement), **refused)
    for statement in RAISED[::2]:
        yield Case(f"__init__: {statement}", _module(body=_method("__init__", statement, "None")), **refused)
    for statement in PRINTED:
        yield Case(f"import: {statement}", _module(statement))
        yield Case(f"__init__: {statement}", _module(body=_method("__init__", statement, "None")))
    for statement in ATTRIBUTES:
        yield Case(f"attribute: {statement}", _module(body=statement), **refused)
    for statement in MADE:
        yield Case(f"entry point: {statement}", _module(after=statement), **refused)
    for at, (method, returns) in enumerate(METHODS.items()):
        for statement in RAISED if method == "keep" else RAISED[at::4]:
            yield Case(f"{method}: {statement}", _module(body=_method(method, statement, returns)), **fails)
        for statement in PRINTED if method == "keep" else PRINTED[:1]:
            yield Case(f"{method}: {statement}", _module(body=_method(method, statement, returns)))
    yield Case("no keep of its own", _module(body="keep = StopPolicy.keep"), **fails)
    for statement in ITSELF:
        yield Case(f"keep: {statement}", _module(body=_method("keep", statement, KEPT)))
    for answer in ANSWERS:
        yield Case(f"keep answers {answer}", _module(body=_method("keep", "pass", answer)), **fails)
    for answer in ("tree.drawn[:, :1]", "tree.drawn.astype(int)", "tree", "True"):
        yield Case(f"select answers {answer}", _module(body=_method("select", "pass", answer)), **fails)
    for method, statement, returns in (
        ("keep", "self.features = ()", KEPT),
        ("keep", "self.name = None", KEPT),
        ("keep", "step.alive.fill(True); step.features.fill(0)", "~step.alive, state"),
        ("keep", "np.logical_not(step.alive, out=step.alive)", "np.ones_like(step.alive), state"),
        ("keep", "step.parent.fill(99)", KEPT),
        ("keep", "pass", "step.alive, state"),
        ("select", "tree.tokens.fill(7); tree.parent.fill(99); tree.depth.fill(0)", "None"),
        ("select", "np.logical_not(tree.drawn, out=tree.drawn)", "np.ones_like(tree.drawn)"),
        ("select", "pass", "tree.depth != 1"),
        ("observe", "[v.fill(0) for v in vars(outcome).values()]", "state"),
    ):
        yield Case(f"{method} writes: {statement}", _module(body=_method(method, statement, returns)))
    for name in ("fixed", "entropy", "bandit", "a b", "a/b", "ä"):
        yield Case(f"named {name!r}", _module(), **refused, entries={name: "Mine"})
    yield Case("a name twice", _module(), **refused, entries={"mine": "Mine", "other:mine": "Mine"})


CASES = tuple(_cases())
COUNT, QUICK = len(CASES), 30
"""Misbehaviours in a full run, each once, and in a quick one; every one in three modes."""


@contextlib.contextmanager
def installed(case: Case, folder: Path) -> Iterator[None]:
    """Put the package, as an installer leaves it, on the path."""
    module = folder.name
    folder.mkdir()
    (folder / f"{module}.py").write_text(case.source, encoding="utf-8")
    for name, target in case.entries.items():
        package, _, entry = name.rpartition(":")
        info = folder / f"{module}{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}{package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[specstop.policies]\n{entry} = {module}:{target}\n", encoding="utf-8")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(module, None)


def command(*arguments: str) -> tuple[int, str, str]:
    """Run `specstop` in this process; return its exit code and what it printed."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["specstop", *arguments]),
        mock.patch.dict(os.environ),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue(), err.getvalue()


class Room:
    """A pair, a trace and the answers of a policy that behaves: what every case is compared with."""

    def __init__(self, folder: Path) -> None:
        save_pair(folder / "pair")
        self.folder = folder
        pair = load_pair(folder / "pair" / "target", folder / "pair" / "draft", dtype="float64")
        prompts = [Prompt(f"p{i}", text, "g") for i, text in enumerate(PROMPTS)]
        trace = collect(
            pair, prompts, folder / "traces", depth=4, temperature=0.7, verification="match", max_new_tokens=12
        )
        low, high = (CostTable(at, (1e-3, 1e-3), 1e-5, (4e-3, 4e-3, 5e-3, 5e-3, 6e-3)) for at in (8.0, 40.0))
        self.arrays: TraceArrays = trace_arrays(trace)
        self.profile = Profile(low, high, 1e-5, 1e-4, (5e-3, 1e-4))
        self.tokens = replay(self.arrays, load_policy("fixed:2"), self.profile).tokens
        self.texts = {tree: self.decode("fixed:0", tree)[1] for tree in ("", "2,2,1")}

    def decode(self, policy: str, tree: str) -> tuple[int, str, str]:
        """Decode the prompts."""
        pair = [f"--{side}={self.folder / 'pair' / side}" for side in ("target", "draft")]
        how = ["--dtype=float64", "--temperature=0.7", "--verification=match", "--max-new-tokens=12", "--json"]
        return command("decode", *PROMPTS, *pair, *how, f"--policy={policy}", *([f"--tree={tree}"] if tree else []))

    def listing(self, name: str, tree: str) -> str:
        """Say what `specstop policies` makes of it."""
        code, out, err = command("policies", "--json")
        if code or own_lines(err):
            return f"exit {code}: {err!r}"
        lines = {(p["name"], p["where"]): p for p in json.loads(out)}
        mine = [p for (n, where), p in lines.items() if n == name]
        others = [p for (n, where), p in lines.items() if n != name]
        if not mine or not all(p["loads"] for p in others) or len(others) < 15:
            return "the list is not what it should be"
        return WORKS if all(p["loads"] for p in mine) else REFUSED if all(p["problem"] for p in mine) else "half of it"

    def replay(self, name: str, tree: str) -> str:
        """Say what replay makes of it."""
        out, err, found = io.StringIO(), io.StringIO(), WORKS
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                policy = load_policy(name)
                try:
                    tokens = replay(self.arrays, policy, self.profile).tokens
                    found = WORKS if torch.equal(tokens, self.tokens) else "other texts"
                except PolicyError as error:
                    found = FAILS if is_line(error) else f"not a line: {error}"
            except PolicyError as error:
                found = REFUSED if is_line(error) else f"not a line: {error}"
        quiet = not own_lines(out.getvalue()) and not own_lines(err.getvalue())
        return found if quiet else f"printed {out.getvalue()!r}, {err.getvalue()!r}"

    def live(self, name: str, tree: str) -> str:
        """Say what decoding makes of it."""
        code, out, err = self.decode(name, tree)
        lines = own_lines(err)
        if code == 2:
            one = len(lines) == 1 and lines[0].startswith("specstop: --policy: ") and not out
            return REFUSED if one else f"exit 2: {out!r} {err!r}"
        if code:
            return f"exit {code}: {err!r}"
        if json.loads(out)["texts"] != json.loads(self.texts[tree])["texts"]:
            return "another text"
        if not lines:
            return WORKS
        one = len(lines) == 1 and lines[0].startswith("warning: policy mine failed (")
        return FAILS if one and "; using fixed:" in lines[0] else f"said {lines}"


def own_lines(err: str) -> list[str]:
    """Return the lines on standard error that no plugin has written."""
    return [line for line in err.splitlines() if line and not line.startswith(SAYS)]


def is_line(error: Exception) -> bool:
    """Whether an error is one line that a user can read."""
    text = str(error)
    return text.isprintable() and 0 < len(text) < 1500


def meet(case: Case, number: int, made: Room, room: Path) -> Iterator[tuple[str, str]]:
    """Yield by mode what a misbehaviour came to."""
    name, tree = next(iter(case.entries)), "2,2,1" if number % 2 else ""
    with installed(case, room / f"plugin_{number}"):
        for mode in MODES:
            try:
                found: str = getattr(made, mode)(name, tree)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever it is, it is a fault
                found = f"crashed: {type(error).__name__}: {error}"
            sys.modules.pop(f"plugin_{number}", None)  # else a mode would meet what the one before has made of it
            yield mode, found


def attack(count: int, seed: int, room: Path) -> tuple[Counter[str], list[str]]:
    """Meet `count` of the misbehaviours in three modes; return how often what happened, and the faults found."""
    torch.set_num_threads(1)
    chance, made = random.Random(f"plugins-{seed}"), Room(room)
    order = [at % len(CASES) for at in range(count)]
    if count < len(CASES):
        order = sorted(chance.sample(range(len(CASES)), count))
    seen, faults = Counter[str](), []
    for number, at in enumerate(order):
        case = CASES[at]
        for mode, found in meet(case, number, made, room):
            expected = getattr(case, mode)
            if found != expected:
                faults.append(f"{case.what}; {mode}: expected {expected}, found {found[:300]}")
            seen[f"{mode}: {expected if found == expected else 'wrong'}"] += 1
    return seen, faults
