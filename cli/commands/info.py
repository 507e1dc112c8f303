"""`specstop info`: describe and check a trace, the folder of a policy, a drafter or a model, or a latency profile."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...policies.errors import InputError
from ..output import facts, plain, print_json, table, write

if TYPE_CHECKING:
    from ...collect import Trace

MAX_ITEMS = 6
"""Maximum number of items of a list that are printed."""


def info(path: Path, check: bool = False, json: bool = False) -> None:
    """Describe and check a trace, the folder of a policy, a trained drafter or a model, or a latency profile.

    Example: specstop info traces --check
    """
    show_artefact(path, check, json)


def show_artefact(path: Path, check: bool = False, json: bool = False) -> None:
    """Print what a file or a folder holds; `check`: after reading all shards of a trace."""
    trace = None
    if (path / "header.json").is_file():
        from ...collect import check_trace, load_trace

        trace = check_trace(path) if check else load_trace(path)
        values = describe_trace(trace)
    else:
        describe = next((describe for name, describe in _BY_FILE.items() if (path / name).is_file()), None)
        if describe is None and not path.is_file():
            raise InputError(
                f"expected the folder of a trace, a policy, a drafter or a model, or a profile, but {path} is none of them"
            )
        values = (describe or describe_profile)(path)
    if json:
        print_json(values)
        return
    values.pop("acceptance", None)
    facts(str(path), values)
    if trace is not None:
        print_acceptance(trace)


def print_acceptance(trace: Trace) -> None:
    """Print how often each depth of a trace was accepted, and what the figures assume."""
    rows = trace.acceptance_by_depth()
    title = f"{trace.folder}: {trace.row_count} positions of {trace.header.prompts} prompts"
    cells = [(str(row["depth"]), _share(row["accepted"]), str(row["rounds"])) for row in rows]
    table(title, ("depth", "P(A >= depth)", "positions"), cells)
    if rows.basis:
        write(f"Note: {rows.basis}")


def _share(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def describe_trace(trace: Trace) -> dict[str, Any]:
    """Return the facts of a trace; `acceptance` has a row per depth."""
    from ...collect.acceptance import LENGTHS
    from ...collect.checks import column_array
    from ...collect.store import balance_text, hidden_text, replay_text
    from ...policies.learned import shaping_text

    header, rows = trace.header, trace.acceptance_by_depth()
    columns = trace.table(["accepted_length", "cut", "prompt_id", "sample", "group"])
    complete = ~column_array(columns["cut"]).astype(bool)
    lengths = column_array(columns["accepted_length"])[complete]
    # If not every depth was observed, E[A] is the sum of P(A >= k).
    mean = sum(row["accepted"] for row in rows) if rows.basis else float(lengths.mean()) if len(lengths) else 0.0
    groups = columns["group"].unique().to_pylist()
    completions = header.facts.get("completions")
    optional = {
        "batch": header.batch if header.batch > 1 else None,
        "prompts left out": header.facts.get("prompts left out"),
        "note on acceptance": rows.basis,
        "draft lengths": header.facts.get(LENGTHS),
        "completions": balance_text(completions) if completions else None,
    }
    return {
        "kind": "trace",
        "collector": header.collector + (f" under {header.policy}" if header.policy else ""),
        "texts": header.texts,
        "target": header.target,
        "draft": header.draft,
        "verification": f"{header.verification} ({'LOSSY' if header.verification == 'typical' else 'lossless'})",
        "replay": replay_text(header),
        "temperature": header.shown_temperature,
        "filter": shaping_text(header.shaping),
        "depth": header.depth,
        "nodes": len(header.topology),
        "prompts": header.prompts,
        "prompts with rows": columns.group_by(["prompt_id", "sample"]).aggregate([]).num_rows,
        "distinct prompt ids": len(columns["prompt_id"].unique()),
        "prompts from": header.facts.get("prompts from") or "not recorded",
        "groups": f"{len(groups)}: {_items(groups)}",
        "positions": len(complete),
        "cut": int((~complete).sum()),
        "accepted length, mean": mean if math.isfinite(mean) else None,
        **{name: value for name, value in optional.items() if value},
        "max new tokens": header.max_new_tokens,
        "shards": f"{len(trace.finished)} of {header.shards}",
        "bytes": sum(path.stat().st_size for path in (trace.folder / "data").glob("*.parquet")),
        "features": ", ".join((*header.anchor_features, *header.features)),
        "hidden states": hidden_text(header),
        "seed": header.seed,
        "collected on": f"{header.facts.get('device')}, {header.facts.get('dtype')}, {header.facts.get('threads')} threads",
        "acceptance": [
            {name: None if value is None or not math.isfinite(value) else value for name, value in row.items()}
            for row in rows
        ],
    }


def _items(values: list[Any]) -> str:
    return ", ".join(map(plain, values[:MAX_ITEMS])) + (", ..." if len(values) > MAX_ITEMS else "")


def describe_policy(path: Path) -> dict[str, Any]:
    """Return the facts of a policy folder."""
    from ...policies.learned import shaping_text
    from ...policies.storage import load_policy_folder

    policy = load_policy_folder(path)
    trained = policy.metadata
    optional = {
        "hidden states": ", ".join(f"{name} ({size} numbers)" for name, size in policy.sizes.items()),
        "batch sizes without a decision": policy.rule.undecided,
    }
    return {
        "kind": "policy",
        "name": policy.name,
        "head": policy.head.kind,
        "rule": policy.rule.kind,
        "features": ", ".join(policy.features),
        **{name: value for name, value in optional.items() if value},
        "calibration": f"accept {policy.accept.kind}, next {policy.next.kind}",
        "first decision at depth": policy.first,
        "max depth": policy.max_depth,
        "weights": sum(array.size for array in policy.head.tensors().values()),
        "temperature": trained.temperature,
        "filter": shaping_text(trained.shaping),
        "verification": trained.verification,
        **{f"pair: {role}": value for role, value in trained.pair.items()},
        "rho (tokens/s)": trained.rho,
        **_provenance(trained),
    }


def _provenance(artefact: Any) -> dict[str, Any]:
    """Return the provenance and the metrics of a trained artefact."""
    provenance = {
        f"provenance: {name}": _items(value) if isinstance(value, list) else plain(value)
        for name, value in artefact.provenance.items()
    }
    return provenance | {name: value for name, value in artefact.metrics.items() if not isinstance(value, list)}


def describe_drafter(path: Path) -> dict[str, Any]:
    """Return the facts of the folder of a trained drafter."""
    from ...decode.drafters.folder import load_drafter

    trained = load_drafter(path)
    network: Any = trained.network
    shape, shares = dataclasses.asdict(network.shape), trained.metrics.get("acceptance")
    return {
        "kind": "drafter",
        "name": f"{trained.kind}:{path}",
        "network": trained.kind,
        "depth": shape.pop("depth"),
        "target": trained.target,
        "hash": trained.identity,
        "weights": sum(tensor.numel() for tensor in network.state_dict().values()),
        **{name.replace("_", " "): size for name, size in shape.items() if size},
        **{f"acceptance, depth {at}": share for at, share in enumerate(shares if isinstance(shares, list) else [], 1)},
        **_provenance(trained),
    }


def describe_model(path: Path) -> dict[str, Any]:
    """Return the facts of a model folder, with the sampling parameters in its `generation_config.json`."""
    from transformers import AutoConfig, GenerationConfig

    from ...decode.verify.sampling import IGNORED, NEUTRAL, model_defaults
    from ...policies.learned import shaping_text

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        exists = (path / "generation_config.json").is_file()
        defaults = GenerationConfig.from_pretrained(path) if exists else GenerationConfig.from_model_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    parts: dict[str, dict[str, Any]] = {
        "sampling defaults": {},
        "defaults left out": {},
        "defaults that cannot be applied": {},
    }
    for name, value in model_defaults(defaults).items():
        part = "sampling defaults" if name in NEUTRAL else "defaults left out" if name in IGNORED else None
        parts[part or "defaults that cannot be applied"][name] = value
    return {
        "kind": "model",
        "architecture": ", ".join(config.architectures or []) or config.model_type,
        "vocabulary": config.get_text_config().vocab_size,
        "end-of-text tokens": str(defaults.eos_token_id),
        **{name: shaping_text(part) for name, part in parts.items() if part or name == "sampling defaults"},
    }


def describe_profile(path: Path) -> dict[str, Any]:
    """Return the facts of a latency profile, with the costs of each batch size."""
    from ...policies.profile import Profile

    profile = Profile.load(path)
    verdict = (
        profile.noise.text if profile.noise else "unknown noise: the profile has no timings, or its costs were edited"
    )
    values: dict[str, Any] = {"kind": "profile", "verdict": verdict}
    for side, costs in (("short", profile.low), ("long", profile.high)):
        where = f"{side} context ({costs.context:.0f})"
        values[f"{where}: draft step, ms"] = f"{costs.draft_s[0] * 1e3:.2f}"
        values[f"{where}: verification of 0, 1, ... tokens, ms"] = " ".join(f"{s * 1e3:.2f}" for s in costs.verify_s)
    if batch := profile.batch:
        context = 0.5 * (batch.low.context + batch.high.context)
        for size in batch.sizes:
            tokens = batch.low.verify_s[size][-1][0]
            alone, full = (profile.verify_s(size, sent, context) * 1e3 for sent in (size, tokens))
            draft = profile.draft_s(size, context) * 1e3
            values[f"batch of {size}, ms"] = (
                f"plain {alone:.2f}, draft step {draft:.2f}, verification of {tokens} tokens {full:.2f}"
            )
    return {
        **values,
        "framework overhead, ms a round": profile.round_s * 1e3,
        "framework overhead, ms a drafted token": profile.step_s * 1e3,
        **{f"decision of {name}, us": profile.decision(name) * 1e6 for name in profile.decision_s},
        **profile.facts,
    }


_BY_FILE = {"policy.json": describe_policy, "drafter.json": describe_drafter, "config.json": describe_model}
