"""Mutation test: the share of small random changes of product code that the tests notice.

    python benchmarks/tools/mutants.py --count 200 --jobs 2 --out mutants.json
    python benchmarks/tools/mutants.py --files policies/rules.py --count 25 --tests ../before/tests

Each worker copies the checkout to a temporary folder. For each mutant it changes one expression or statement of one
file, runs the tests of `TEST_FOLDERS` for that file with `pytest -x -n0`, and restores the file. A mutant is killed
if pytest fails or exceeds its time limit: three times the time of the unchanged code plus 30 s. The mutants depend on
`--seed`, `--count` and the product files only, so that two sets of tests (`--tests`) are compared on the same
mutants. A mutant can be equivalent to the original code. The share killed is therefore for comparisons and never
reaches 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

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

TEST_FOLDERS = {
    "decode/verify": ("decode/verify",),
    "decode/drafters": ("decode/drafters",),
    "decode/engines": ("decode/engines",),
    "decode/hf": ("decode/hf",),
    "decode/models": ("decode/models",),
    "decode/profile": ("decode/profile", "policies/costs"),
    "decode": ("decode/test_*.py", "decode/verify"),
    "policies/rules.py": ("policies/learned", "policies/batches", "train/replay"),
    "policies/learned.py": ("policies/learned", "policies/heads", "policies/test_storage.py", "train/replay"),
    "policies": ("policies",),
    "collect": ("collect",),
    "train/replay": ("train/replay",),
    "train/evaluate": ("train/evaluate",),
    "train": ("train",),
    "cli": ("cli",),
}
"""Test folders or patterns below `tests/` by prefix of the mutated file; the first prefix that matches is used."""

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


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Return every mutant of a file."""
    source = (root / file).read_bytes()
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


def draw(root: Path, paths: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return random mutants of files and folders, in the order of their lines."""
    files = []
    for path in paths:
        matches = [root / path] if (root / path).is_file() else sorted((root / path).rglob("*.py"))
        if not matches:
            raise SystemExit(f"expected Python files at {root / path}, got none; pass others with --files")
        files += [str(file.relative_to(root)) for file in matches]
    candidates = [mutant for file in dict.fromkeys(files) for mutant in mutants_of(root, file)]
    drawn = random.Random(seed).sample(candidates, min(count, len(candidates)))
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.start, mutant.after))


class Worker:
    """A copy of a checkout in which mutants are tested one after the other."""

    def __init__(self, folder: Path, root: Path, tests: Path) -> None:
        self.log = folder / "output.txt"
        self.root, site = folder / "tree", folder / "site" / "specstop"
        ignore = shutil.ignore_patterns(".*", "__pycache__", "build")
        shutil.copytree(root, self.root, ignore=ignore)
        shutil.rmtree(self.root / "tests", ignore_errors=True)
        shutil.copytree(tests, self.root / "tests", ignore=ignore)
        site.mkdir(parents=True)
        for path in [*(self.root / "src" / "specstop").iterdir(), *(p.parent for p in self.root.glob("*/__init__.py"))]:
            (site / path.name).symlink_to(path)
        self.environment = {**os.environ, "PYTHONPATH": str(site.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.environment.setdefault("NUMBA_CACHE_DIR", str(folder / "numba"))

    def test(self, paths: Sequence[str], limit_s: float | None = None) -> str:
        """Run tests and return `passed`, `failed` or `timeout`.

        The exit code of pytest is 1 for failed tests and 2 for an error during collection; both kill a mutant.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *paths]
        with open(self.log, "wb") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                return "failed" if process.wait(limit_s) else "passed"
            except subprocess.TimeoutExpired:
                return "timeout"
            finally:
                with contextlib.suppress(ProcessLookupError):  # tests start processes, which must not outlive a mutant
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def try_mutant(self, mutant: Mutant, paths: Sequence[str], limit_s: float) -> str:
        """Return the result of the tests with a mutant in the file."""
        path = self.root / mutant.file
        source = path.read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
        try:
            return self.test(paths, limit_s)
        finally:
            path.write_bytes(source)


def tests_for(file: str, tests: Path) -> list[str]:
    """Return the paths of the tests of a product file, relative to the checkout."""
    prefix = next((prefix for prefix in TEST_FOLDERS if file.startswith(prefix)), None)
    patterns = TEST_FOLDERS[prefix] if prefix else ("",)
    files = [f"tests/{path.relative_to(tests)}" for pattern in patterns for path in sorted(tests.glob(pattern or "*"))]
    if not files:
        raise SystemExit(
            f"expected tests of {file} at {', '.join(patterns)} below {tests}, got none; adapt TEST_FOLDERS"
        )
    return files


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=FILES, help="product files or folders, relative to --root")
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants")
    parser.add_argument("--jobs", type=int, default=1, help="number of workers, each with its copy of the checkout")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout with the product files")
    parser.add_argument("--tests", type=Path, help="folder of tests (default: tests/ of --root)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    root, tests = options.root.resolve(), (options.tests or options.root / "tests").resolve()
    mutants = draw(root, options.files, options.count, options.seed)
    selections = {mutant.file: tests_for(mutant.file, tests) for mutant in mutants}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for number in range(options.jobs):
            workers.put(Worker(Path(folder) / str(number), root, tests))
        limits: dict[tuple[str, ...], float] = {}
        first = workers.get()
        for paths in dict.fromkeys(tuple(paths) for paths in selections.values()):
            started = time.perf_counter()
            if first.test(paths) != "passed":
                raise SystemExit(f"expected passing tests before a change, got:\n{first.log.read_text()[-3000:]}")
            limits[paths] = 3 * (time.perf_counter() - started) + 30
        workers.put(first)

        def run(mutant: Mutant) -> str:
            worker, paths = workers.get(), tuple(selections[mutant.file])
            try:
                result = worker.try_mutant(mutant, paths, limits[paths])
            finally:
                workers.put(worker)
            print(f"{result:8} {mutant.file}:{mutant.line}  {mutant.before!r} -> {mutant.after!r}", file=sys.stderr)
            return result

        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(run, mutants))
    print(f"{'file':<48}{'mutants':>8}{'killed':>8}{'share':>8}")
    survived = [mutant for mutant, result in zip(mutants, results, strict=True) if result == "passed"]
    for file in [*selections, "total"]:
        total = sum(file in (mutant.file, "total") for mutant in mutants)
        killed = total - sum(file in (mutant.file, "total") for mutant in survived)
        print(f"{file:<48}{total:>8}{killed:>8}{killed / max(total, 1):>8.3f}")
    for mutant in survived:
        print(f"survived: {mutant.file}:{mutant.line}  {mutant.before!r} -> {mutant.after!r}")
    line = {"seed": options.seed, "mutants": len(mutants), "killed": len(mutants) - len(survived)}
    if options.out:
        rows = [{**asdict(mutant), "result": result} for mutant, result in zip(mutants, results, strict=True)]
        options.out.write_text(json.dumps({**line, "tests": str(tests), "rows": rows}, indent=1) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
