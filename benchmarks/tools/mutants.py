"""Mutation test: the share of small random changes of product code that the tests notice.

    pip install coverage pytest-cov
    python benchmarks/tools/mutants.py --count 200 --out mutants.json
    python benchmarks/tools/mutants.py --files policies/rules.py --count 25 --tests ../before/tests

All tests run once under coverage, in a copy of the checkout. For each mutant, one expression or statement is changed,
and tests that execute the changed line run with `pytest -x`: the cheapest of each file, then the second of each file,
up to `--budget` seconds. A mutant is killed if a test fails or takes three times as long as before plus 30 s. Mutants
depend on `--seed`, `--count` and the product files only, so that two sets of tests (`--tests`) are compared on the same
mutants. Some are equivalent to the original code: the share killed is for comparisons and never reaches 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "decode/rounds.py",
    "decode/verify",
    "policies/rules.py",
    "policies/learned.py",
    "train/replay",
    "train/evaluate/statistics.py",
)
"""Product files and folders that are mutated by default."""

PRELOADED = ("torch", "transformers.models.llama.modeling_llama", "lightning", "xgboost", "numba", "sklearn")
"""Modules that are imported once, before the tests of the mutants run in forks."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
SKIPPED = ("decorator_list", "annotation", "returns", "type_params")
"""Fields of syntax nodes without behaviour that a test could see."""


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of a file and their replacement."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str


def replacements(node: ast.AST) -> Iterator[str]:
    """Yield source texts that can replace a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.unparse(ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        yield ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from (repr(node.value + 1), repr(node.value - 1))
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        head = ast.unparse(node.func)
        if name in CALLS:
            yield head[: len(head) - len(name)] + CALLS[name] + ast.unparse(node)[len(head) :]
        elif name == "where" and len(node.args) == 3:
            yield ast.unparse(ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords))
    elif isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)) or (
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)))
    ):
        yield "pass"


def nodes(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield each syntax node that can be mutated and whether it is the condition of an `if`."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            # Strings with expressions are messages, and their parts have no positions before Python 3.12.
            if field in SKIPPED or not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child, field == "test" and isinstance(node, (ast.If, ast.IfExp))
            yield from nodes(child)


def mutants_of(file: str) -> list[Mutant]:
    """Return every mutant of a file."""
    source = (ROOT / file).read_bytes()
    offsets = [0]
    for text in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(text))
    result = []
    for node, is_condition in nodes(ast.parse(source)):
        for after in [*replacements(node), *(("True", "False") if is_condition else ())]:
            start = offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            after = after if isinstance(node, (ast.stmt, ast.Constant)) and after != "-1" else f"({after})"
            result.append(Mutant(file, node.lineno, start, end, source[start:end].decode(), after))  # type: ignore[attr-defined]
    return result


def draw(paths: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return random mutants of files and folders, in the order of their lines."""
    files = []
    for path in paths:
        matches = [ROOT / path] if (ROOT / path).is_file() else sorted((ROOT / path).rglob("*.py"))
        if not matches:
            raise SystemExit(f"expected Python files at {ROOT / path}, got none; pass others with --files")
        files += [str(file.relative_to(ROOT)) for file in matches]
    candidates = [mutant for file in dict.fromkeys(files) for mutant in mutants_of(file)]
    drawn = random.Random(seed).sample(candidates, min(count, len(candidates)))
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.start, mutant.after))


class Selection:
    """The tests of each line of the product, from one run of all tests under coverage."""

    def __init__(self, worker: Worker) -> None:
        import coverage

        data_file = worker.root.parent / "coverage"
        command = [sys.executable, "-m", "pytest", "-q", "-n2", "-p", "no:cacheprovider", "--durations=0", "-vv"]
        command += [f"--cov={worker.root / path.split('/')[0]}" for path in FILES]
        command += ["--cov-context=test", "--cov-report="]
        environment = {**worker.environment, "COVERAGE_FILE": str(data_file)}
        done = subprocess.run(command, cwd=worker.root, env=environment, capture_output=True, text=True)
        failing = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", done.stdout, re.MULTILINE)
        if done.returncode and (done.returncode > 1 or not failing):
            raise SystemExit(f"expected tests that run, got:\n{done.stdout[-3000:]}")
        if failing:
            print(f"not used, as they fail without a change: {', '.join(failing)}", file=sys.stderr, flush=True)
        self.root, self.data = worker.root, coverage.CoverageData(str(data_file))
        self.data.read()
        self.failing = set(failing)
        self.seconds: dict[str, float] = {}
        for seconds, test in re.findall(r"^([\d.]+)s \w+ +(tests/.*\S)", done.stdout, re.MULTILINE):
            self.seconds[test] = self.seconds.get(test, 0) + float(seconds)

    def tests_of(self, mutant: Mutant, budget_s: float) -> tuple[list[str], float]:
        """Return the tests of a mutant and their seconds. Lines without a test of their own get those of the file."""
        contexts = self.data.contexts_by_lineno(str(self.root / mutant.file))
        lines = [contexts.get(mutant.line, [])]
        if not any(lines[0]):
            lines = list(contexts.values())
        tests = {context.split("|")[0] for line in lines for context in line if context} - self.failing
        ranks: dict[str, int] = {}
        order = []
        for test in sorted(tests, key=lambda test: (self.seconds.get(test, 0), test)):
            file = test.split("::")[0]
            ranks[file] = ranks.get(file, -1) + 1
            order.append((ranks[file], self.seconds.get(test, 0), test))
        chosen, total = [], 0.0
        for _, seconds, test in sorted(order):
            if not chosen or total + seconds <= budget_s:
                chosen.append(test)
                total += seconds
        return chosen, total


