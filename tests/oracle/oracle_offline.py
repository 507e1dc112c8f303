"""Sections of traces, replay, costs and exports, and of generation through transformers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import access
import numpy as np
import torch
from oracle_inputs import EOS, Inputs
from oracle_policies import Adaptive, FromAnchor, Selecting, Trimming
from oracle_texts import AddsByLength, AfterToken, answer, named
from specstop.cli.options import Models
from specstop.collect import Trace, collect, load_trace
from specstop.decode import PolicyStoppingCriteria, Settings, Speculator, specstop_generate, stream_key
from specstop.policies import load_policy, load_policy_folder, save_policy
from specstop.train import deploy, trace_arrays

Cases = Iterator[tuple[str, Any]]

DEPTH, NEW = 5, 26
TREE = "3,2,1,1,1"
TRACES: dict[str, dict[str, Any]] = {
    "dense": {"verification": "match", "temperature": 0.8},
    "dense greedy": {"verification": "match", "temperature": 0.0, "hidden": ("draft_hidden", "target_hidden")},
    "dense rejection": {"verification": "rejection", "temperature": 0.8, "draws": 2},
    "dense block": {"verification": "block", "temperature": 0.8},
    "dense tree": {"verification": "match", "temperature": 0.8, "tree": TREE},
    "live": {"verification": "match", "temperature": 0.8, "collector": "live"},
    "live rejection": {"verification": "rejection", "temperature": 0.8, "collector": "live", "explore": 0.5},
    "live tree": {"verification": "match", "temperature": 0.8, "collector": "live", "tree": TREE},
    "live batch": {"verification": "match", "temperature": 0.8, "collector": "live", "batch": 3},
}
LIVE_POLICIES = ("fixed:3", "confidence:0.4", "heuristic:4", "logistic-derived", "trimming", "selecting")
REPLAYED = [
    "fixed:0",
    "fixed:3",
    "confidence:0.4",
    "entropy:1",
    "heuristic:4",
    "online:0.4",
    "roc:0.4",
    "bandit",
    "adaedl:0.5",
    "logistic-derived",
    "mlp-survival",
    "mlp-calibrated",
    "xgboost-derived",
    "tokens-derived",
    "resnet-both",
    "specdec",
    "dynasd-hard",
    "tree-gain",
    "tree-free",
    "eagle:5",
    "gain:0.1",
    "opt:0.4",
    "c2t:1",
    "ddd:-0.8",
    "trimming",
    "selecting",
    "from-anchor",
    "adaptive",
    "smartspec:0.7",
    "tetris:2",
]
HEADER = ("verification", "temperature", "collector", "vocabulary", "max_new_tokens")
OWN = {cls.name: cls for cls in (FromAnchor, Trimming, Selecting, Adaptive)}


def policy_of(inputs: Inputs, name: str) -> Any:
    """Return the policy of a name: a policy of the oracle, a folder, or a spec."""
    return OWN[name]() if name in OWN else load_policy(named(inputs, name))


def traced(inputs: Inputs, folder: Path, name: str, **more: Any) -> Trace:
    """Collect one of the traces."""
    options = {"depth": DEPTH, "max_new_tokens": NEW, "shards": 2, "target": "target", "draft": "draft"}
    options |= TRACES[name] | more
    if options.get("tree"):
        del options["depth"]
    return collect(inputs.compact, inputs.prompts, folder, progress=access.silent(), **options)


def columns(arrays: Any) -> dict[str, Any]:
    """Return what a trace holds."""
    header = arrays.header
    out: dict[str, Any] = {
        "texts": [
            [p, int(n), int(t)] for p, n, t in zip(arrays.prompt_ids, arrays.rows, arrays.text_tokens, strict=True)
        ],
        "keys": [str(int(key)) for key in arrays.keys],
        "header": {name: getattr(header, name) for name in HEADER},
        "features": [list(header.anchor_features), list(header.features)],
        "tree": arrays.tree.name,
    }
    for name in ("accepted", "tokens", "ends", "cut", "path", "drawn", "reads", "anchors"):
        values = getattr(arrays, name)
        if values is not None:
            out[name] = values.numpy()
    return out | {f"column {name}": values.numpy() for name, values in arrays.columns.items()}


def rounds(played: Any) -> dict[str, Any]:
    """Return a replayed policy's rounds and sums."""
    out = {name: getattr(played, name).numpy() for name in ("log", "history", "tokens", "seconds", "committed")}
    return out | ({} if played.details is None else {"details": played.details.numpy()})


