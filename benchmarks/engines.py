"""Exported files against the engines' own parsers, taken out of their published wheels.

    python benchmarks/engines.py --check
    python benchmarks/engines.py --check --wheels DIR    # wheels that were downloaded before

Traces and a profile of the shipped pair (or `--pair`) are exported under profiles that go from "a row more costs nothing" to
"a row more costs as much as the first". vLLM: `validate_and_normalize_dynamic_sd_schedule` and the lookup that the scheduler
builds from it, and the fields of `SpeculativeConfig`, extra ones forbidden as there. SGLang: the whole module
`adaptive_spec_params`, with stand-ins for what it imports, its loader on our file, its routing by batch size, and our rule
driven by its controller. Wheels are downloaded without dependencies into a cache folder, and two or three of
their Python files are read; the engines are not installed. `--quick` downloads nothing: a parser whose wheel is not there is
not asked. llama.cpp publishes no parser that runs here: its names are in
`train/export/engines.py` with their source. The last line is one JSON object; with `--check` the exit code is 1 where a bar
falls short.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import platformdirs
from bars import Bars, arguments
from pairs import pair_folder
from specstop.collect import collect, read_prompts
from specstop.collect.store import Trace
from specstop.decode import load_pair, measure_profile
from specstop.decode.engines import sglang as plugin
from specstop.decode.profile.measuring import Effort
from specstop.policies.costs import CostTable
from specstop.policies.profile import Profile
from specstop.train.export.deploy import deploy

GROWTH = (0.0, 0.002, 0.01, 0.03, 0.1, 0.3, 1.0)
"""What each row more costs, as a share of a verification of one row."""

MOST = 512
MOVES = 400
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
VLLM_PARSER, VLLM_CONFIG = "vllm/v1/spec_decode/dynamic/utils.py", "vllm/config/speculative.py"
SGLANG_ADAPTIVE = "sglang/srt/speculative/adaptive_spec_params.py"
SGLANG_STATE, SGLANG_HOOKS = "sglang/srt/speculative/adaptive_runtime_state.py", "sglang/srt/plugins/hook_registry.py"


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--wheels", type=Path, help="folder with the wheels; default: downloaded into the cache folder")
    options = parser.parse_args()
    vllm_files, sglang_files = (
        read_wheel(name, version, files, options.wheels, download=not options.quick)
        for name, version, files in (
            ("vllm", VERSIONS["vllm"], (VLLM_PARSER, VLLM_CONFIG)),
            ("sglang", VERSIONS["sglang"], (SGLANG_ADAPTIVE, SGLANG_STATE, SGLANG_HOOKS)),
        )
    )
    bars = Bars()
    figures: dict[str, Any] = dict(VERSIONS)
    bars.figures["figures"] = figures
    with tempfile.TemporaryDirectory() as scratch:
        traces, measured = record(pair_folder(options), Path(scratch))
        growth = GROWTH[1::3] if options.quick else GROWTH
        profiles = {"as measured": measured, **{f"growth {g:g}": growing(measured, g) for g in growth}}
        figures["vllm files"] = tables = {}
        figures["sglang files"] = rules = {}
        for name, profile in profiles.items():
            folder = Path(scratch) / name.replace(" ", "-")
            deploy("vllm", folder / "vllm", traces=traces, profile=profile)
            deploy("sglang", folder / "sglang", traces=traces, profile=profile)
            if vllm_files:
                tables[name] = run(
                    "vLLM",
                    name,
                    bars.missed,
                    lambda at=folder: check_vllm(vllm_files, at / "vllm"),
                )
            if sglang_files:
                rules[name] = run(
                    "SGLang",
                    name,
                    bars.missed,
                    lambda at=folder: check_sglang(sglang_files[SGLANG_ADAPTIVE], at / "sglang"),
                )
                run(
                    "SGLang",
                    f"plugin, {name}",
                    bars.missed,
                    lambda at=folder: check_plugin(sglang_files, at / "sglang"),
                )
    different = len({json.dumps(table) for table in tables.values()})
    if different < min(3, len(tables)):
        bars.missed.append(f"only {different} different tables were compared")
    for text in bars.missed:
        print(f"short of the bar: {text}")
    compared = (
        f"{len(tables)} exports for vLLM {VERSIONS['vllm']} ({different} different tables, batches 1 to {MOST}), "
        f"{len(rules)} for SGLang {VERSIONS['sglang']}"
    )
    return bars.finish(options, compared)


def run(engine: str, name: str, missed: list[str], check: Callable[[], Any]) -> Any:
    """Return what a check found; what its parser refuses goes on the list."""
    try:
        return check()
    except Exception as error:  # a parser may raise anything
        missed.append(f"{engine} refuses the export ({name}): {type(error).__name__}: {error}")
        return None


def read_wheel(
    name: str, version: str, files: tuple[str, ...], folder: Path | None, download: bool
) -> dict[str, str] | None:
    """Return the text of some files of a wheel; where it is not there it is downloaded, or there are none."""
    where = folder or Path(platformdirs.user_cache_dir("specstop")) / "wheels"
    where.mkdir(parents=True, exist_ok=True)
    kept = where / f"{name}-{version}-read"
    if not all((kept / file).is_file() for file in files):
        wheels = sorted(where.glob(f"{name}-{version}-*.whl"))
        if not wheels and not download:
            print(f"no wheel of {name} {version} in {where}, and --quick downloads none: its parser is not asked")
            return None
        if not wheels:
            print(f"downloading {name} {version}", flush=True)
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                f"{name}=={version}",
                "-d",
                str(where),
            ]
            subprocess.run(command, check=True)
            wheels = sorted(where.glob(f"{name}-{version}-*.whl"))
        with zipfile.ZipFile(wheels[0]) as wheel:
            for file in files:
                wheel.extract(file, kept)
    return {file: (kept / file).read_text(encoding="utf-8") for file in files}


def record(folder: Path, scratch: Path) -> tuple[Trace, Profile]:
    """Return traces and a profile of a pair, small ones: only their use is checked here, not their worth."""
    pair = load_pair(folder / "target", folder / "draft")
    prompts = read_prompts(folder / "prompts-train.jsonl", 24)
    traces = collect(pair, prompts, scratch / "traces", depth=8, max_new_tokens=64, temperature=0.0)
    ids = [pair.tokenizer(prompt.text).input_ids for prompt in prompts[:8]]
    return traces, measure_profile(pair, ids, depth=8, new_tokens=32, effort=Effort(repetitions=1))


def growing(profile: Profile, share: float) -> Profile:
    """Return the profile with every further row of a verification at that share of the first."""

    def side(table: CostTable) -> CostTable:
        first = table.verify_s[0]
        return dataclasses.replace(table, verify_s=tuple(first * (1 + share * n) for n in range(len(table.verify_s))))

    return dataclasses.replace(profile, low=side(profile.low), high=side(profile.high))


def check_vllm(files: dict[str, str], folder: Path) -> list[list[int]]:
    """Hold a file against vLLM's parser, its lookup and the fields of its config; return the table."""
    config = json.loads((folder / "speculative_config.json").read_text())
    parser: dict[str, Any] = {}
    exec(compile(files[VLLM_PARSER], VLLM_PARSER, "exec"), parser)
    table = config["num_speculative_tokens_per_batch_size"]
    ranges = parser["validate_and_normalize_dynamic_sd_schedule"](table)
    assert [list(entry) for entry in ranges] == table, "the parser puts the ranges into another order"
    lookup = parser["build_dynamic_sd_schedule_lookup"](table, MOST, config["num_speculative_tokens"])
    ours = [[length for first, _, length in ranges if first <= size][-1] for size in range(1, MOST + 1)]
    assert lookup[1:] == ours, "the scheduler looks other lengths up"
    accepted = config_class(files[VLLM_CONFIG])(**config)
    assert accepted.num_speculative_tokens_per_batch_size == [tuple(entry) for entry in table]
    for wrong in (
        {**config, "num_speculative_tokens": 0},
        {**config, "a_key_of_ours": 1},
        {**config, "method": "floppy"},
    ):
        try:
            config_class(files[VLLM_CONFIG])(**wrong)
        except ValueError:
            continue
        raise AssertionError("the fields accept anything: they were not taken out as they are")
    return [list(entry) for entry in table]


