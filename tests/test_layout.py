"""The package on disk: rooms, what pyproject lists, and which way imports run."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import re
import sys
from pathlib import Path

import pytest
import specstop.cli
import specstop.collect
import specstop.decode
import specstop.policies
import specstop.train

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ROOMS = ("policies", "decode", "collect", "train", "cli")  # each imports from those before it only
TRAIN = (
    "released",
    "replay",
    "heads",
    "drafters",
    "fit",
    "evaluate",
    "export",
    "demo",
)  # the same inside `train`
RETIRED = (
    "abreast|clairvoyant|comes by|crew|crosses|dear|dearer|dearest|forms|gap closed|gauged?|guarded_?runner|heats?|"
    "in plain numbers|informed|made_(?:head|profile|rows|trace)|metered|mood|put right|refits?|ruling|seconds to go|"
    "shelves|slot_?layer|stranger'?s?|take_charge|togo|tree_gauge|vector_(?!norm)\\w+|(?<!\")vectors|verdicts|walked|ways|zoo"
)
"""Words for which the field has better ones."""
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return (dotted module, whether it was written relatively) of each import statement."""
    here = ["specstop", *path.relative_to(ROOT).with_suffix("").parts]
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(name.name, False) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            found += [(".".join([*module, name.name]), bool(node.level)) for name in node.names]
    return found


def test_pyproject_lists_every_package_on_disk() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {f"specstop.{relative(p.parent).replace('/', '.')}" for p in FILES if p.name == "__init__.py"}
    with_code = {f"specstop.{relative(p.parent).replace('/', '.')}" for p in FILES}
    assert set(setuptools["packages"]) == {"specstop", *on_disk} and on_disk == with_code
    assert setuptools["package-dir"]["specstop"] == "src/specstop"
    for room in ROOMS:
        assert setuptools["package-dir"][f"specstop.{room}"] == room


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_the_installed_one(room: str) -> None:
    """Installed or editable: the files are the same, and no top-level twin was imported."""
    here, installed = ROOT / room, Path(getattr(specstop, room).__file__).parent
    assert {p.name for p in here.glob("*.py")} == {p.name for p in installed.glob("*.py")}
    assert room not in sys.modules


def test_imports_run_one_way_and_are_relative() -> None:
    for path in FILES:
        room = path.relative_to(ROOT).parts[0]
        allowed = ROOMS[: ROOMS.index(room) + 1]
        for module, is_relative in imports(path):
            first, *rest = module.split(".")
            assert first not in ROOMS, f"{relative(path)}: {module} would be a twin of specstop.{module}"
            if first == "specstop":
                assert is_relative, f"{relative(path)}: {module}: imports inside the package are relative"
                assert rest[0] in allowed, f"{relative(path)}: {room} may not import {module}"


def test_imports_inside_train_run_one_way() -> None:
    inside = [path for path in FILES if relative(path).startswith("train/") and relative(path).count("/") > 1]
    assert len(inside) > 50
    for path in inside:
        room = path.relative_to(ROOT).parts[1]
        for module, _ in imports(path):
            if module.startswith("specstop.train."):
                assert module.split(".")[2] in TRAIN[: TRAIN.index(room) + 1], (
                    f"{relative(path)} may not import {module}"
                )


def test_no_two_modules_import_each_other() -> None:
    names = {
        ".".join(["specstop", *p.relative_to(ROOT).with_suffix("").parts]) for p in FILES if p.name != "__init__.py"
    }
    graph = {}
    for path in FILES:
        own = ".".join(["specstop", *path.relative_to(ROOT).with_suffix("").parts])
        if own in names:
            targets = {m for m, _ in imports(path)} | {m.rpartition(".")[0] for m, _ in imports(path)}
            graph[own] = (targets & names) - {own}
    assert sum(map(len, graph.values())) > 30
    graphlib.TopologicalSorter(graph).prepare()


def test_no_module_is_imported_under_a_second_name() -> None:
    twins = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file) in FILES and not name.startswith("specstop."):
            twins.append(name)
    assert twins == []


def test_library_rooms_do_not_print() -> None:
    for path in (path for path in FILES if path.relative_to(ROOT).parts[0] != "cli"):
        calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        prints = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("print", "breakpoint")]
        assert not prints, f"{relative(path)}: {prints}"


def test_a_module_says_what_it_is_and_stays_short() -> None:
    for path in FILES:
        assert ast.get_docstring(parsed(path)), relative(path)
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, relative(path)


def test_a_folder_holds_few_modules() -> None:
    count = collections.Counter(relative(path.parent) for path in FILES if path.name != "__init__.py")
    top = {"policies": 28, "decode": 16}
    assert {folder: n for folder, n in count.items() if n > top.get(folder, 14)} == {}


def test_words_are_the_fields() -> None:
    """Words that no paper uses crept in once; none comes back, in a name, a message or a page."""
    word = re.compile(rf"(?<![a-z])({RETIRED})(?![a-z])", re.IGNORECASE)
    pages = [
        *FILES,
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("benchmarks/**/*.py"),
    ]
    found = [
        f"{relative(page)}:{number}: {line.strip()}"
        for page in pages
        if page.name not in ("CHANGELOG.md", Path(__file__).name)
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if word.search(line)
    ]
    assert not found, "\n".join(found)