def replay(inputs: Inputs, small: bool = False) -> Cases:
    """Traces, the rounds of policies replayed on them, and whether a live trace replays as the rounds that it is of."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recorded = {name: traced(inputs, folder / name, name) for name in (list(TRACES)[:1] if small else TRACES)}
        if not small:
            yield from commanded(inputs, folder)
        for name, trace in recorded.items():
            arrays = trace_arrays(trace)
            yield f"trace {name}", columns(arrays)
            # A live trace has the rounds of one policy: most others are refused, or go their own way at once.
            for policy in REPLAYED[::7] if small else REPLAYED if name.startswith("dense") else LIVE_POLICIES:
                for profile in ("plain", "trees") if policy in ("fixed:3", "tree-gain", "adaptive") else ("plain",):
                    costs = inputs.profile(profile)
                    label = f"{policy} on {name} under {profile}"
                    yield (
                        label,
                        answer(
                            lambda arrays=arrays, policy=policy, costs=costs: rounds(
                                access.replayed(arrays, policy_of(inputs, policy).limited(DEPTH), costs)
                            )
                        ),
                    )
        if small:
            return
        arrays = trace_arrays(recorded["dense"])
        many = [load_policy(f"confidence:{level / 10}").limited(DEPTH) for level in range(1, 8)]
        for one in access.replayed_many(arrays, many, inputs.profile()):
            yield f"many {one.name}", rounds(one)
        for policy, batch in itertools.product(
            ("fixed:3", "tetris:2", "smartspec:0.7", "batch-best", "batch-all"), (2, 4)
        ):
            yield f"batch {policy} S={batch}", answer(lambda p=policy, b=batch: batched(inputs, arrays, p, b))
        for policy, name, temperature in itertools.product(LIVE_POLICIES, ("live", "live tree"), (0.0, 0.8)):
            where = folder / f"{policy} {name} {temperature}"
            own = policy_of(inputs, policy).limited(DEPTH)
            trace = traced(inputs, where, name, policy=own, temperature=temperature, shards=1)
            label = f"{policy} of {name} at {temperature:g}"
            yield (
                label,
                answer(lambda trace=trace, own=own, t=temperature, n=name: same_rounds(inputs, trace, own, t, n)),
            )


def commanded(inputs: Inputs, folder: Path) -> Cases:
    """Traces that the command line collects."""
    models = inputs.folder / "models"
    given = ["collect", "--target", models / "target", "--draft", models / "draft"]
    given += ["--prompts", inputs.folder / "prompts.jsonl"]
    given += ["--dtype", "float64", "--max-new-tokens", "12", "--temperature", "0.8", "--quiet"]
    more = {
        "dense": ("--depth", 4, "--verification", "match"),
        "live": ("--collector", "live", "--policy", "confidence:0.3", "--depth", 4, "--verification", "match"),
        "tree": ("--tree", "2,1", "--verification", "rejection", "--drafter", "model"),
    }
    for name, options in more.items():
        out = folder / f"command {name}"
        with mock.patch.object(Models, "open", functools.partialmethod(Models.open, engine="compact")):
            code, _ = access.run_command(*given, *options, "--out", out)
        yield f"command {name}", {"code": code, **(columns(trace_arrays(load_trace(out))) if code == 0 else {})}


def batched(inputs: Inputs, arrays: Any, policy: str, batch: int) -> dict[str, Any]:
    """Return the rounds of a replayed batch."""
    costs = inputs.profile("batches")
    played = access.replayed_batch(arrays, policy_of(inputs, policy).limited(DEPTH).with_costs(costs), costs, batch)
    return {name: np.asarray(getattr(played, name)) for name in ("log", "tokens", "seconds", "ended", "sequence")}


def same_rounds(inputs: Inputs, trace: Trace, policy: Any, temperature: float, name: str) -> dict[str, Any]:
    """Return the rounds of a live trace replayed, and whether they are those of the loop."""
    costs = dataclasses.replace(inputs.profile(), step_s=0.0)
    played = access.replayed(trace_arrays(trace), policy, costs)
    tree = TREE if name == "live tree" else None
    loop = Speculator(inputs.compact, policy, Settings(temperature, NEW, DEPTH, tree=tree, verification="match"))
    same, log = True, played.log.tolist()
    for at, prompt in enumerate(inputs.prompts):
        ids = inputs.compact.tokenizer(prompt.text)["input_ids"]
        text = loop.generate(ids, stream_key(0, prompt.id))
        live = [[r.anchor, r.drafted, r.verified, r.accepted] for r in text.rounds]
        same = same and live == [row[1:] for row in log if row[0] == at]
    return {"same": same, "log": played.log.numpy()}


CONTEXTS = (1.0, 8.0, 17.5, 40.0, 100.0, 200.0, 2000.0)


def costs(inputs: Inputs, small: bool = False) -> Cases:
    """Seconds of rounds on a grid, of chains, trees and batches."""
    dice = np.random.default_rng(9)
    for name in ("plain", "falling", "trees", "batches"):
        profile = inputs.profile(name)
        yield f"{name} | padded", access.padded_sizes(profile)
        yield f"{name} | prompts", access.prompt_seconds(profile, np.array([0, 1, 5, 100]))
        grid = list(itertools.product(CONTEXTS, range(7), range(7), (0, 1, 2, 5), (0, 1, 3)))
        grid = [row for row in grid if row[2] <= row[1]]
        table = [np.array(column) for column in zip(*grid, strict=True)]
        yield f"{name} | chains", access.chain_seconds(profile, table, 3e-5)
        for context, first in itertools.product(CONTEXTS, (0, 1, 2)):
            yield (
                f"{name} | lengths at {context:g} first {first}",
                access.costs_by_length(profile, context, 2e-5, first, 5),
            )
        fed = dice.integers(0, 5, (60, 4))
        fed = np.where(np.cumprod(fed > 0, 1) > 0, fed, 0)
        drafted = fed.sum(1) * 2
        verified = np.minimum(drafted, dice.integers(0, 18, 60))
        columns_ = [dice.choice(CONTEXTS, 60), drafted, verified, dice.integers(0, 4, 60), (fed > 0).sum(1)]
        yield f"{name} | trees", answer(lambda p=profile, c=columns_, f=fed: access.tree_seconds(p, c, 3e-5, f))
        for policy in ("confidence:0.4", "heuristic:4", "fixed:3", "logistic-derived"):
            asked = np.arange(6)
            yield f"{name} | {policy}", access.decision_seconds(profile, load_policy(named(inputs, policy)), asked)
        result = json.loads(json.dumps(profile.to_dict()))
        yield f"{name} | file", result
    for name in ("timed",) if small else ("timed", "measured"):
        profile = inputs.profile(name)
        yield f"{name} | noise", access.noise_of(profile)
        yield f"{name} | estimated again", access.estimated_again(profile)
        yield f"{name} | fingerprint", profile.fingerprint
        for seed in range(3):
            yield f"{name} | resampled {seed}", profile.resampled(np.random.default_rng(seed)).to_dict()
    profile = inputs.profile("batches")
    for streams, length, context in itertools.product((1, 2, 3, 4, 6, 8, 12), (0, 1, 3, 6), CONTEXTS[1:4]):
        yield (
            f"batch of {streams} length {length} at {context:g}",
            access.batch_seconds(profile, streams, length, context),
        )


UNSTABLE = [
    "specstop",
    "versions",
    "command",
    "time",
    "date",
    "folder",
    "path",
    "traces",
    "profile",
    "facts",
    "seconds",
]
"""Entries of figures that name places, versions or clocks."""


def stable(value: Any) -> Any:
    """Return figures without what differs from place to place."""
    if isinstance(value, dict):
        return {key: stable(inner) for key, inner in value.items() if key not in UNSTABLE}
    if isinstance(value, list):
        return [stable(inner) for inner in value]
    if isinstance(value, str) and ("/" in value or len(value) > 200):
        return "text"
    return value


def folder_content(folder: Path) -> dict[str, Any]:
    """Return the files of a folder: JSON as it is, weights as a hash, of other text nothing."""
    out: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".json":
            out[name] = stable(json.loads(path.read_text(encoding="utf-8")))
        elif path.suffix in (".safetensors", ".onnx"):
            out[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".safetensors" else "file"
        elif path.suffix == ".args":
            out[name] = path.read_text(encoding="utf-8").split()
        else:
            out[name] = "file"
    return out


def export(inputs: Inputs, small: bool = False) -> Cases:
    """Folders for transformers, tables for engines, and policy folders that are read and written again."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        policies = ("fixed:3", "confidence:0.4", "logistic-derived")
        for policy, drafter in itertools.product(policies, (None, "lookup", "medusa:medusa", "suffix+model")):
            out = folder / f"hf {policy} {drafter}".replace("/", "-").replace(":", "-")
            spec = None if drafter is None else inputs.drafter(drafter)
            result = answer(lambda p=policy, o=out, s=spec: stable(access.export_hf(named(inputs, p), o, s)))
            yield (
                f"hf | {policy} | {drafter}",
                {"figures": result, "files": folder_content(out) if out.exists() else {}},
            )
            if small:
                return
        for name in inputs.policies:
            out = save_policy(load_policy_folder(inputs.policy(name)), folder / f"again {name}")
            raw = json.loads((out / "policy.json").read_text(encoding="utf-8"))
            before = json.loads((Path(inputs.policy(name)) / "policy.json").read_text(encoding="utf-8"))
            yield f"saved again | {name}", {"same": raw == before, "sha256": raw["sha256"], "files": raw["files"]}
        for name in ("logistic-derived", "mlp-survival", "xgboost-derived", "resnet-both", "tree-free"):
            result = answer(lambda n=name: onnx(inputs, n, folder))
            yield f"onnx | {name}", result
        trace = traced(inputs, folder / "trace", "dense", max_new_tokens=NEW)
        for engine, policy in itertools.product(("vllm", "sglang", "trtllm", "llama.cpp"), policies):
            out = folder / f"{engine} {policy}"
            for profile in ("plain", "batches"):
                where = out / profile
                result = answer(lambda e=engine, p=policy, w=where, f=profile: engine_files(inputs, e, p, w, f, trace))
                yield f"{engine} | {policy} | {profile}", result


