"""`specstop info`: describe and check a trace, the folder of a policy, a drafter or a model, or a latency profile."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.errors import InputError
from .. import options
from ..output import flat, print_json, table

if TYPE_CHECKING:
    from ...collect import Trace

MAX_ITEMS = 6
"""Maximum number of items of a list that are printed."""

_MEAN = "accepted length, mean"
_NO_NOISE = "nothing says how noisy the machine was: the timings of these costs were not kept, or the costs were edited"


def info(
    path: Annotated[Path, typer.Argument(help="Folder of a trace, a policy, a drafter or a model, or a profile.")],
    check: options.Check = False,
    json: options.Json = False,
) -> None:
    """Describe and check a trace, the folder of a policy, a trained drafter or a model, or a latency profile.

    Example: specstop info traces --check
    """
    if (path / "header.json").is_file():
        show_trace(path, check, json)
        return
    describe = next((describe for name, describe in _BY_FILE.items() if (path / name).is_file()), None)
    if describe is None and not path.is_file():
        raise InputError(
            f"expected the folder of a trace, a policy, a drafter or a model, or a profile, but {path} is none of them"
        )
    facts = (describe or describe_profile)(path)
    if json:
        print_json(facts)
    else:
        table(str(path), ("what", "value"), flat(facts))


def show_trace(path: Path, check: bool, json: bool) -> None:
    """Print the header of a trace, its acceptance and one of its rows; `check`: after reading all shards."""
    from ...collect import check_trace, load_trace

    trace = check_trace(path) if check else load_trace(path)
    facts, depths = describe_trace(trace)
    branches, row = branch_rows(trace), sample_row(trace)
    if json:
        acceptance = [
            {"depth": int(depth), "probability": None if share == "-" else float(share), "positions": int(count)}
            for depth, share, count in depths
        ]
        nodes = [
            {"depth": int(depth), "branch": branch, "probability": share, "rows": int(count)}
            for depth, branch, share, count in branches
        ]
        mean = None if facts[_MEAN] == "-" else facts[_MEAN]
        print_json({**facts, _MEAN: mean, "acceptance": acceptance, "branches": nodes, "sample": row})
        return
    table(str(path), ("what", "value"), flat(facts))
    if depths:
        table("acceptance", ("depth", "P(A >= depth)", "positions"), depths)
    if trace.header.depth < len(trace.header.topology):
        table("acceptance by branch", ("depth", "branch", "P(accepted)", "rows"), branches)
    table("a row", ("what", "value"), list(row.items()))


def describe_trace(trace: Trace) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """Return the facts of a trace and rows (depth k, P(A >= k), positions where depth k was observed)."""
    import numpy as np

    from ...collect.acceptance import COLUMNS, LENGTHS, LIVE_COLUMNS, depth_outcomes
    from ...collect.checks import column_array
    from ...collect.store import balance_text, hidden_text, replay_text
    from ...policies.learned import sampling_options_text

    header = trace.header
    read = trace.table([*COLUMNS, *(LIVE_COLUMNS if header.collector == "live" else ())])
    columns = {name: column_array(read[name]) for name in read.column_names}
    outcomes = depth_outcomes(header, columns)
    survival, complete = outcomes.survival, ~columns["cut"].astype(bool)
    depths = [
        (str(depth), f"{share:.3f}" if np.isfinite(share) else "-", str(count))
        for depth, (share, count) in enumerate(zip(survival, outcomes.observed.sum(0), strict=True), 1)
        if len(outcomes.row)
    ]
    mean: float | str = float(columns["accepted_length"][complete].mean()) if len(outcomes.row) else 0.0
    if outcomes.basis:  # not every depth was observed; E[A] is the sum of P(A >= k)
        mean = float(survival.sum()) if np.isfinite(survival).all() else "-"
    names = trace.table(["prompt_id", "sample", "group"])
    groups = names["group"].unique().to_pylist()
    optional = {
        "batch": header.batch if header.batch > 1 else None,
        "prompts left out": header.facts.get("prompts left out"),
        "note on acceptance": outcomes.basis,
        "draft lengths": header.facts.get(LENGTHS),
        "completions": balance_text(checked) if (checked := header.facts.get("completions")) else None,
    }
    facts = {
        "kind": "trace",
        "schema": header.schema,
        "collector": header.collector + (f" under {header.policy}" if header.policy else ""),
        "texts": header.texts,
        "target": header.target,
        "draft": header.draft,
        "verification": f"{header.verification} ({options.VERIFICATIONS.get(header.verification, 'lossless')})",
        "replay": replay_text(header),
        "temperature": header.shown_temperature,
        "filter": sampling_options_text(header.sampling),
        "depth": header.depth,
        "nodes": len(header.topology),
        "prompts": header.prompts,
        "prompts with rows": len(names.group_by(["prompt_id", "sample"]).aggregate([])),
        "distinct prompt ids": len(names["prompt_id"].unique()),
        "prompts from": header.facts.get("prompts from") or "not recorded",
        "groups": f"{len(groups)}: {', '.join(map(str, groups[:MAX_ITEMS]))}{', ...' if len(groups) > MAX_ITEMS else ''}",
        "positions": len(complete),
        "cut": int((~complete).sum()),
        _MEAN: mean,
        **{name: value for name, value in optional.items() if value},
        "max new tokens": header.max_new_tokens,
        "shards": f"{len(trace.finished)} of {header.shards}",
        "bytes": sum(path.stat().st_size for path in (trace.folder / "data").glob("*.parquet")),
        "features": ", ".join((*header.anchor_features, *header.features)),
        "hidden states": hidden_text(header),
        "seed": header.seed,
        "collected on": f"{header.facts.get('device')}, {header.facts.get('dtype')}, {header.facts.get('threads')} threads",
    }
    return facts, depths


def branch_rows(trace: Trace) -> list[tuple[str, str, str, str]]:
    """Return rows (depth, branch, share of accepted tokens, labelled rows) of the nodes of a tree."""
    from ...collect.checks import column_array

    columns = trace.table(["accepted", "observed"])
    accepted, labelled = (column_array(columns[name]).astype(bool) for name in ("accepted", "observed"))
    tree, rows = trace.header.tree, []
    children: dict[int, int] = {}
    for node, parent in enumerate(trace.header.topology):
        children[parent] = children.get(parent, 0) + 1
        count = int(labelled[:, node].sum())
        share = f"{(accepted & labelled)[:, node].sum() / count:.3f}" if count else "-"
        parent_name = f"node {parent}" if parent >= 0 else "the anchor"
        rows.append((str(tree.depth[node + 1]), f"{children[parent]} of {parent_name}", share, str(count)))
    return rows


def sample_row(trace: Trace) -> dict[str, str]:
    """Return the first row with an accepted token, or the first row, as an example."""
    import pyarrow.compute as pc

    table = next((table for table in trace.shards() if table.num_rows), None)
    if table is None:
        return {}
    first = pc.index(pc.greater(table["accepted_length"], 0), True).as_py()  # -1 without such a row
    (row,) = table.slice(max(0, first), 1).to_pylist()
    return {name: _short(value) for name, value in row.items()}


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value[:MAX_ITEMS])) + (" ..." if len(value) > MAX_ITEMS else "")
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def describe_policy(path: Path) -> dict[str, Any]:
    """Return the facts of a policy folder."""
    from ...policies.learned import sampling_options_text
    from ...policies.storage import load_policy_folder

    policy = load_policy_folder(path)
    facts = policy.metadata
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
        "temperature": facts.temperature,
        "filter": sampling_options_text(facts.sampling),
        "verification": facts.verification,
        "label": facts.label,
        **{f"pair: {role}": value for role, value in facts.pair.items()},
        "rho (tokens/s)": facts.rho,
        **_provenance(facts),
    }


def _provenance(artefact: Any) -> dict[str, Any]:
    """Return the provenance and the metrics of a trained artefact."""
    provenance = {f"provenance: {name}": _short(value) for name, value in artefact.provenance.items()}
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
        **{
            f"acceptance, depth {depth}": share
            for depth, share in enumerate(shares if isinstance(shares, list) else [], 1)
        },
        **_provenance(trained),
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
    values = model_defaults(defaults)
    parts = {
        "sampling defaults": {name: value for name, value in values.items() if name in NEUTRAL},
        "defaults left out": {name: value for name, value in values.items() if name in IGNORED},
        "defaults that cannot be applied": {
            name: value for name, value in values.items() if name not in NEUTRAL and name not in IGNORED
        },
    }
    return {
        "kind": "model",
        "architecture": ", ".join(config.architectures or []) or config.model_type,
        "vocabulary": config.get_text_config().vocab_size,
        "end-of-text tokens": str(defaults.eos_token_id),
        **{name: sampling_options_text(part) for name, part in parts.items() if part or name == "sampling defaults"},
    }


def describe_profile(path: Path) -> dict[str, Any]:
    """Return the facts of a latency profile, with the costs of each batch size."""
    from ...policies.profile import Profile

    profile = Profile.load(path)
    facts: dict[str, Any] = {"kind": "profile", "verdict": profile.noise.text if profile.noise else _NO_NOISE}
    for side, costs in (("short", profile.low), ("long", profile.high)):
        where = f"{side} context ({costs.context:.0f})"
        facts[f"{where}: draft step, ms"] = f"{costs.draft_s[0] * 1e3:.2f}"
        facts[f"{where}: verification of 0, 1, ... tokens, ms"] = " ".join(f"{s * 1e3:.2f}" for s in costs.verify_s)
    if batch := profile.batch:
        context = 0.5 * (batch.low.context + batch.high.context)
        for size in batch.sizes:
            tokens = batch.low.verify_s[size][-1][0]
            plain, full = (profile.verify_s(size, sent, context) * 1e3 for sent in (size, tokens))
            draft = profile.draft_s(size, context) * 1e3
            facts[f"batch of {size}, ms"] = (
                f"plain {plain:.2f}, draft step {draft:.2f}, verification of {tokens} tokens {full:.2f}"
            )
    return {
        **facts,
        "framework overhead, ms a round": profile.round_s * 1e3,
        "framework overhead, ms a drafted token": profile.step_s * 1e3,
        **{f"decision of {name}, us": profile.decision(name) * 1e6 for name in profile.decision_s},
        **profile.facts,
    }


_BY_FILE = {"policy.json": describe_policy, "drafter.json": describe_drafter, "config.json": describe_model}