def config_class(source: str) -> Any:
    """Return vLLM's `SpeculativeConfig` with its fields alone; a type that needs other modules of the engine is left open."""
    import pydantic

    tree = ast.parse(source)
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SpeculativeConfig")
    known: dict[str, Any] = {
        "Any": Any,
        "Literal": Literal,
        "Field": pydantic.Field,
        "SkipValidation": pydantic.SkipValidation,
    }
    for node in tree.body:  # the names of the methods, among others
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = _value(node.value, known)
    fields = [
        (n.target.id, _value(n.annotation, known), n.value and _value(n.value, known))
        for n in body.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    made = dataclasses.make_dataclass("SpeculativeConfig", [(name, kind, default) for name, kind, default in fields])
    assert {"method", "model", "num_speculative_tokens"} <= {name for name, kind, _ in fields if kind is not Any}
    return pydantic.dataclasses.dataclass(made, config=pydantic.ConfigDict(extra="forbid"))


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return what an expression stands for; `Any` where it names something of another module."""
    try:
        return eval(compile(ast.Expression(node), VLLM_CONFIG, "eval"), dict(known))
    except (NameError, TypeError, AttributeError):
        return Any


@contextmanager
def sglang_module(source: str) -> Iterator[Any]:
    """Yield SGLang's module of adaptive steps; what it imports from the engine is a stand-in."""
    names = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    stubs = {name: mock.MagicMock() for name in names if name.startswith("sglang")}
    stubs |= {".".join(name.split(".")[:n]): mock.MagicMock() for name in stubs for n in range(1, name.count(".") + 1)}
    module = types.ModuleType("adaptive_spec_params")
    with mock.patch.dict(sys.modules, stubs):
        exec(compile(source, SGLANG_ADAPTIVE, "exec"), module.__dict__)
        yield module


def check_sglang(source: str, folder: Path) -> dict[str, list[int]]:
    """Check a file with SGLang's loader and its routing by batch size; return the candidate steps by key."""
    path = folder / "adaptive.json"
    raw = json.loads(path.read_text())
    start = json.loads((folder / "figures.json").read_text())["start"]
    steps = {int(key): tuple(entry["candidate_steps"]) for key, entry in raw.items()}
    with sglang_module(source) as engine:
        every = engine.resolve_candidate_steps_from_config(str(path))
        assert every == sorted({k for candidates in steps.values() for k in candidates})
        assert start in every, "the engine refuses --speculative-num-steps of the README"
        loaded = engine.AdaptiveSpeculativeParams(start, str(path))
        for size in range(1, MOST + 1):
            expected = steps[max(first for first in steps if first <= size)]
            assert tuple(loaded._route(size).candidate_steps) == expected, f"batch {size} goes to another entry"
    return {key: entry["candidate_steps"] for key, entry in raw.items()}


def check_plugin(files: dict[str, str], folder: Path) -> None:
    """Put our rule in the place of SGLang's by its own registry, and have its own controller drive it."""
    hooks, states = (types.ModuleType(name) for name in ("hook_registry", "adaptive_runtime_state"))
    exec(compile(files[SGLANG_HOOKS], SGLANG_HOOKS, "exec"), hooks.__dict__)
    with mock.patch.dict(sys.modules, {states.__name__: states}):
        exec(compile(files[SGLANG_STATE], SGLANG_STATE, "exec"), states.__dict__)
    with sglang_module(files[SGLANG_ADAPTIVE]) as engine:
        original = engine.AdaptiveSpeculativeParams
        path = {name: sys.modules[name] for name in sys.modules if name.startswith("sglang")}
        path |= {"sglang.srt.plugins": mock.MagicMock(), "sglang.srt.plugins.hook_registry": hooks}
        path |= {"sglang.srt.speculative.adaptive_spec_params": engine}
        path["sglang.srt.speculative"] = types.SimpleNamespace(adaptive_spec_params=engine)
        with mock.patch.dict(sys.modules, path), mock.patch("pkgutil.resolve_name", lambda name: engine):
            plugin.register()
            hooks.HookRegistry.apply_hooks()
            hooks.HookRegistry.apply_hooks()
        assert engine.AdaptiveSpeculativeParams is not original
        theirs = engine.AdaptiveSpeculativeParams(3, str(folder / "adaptive.json"))
        assert type(theirs) is original, "a file without our object does not go to SGLang's own rule"
        policy = engine.AdaptiveSpeculativeParams(initial_steps=3, cfg_path=str(folder / "costed.json"))
        assert type(policy) is plugin.CostedSteps
        assert engine.resolve_candidate_steps_from_config(str(folder / "costed.json")) == policy.candidate_steps
        worker = mock.MagicMock(speculative_num_steps=policy.candidate_steps[0])
        worker.apply_runtime_state.side_effect = lambda state: setattr(worker, "speculative_num_steps", state)
        worker.build_adaptive_runtime_state.side_effect = lambda speculative_num_steps, **_: speculative_num_steps
        controller = states.AdaptiveController(worker, policy)
        controller.init_states([1, 2, 4, 8, 16])
        chance = random.Random(0)
        for _ in range(MOVES):
            size = chance.randint(1, 20)
            controller.activate_step_by_batch(size)
            steps = worker.speculative_num_steps
            assert steps == policy.get_steps_for_batch(size) and steps in policy.candidate_steps
            controller.on_verify_complete([chance.randint(0, steps) for _ in range(size)], size)


if __name__ == "__main__":
    sys.exit(main())