def onnx(inputs: Inputs, name: str, folder: Path) -> Any:
    """Return whether an ONNX file can be written, and that it agrees with our code."""
    result = access.export_onnx(load_policy(inputs.policy(name)), folder / f"{name}.onnx")
    apart = result["difference"]
    return {"agrees": apart is None or apart < 1e-5, "keys": sorted(result)}


def engine_files(inputs: Inputs, engine: str, policy: str, out: Path, profile: str, trace: Trace) -> dict[str, Any]:
    """Return the figures and the files of an engine."""
    path = named(inputs, policy)
    figures = deploy(engine, out, path, traces=trace, profile=inputs.profile(profile))
    return {"figures": stable(figures), "files": folder_content(out)}


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return a batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def hf(inputs: Inputs, small: bool = False) -> Cases:
    """Texts of `generate` with our method, with an exported folder, and of assisted generation with our criterion."""
    pair, prompts = inputs.plain, inputs.prompt_ids
    greedy, sampled = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5}
    allowed = lambda batch, ids: [token for token in range(48) if token % 3 != batch]  # noqa: E731

    def ours(count: int, **more: Any) -> Any:
        options = {"max_new_tokens": 18, "policy": "fixed:3", "draft_model": pair.draft, **more}
        output = pair.target.generate(**padded(prompts[-count:]), custom_generate=specstop_generate, **options)
        if isinstance(output, torch.Tensor):
            return output.tolist()
        counts = ("texts", "tokens", "target_calls", "drafted", "verified", "accepted", "failed")
        return {
            "sequences": output.sequences.tolist(),
            "statistics": {name: output.statistics[name] for name in counts},
            "acceptance": output.statistics["acceptance"],
        }

    cases: dict[str, dict[str, Any]] = {
        "fixed": {},
        "confidence": {"policy": "confidence:0.4"},
        "learned": {"policy": inputs.policy("mlp-survival")},
        "tree": {"tree": "3,2,1"},
        "tree policy": {"policy": inputs.policy("tree-free")},
        "rejection": {"verification": "rejection"},
        "rejection tree": {"verification": "rejection", "tree": "2,2"},
        "match": {"verification": "match"},
        "typical": {"verification": "typical"},
        "target_init": {"verification": "target_init"},
        "lookup": {"drafter": "lookup", "draft_model": None},
        "suffix+model": {"drafter": "suffix+model"},
        "medusa": {"drafter": inputs.drafter("medusa:medusa"), "draft_model": None},
        "no draft": {"draft_model": None},
        "one draft too many": {"drafter": "lookup"},
        "profile": {"profile": inputs.profile("batches")},
        "repetition": {"repetition_penalty": 1.6},
        "ngram": {"no_repeat_ngram_size": 2},
        "min_new": {"min_new_tokens": 12},
        "eos": {"eos_token_id": [EOS, 9, 30]},
        "max_length": {"max_length": 20, "max_new_tokens": None},
        "bad_words": {"bad_words_ids": [[9], [30, 31]]},
        "allowed": {"prefix_allowed_tokens_fn": allowed},
        "top_p": {"top_p": 0.6},
        "min_p": {"min_p": 0.1},
        "processor": {"logits_processor": [AddsByLength()]},
        "stops": {"stopping_criteria": [AfterToken((9, 21, 33, 40))]},
        "beams": {"num_beams": 3},
        "scores": {"output_scores": True, "return_dict_in_generate": True},
        "dict": {"return_dict_in_generate": True},
    }
    for (name, options), (kind, sampling), count in itertools.product(
        list(cases.items())[:3] if small else cases.items(), (("greedy", greedy), ("sampled", sampled)), (1, 4)
    ):
        yield f"ours {name} | {kind} | {count}", answer(lambda c=count, o={**sampling, **options}: ours(c, **o))
    if small:
        return
    yield from read_before(inputs)
    yield from exported(inputs, padded(prompts[-1:]))
    for policy, temperature in itertools.product(
        ("fixed:3", "confidence:0.4", "entropy:1", "heuristic:4", "mlp-survival", "bandit", "tokens-derived", "tree-free",
         "product:0.2", "selecting", "trimming"),
        (0.0, 0.8),
    ):  # fmt: skip
        yield f"riding {policy} | T={temperature:g}", answer(lambda p=policy, t=temperature: ridden(inputs, p, t))