def link_packages(root: Path, site: Path) -> None:
    """Create a folder from which the packages of a checkout are imported, instead of installed ones."""
    (site / "specstop").mkdir(parents=True)
    for path in [*(root / "src" / "specstop").iterdir(), *(init.parent for init in root.glob("*/__init__.py"))]:
        (site / "specstop" / path.name).symlink_to(path)


class Worker:
    """A copy of a checkout in which mutants are tested one after the other."""

    def __init__(self, folder: Path, tests: Path) -> None:
        self.log = folder / "output.txt"
        self.root, self.site = folder / "tree", folder / "site"
        ignore = shutil.ignore_patterns(".*", "__pycache__", "build")
        shutil.copytree(ROOT, self.root, ignore=ignore)
        shutil.rmtree(self.root / "tests", ignore_errors=True)
        shutil.copytree(tests, self.root / "tests", ignore=ignore)
        link_packages(self.root, self.site)
        self.environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.environment["PYTHONPATH"] = os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")])
        self.environment.setdefault("NUMBA_CACHE_DIR", str(folder / "numba"))

    def _run_pytest(self, tests: Sequence[str]) -> None:
        os.setsid()
        os.chdir(self.root)
        os.environ.update(self.environment)
        sys.path[:0] = [str(self.site), str(self.root)]
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]))

    def test(self, tests: Sequence[str], limit_s: float) -> str:
        """Run tests in a fork, which saves the imports, and return `passed`, `failed` or `timeout`."""
        process = multiprocessing.get_context("fork").Process(target=self._run_pytest, args=(tests,))
        process.start()
        process.join(limit_s)
        result = "timeout" if process.is_alive() else "failed" if process.exitcode else "passed"
        with contextlib.suppress(ProcessLookupError):  # tests start processes, which must not outlive a mutant
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return result

    def try_mutant(self, mutant: Mutant, tests: Sequence[str], limit_s: float) -> str:
        """Return the result of the tests with a mutant in the file."""
        path = self.root / mutant.file
        source = path.read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
        try:
            return self.test(tests, limit_s) if tests else "passed"
        finally:
            path.write_bytes(source)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=FILES, help="product files or folders, relative to the checkout")
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests per mutant")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of tests")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    mutants, results = draw(options.files, options.count, options.seed), list[str]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        worker = Worker(Path(folder), options.tests.resolve())
        selection = Selection(worker)
        for name in PRELOADED:
            importlib.import_module(name)
        for mutant in mutants:
            chosen, seconds = selection.tests_of(mutant, options.budget)
            results.append(worker.try_mutant(mutant, chosen, 3 * seconds + 30))
            change = f"{mutant.before!r} -> {mutant.after!r}"
            print(f"{results[-1]:8} {mutant.file}:{mutant.line}  {change}", file=sys.stderr, flush=True)
    print(f"{'file':<48}{'mutants':>8}{'killed':>8}{'share':>8}")
    survived = [mutant for mutant, result in zip(mutants, results, strict=True) if result == "passed"]
    for file in [*dict.fromkeys(mutant.file for mutant in mutants), "total"]:
        total = sum(file in (mutant.file, "total") for mutant in mutants)
        killed = total - sum(file in (mutant.file, "total") for mutant in survived)
        print(f"{file:<48}{total:>8}{killed:>8}{killed / max(total, 1):>8.3f}")
    for mutant in survived:
        print(f"survived: {mutant.file}:{mutant.line}  {mutant.before!r} -> {mutant.after!r}")
    line = {"seed": options.seed, "mutants": len(mutants), "killed": len(mutants) - len(survived)}
    if options.out:
        rows = [{**asdict(mutant), "result": result} for mutant, result in zip(mutants, results, strict=True)]
        options.out.write_text(json.dumps({**line, "tests": str(options.tests), "rows": rows}, indent=1) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
