"""`specstop info`: describe and check a trace, the folder of a policy, a drafter or a model, or a latency profile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...policies.errors import InputError
from ..output import facts, print_json, table, write

if TYPE_CHECKING:
    from ...collect import Trace

MAX_GROUPS = 6
"""Maximum number of groups of prompts that are printed."""


def info(path: Path, check: bool = False, json: bool = False) -> None:
    """Describe and check a trace, the folder of a policy, a trained drafter or a model, or a latency profile.

    Example: specstop info traces --check
    """
    show_artefact(path, check, json)


def show_artefact(path: Path, check: bool = False, json: bool = False) -> dict[str, Any]:
    """Print and return what a file or a folder holds; `check`: after reading all shards of a trace."""
    trace = None
    if (path / "header.json").is_file():
        from ...collect import check_trace, load_trace

        trace = check_trace(path) if check else load_trace(path)
        values = describe_trace(trace)
    elif (path / "policy.json").is_file():
        from ...policies.storage import load_policy_folder

        values = load_policy_folder(path).describe()
    elif (path / "drafter.json").is_file():
        from ...decode.drafters.folder import load_drafter

        values = load_drafter(path).describe()
    elif (path / "config.json").is_file():
        values = describe_model(path)
    elif path.is_file():
        from ...policies.profile import Profile

        values = Profile.load(path).describe()
    else:
        raise InputError(
            f"expected the folder of a trace, a policy, a drafter or a model, or a profile, but {path} is none of them"
        )
    if json:
        print_json(values)
        return values
    facts(str(path), {name: value for name, value in values.items() if name != "acceptance"})
    if trace is not None:
        print_acceptance(trace)
    return values


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
    from ...collect.store import column_array, hidden_text, replay_text
    from ...policies.learned import sampling_options_text

    header, rows = trace.header, trace.acceptance_by_depth()
    columns = trace.table(["accepted_length", "cut", "prompt_id", "sample", "group"])
    complete = ~column_array(columns["cut"]).astype(bool)
    lengths = column_array(columns["accepted_length"])[complete]
    # If not every depth was observed, E[A] is the sum of P(A >= k).
    mean = sum(row["accepted"] for row in rows) if rows.basis else float(lengths.mean()) if len(lengths) else 0.0
    groups, device = columns["group"].unique().to_pylist(), header.facts.get("device")
    optional = {
        "batch": header.batch if header.batch > 1 else None,
        "prompts left out": header.facts.get("prompts left out"),
        "note on acceptance": rows.basis,
        "draft lengths": header.facts.get(LENGTHS),
        "completions": header.facts.get("completions"),
        "collected on": f"{device}, {header.facts.get('dtype')}, {header.facts.get('threads')} threads"
        if device
        else None,
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
        "filter": sampling_options_text(header.sampling),
        "depth": header.depth,
        "nodes": len(header.topology),
        "prompts": header.prompts,
        "prompts with rows": columns.group_by(["prompt_id", "sample"]).aggregate([]).num_rows,
        "distinct prompt ids": len(columns["prompt_id"].unique()),
        "prompts from": header.facts.get("prompts from") or "not recorded",
        "groups": f"{len(groups)}: {', '.join(map(str, groups[:MAX_GROUPS]))}{', ...' if len(groups) > MAX_GROUPS else ''}",
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
        "acceptance": [
            {name: None if value is None or not math.isfinite(value) else value for name, value in row.items()}
            for row in rows
        ],
    }


def describe_model(path: Path) -> dict[str, Any]:
    """Return the facts of a model folder, with the sampling parameters in its `generation_config.json`."""
    from transformers import AutoConfig, GenerationConfig

    from ...decode.verify.sampling import IGNORED, NEUTRAL, model_defaults
    from ...policies.learned import sampling_options_text

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
        **{name: sampling_options_text(part) for name, part in parts.items() if part or name == "sampling defaults"},
    }