def read_before(inputs: Inputs) -> Cases:
    """Texts of prompts that `generate` was handed with a cache, or with a mask that leaves tokens out."""
    pair = inputs.plain
    for name, prompt in (("long", inputs.prompt_ids[-1]), ("short", inputs.prompt_ids[-3])):
        whole = padded([prompt])
        holes = {**whole, "attention_mask": whole["attention_mask"].clone()}
        holes["attention_mask"][0, 1:3] = 0
        for policy, tree in (("fixed:3", None), ("confidence:0.4", "2,2,1")):
            options = {"custom_generate": specstop_generate, "draft_model": pair.draft, "policy": policy, "tree": tree}
            options |= {"max_new_tokens": 18, "do_sample": False}

            def cached(whole: Any = whole, options: Any = options) -> Any:
                with torch.no_grad():
                    read = pair.target(whole["input_ids"][:, :-2], use_cache=True).past_key_values
                return pair.target.generate(**whole, past_key_values=read, **options).tolist()

            yield f"cache {name} | {policy}", answer(cached)
            yield f"holes {name} | {policy}", answer(lambda h=holes, o=options: pair.target.generate(**h, **o).tolist())
    for count in (2, 3):
        options = {
            "custom_generate": specstop_generate,
            "draft_model": pair.draft,
            "policy": "fixed:3",
            "max_new_tokens": 12,
        }
        options |= {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 4, "num_return_sequences": count}
        batch = padded(inputs.prompt_ids[-2:])
        yield f"sequences {count}", answer(lambda b=batch, o=options: pair.target.generate(**b, **o).tolist())


def ridden(inputs: Inputs, policy: str, temperature: float) -> dict[str, Any]:
    """Return texts and rounds of assisted generation whose drafts a policy ends."""
    pair = inputs.plain
    riding = PolicyStoppingCriteria(policy_of(inputs, policy), temperature)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = []
    with riding.riding(pair.draft):
        for prompt in inputs.prompt_ids[-3:]:
            torch.manual_seed(3)
            output = pair.target.generate(**padded([prompt]), max_new_tokens=18, assistant_model=pair.draft, **sampling)
            out.append(output[0].tolist())
    return {"texts": out, "rounds": [list(one) for one in riding.rounds]}


def exported(inputs: Inputs, ids: dict[str, torch.Tensor]) -> Cases:
    """Texts of exported folders."""
    pair = inputs.plain
    import transformers.dynamic_module_utils as dynamic

    with tempfile.TemporaryDirectory() as temporary:
        kept, dynamic.HF_MODULES_CACHE = dynamic.HF_MODULES_CACHE, f"{temporary}/modules"
        path = list(sys.path)
        try:
            for at, (policy, drafter) in enumerate(
                itertools.product(("fixed:3", "confidence:0.4", "mlp-survival"), (None, "hydra:hydra"))
            ):
                out = Path(temporary) / f"out{at}"
                access.export_hf(named(inputs, policy), out, None if drafter is None else inputs.drafter(drafter))
                draft = {} if drafter else {"draft_model": pair.draft}
                for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 0}):
                    torch.manual_seed(3)
                    output = answer(
                        lambda out=out, draft=draft, sampling=sampling: pair.target.generate(
                            **ids,
                            custom_generate=str(out),
                            trust_remote_code=True,
                            max_new_tokens=18,
                            **draft,
                            **sampling,
                        ).tolist()
                    )
                    yield f"exported {policy} | {drafter} | {'sampled' if sampling['do_sample'] else 'greedy'}", output
        finally:
            dynamic.HF_MODULES_CACHE, sys.path[:] = kept, path
