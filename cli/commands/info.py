"""`specstop info`: describe a trace, a policy, drafter or model folder, or a profile."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.errors import InputError
from ..common import flat
from ..console.output import print_json, table
from ..options.shared import Json

if TYPE_CHECKING:
    from ...collect.acceptance import DepthOutcomes
    from ...collect.store.folder import Trace
    from ...policies.costs import BatchCosts
    from ...policies.profile import Profile

_NAMED = 6
_NOT_OBSERVED, _MEAN = "-", "accepted length, mean"

UNJUDGED = "nothing says how noisy the machine was: the timings of these costs were not kept, or the costs were edited"


def info(
    path: Annotated[Path, typer.Argument(help="The folder of a trace, a policy, a drafter or a model, or a profile.")],
    json: Json = False,
) -> None:
    """Describe a trace, the folder of a policy, a trained drafter or a model, or a latency profile."""
    if (path / "header.json").is_file():
        _show_trace(path, json)
        return
    if (path / "policy.json").is_file():
        facts = _policy(path)
    elif (path / "drafter.json").is_file():
        facts = _drafter(path)
    elif (path / "config.json").is_file():
        facts = _model(path)
    elif path.is_file():
        facts = _profile(path)
    else:
        raise InputError(
            f"expected the folder of a trace, a policy, a drafter or a model, or a profile, but {path} is none of them"
        )
    if json:
        print_json(facts)
        return
    table(str(path), ("what", "value"), flat(facts))


def _show_trace(path: Path, json: bool) -> None:
    from ...collect.store.folder import open_trace

    trace = open_trace(path)
    if json:
        print_json(trace_json(trace))
        return
    facts, rows = describe_trace(trace)
    is_tree = trace.header.depth < len(trace.header.topology)
    branches, sample = (
        branch_rows(trace) if is_tree else [],
        sample_rows(trace),
    )  # nothing is printed of a damaged trace
    table(str(path), ("what", "value"), flat(facts))
    if rows:
        table("acceptance", ("depth", "P(A >= depth)", "positions"), rows)
    if is_tree:
        table("acceptance by branch", ("depth", "branch", "P(accepted)", "rows"), branches)
    table("a row", ("what", "value"), sample)


def trace_json(trace: Trace) -> dict[str, Any]:
    """Return what `info` says of a trace as JSON can hold it."""
    facts, rows = describe_trace(trace)
    return {
        **facts,
        _MEAN: None if facts[_MEAN] == _NOT_OBSERVED else facts[_MEAN],
        "acceptance": [
            {"depth": int(k), "probability": None if p == _NOT_OBSERVED else float(p), "positions": int(n)}
            for k, p, n in rows
        ],
        "branches": [
            {"depth": int(k), "branch": b, "probability": p, "rows": int(n)} for k, b, p, n in branch_rows(trace)
        ],
        "sample": dict(sample_rows(trace)),
    }


def describe_trace(trace: Trace) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """Return the plain facts of a trace, and its acceptance by depth as table rows."""
    import numpy as np

    from ...collect.acceptance import LENGTHS
    from ...collect.store.card import balance_text, hidden_text, replay_text
    from ...decode.verify.modes import describe
    from ...policies.learned import shaping_text

    header = trace.header
    columns = trace.table(["accepted_length", "cut", "prompt_id", "sample", "group"])
    length, cut = columns["accepted_length"].to_numpy(), columns["cut"].to_numpy().astype(bool)
    outcomes = _outcomes(trace)
    survival = outcomes.survival
    # Beside P(A >= k) the positions at which depth k was observed after the k - 1 tokens before it were accepted.
    table_rows = [
        (str(k), f"{share:.3f}" if np.isfinite(share) else _NOT_OBSERVED, str(count))
        for k, (share, count) in enumerate(zip(survival, outcomes.observed.sum(0), strict=True), 1)
        if len(outcomes.row)
    ]
    mean: float | str = float(length[~cut].mean()) if len(outcomes.row) else 0.0
    if outcomes.basis:  # E[A] is the sum of P(A >= k)
        mean = float(survival.sum()) if np.isfinite(survival).all() else _NOT_OBSERVED
    groups = columns["group"].unique().to_pylist()
    facts = {
        "kind": "trace",
        "schema": header.schema,
        "collector": header.collector + (f" under {header.policy}" if header.policy else ""),
        **({"batch": header.batch} if header.batch > 1 else {}),
        "texts": header.texts,
        "target": header.target,
        "draft": header.draft,
        "verification": describe(header.verification),
        "replay": replay_text(header),
        "temperature": header.shown_temperature,
        "filter": shaping_text(header.shaping),
        "depth": header.depth,
        "nodes": len(header.topology),
        "prompts": header.prompts,
        "prompts with rows": len(columns.group_by(["prompt_id", "sample"]).aggregate([])),
        "distinct prompt ids": len(columns["prompt_id"].unique()),
        **({"prompts left out": out} if (out := header.facts.get("prompts left out")) else {}),
        "prompts from": header.facts.get("prompts from") or "not recorded",
        "groups": f"{len(groups)}: {', '.join(map(str, groups[:_NAMED]))}{', ...' if len(groups) > _NAMED else ''}",
        "positions": len(length),
        "cut": int(cut.sum()),
        _MEAN: mean,
        **({"note on acceptance": outcomes.basis} if outcomes.basis else {}),
        **({"draft lengths": header.facts[LENGTHS]} if LENGTHS in header.facts else {}),
        "max new tokens": header.max_new_tokens,
        "shards": f"{len(trace.finished)} of {header.shards}",
        "bytes": sum(path.stat().st_size for path in (trace.folder / "data").glob("*.parquet")),
        "features": ", ".join((*header.anchor_features, *header.features)),
        "hidden states": hidden_text(header),
        **({"completions": balance_text(checked)} if (checked := header.facts.get("completions")) else {}),
        "seed": header.seed,
        "made on": f"{header.facts.get('device')}, {header.facts.get('dtype')}, {header.facts.get('threads')} threads",
    }
    return facts, table_rows


def _outcomes(trace: Trace) -> DepthOutcomes:
    """Return what the rounds of a trace show of each depth."""
    from ...collect.acceptance import COLUMNS, LIVE_COLUMNS, depth_outcomes
    from ...collect.store.values import column_array

    table = trace.table([*COLUMNS, *(LIVE_COLUMNS if trace.header.collector == "live" else ())])
    return depth_outcomes(trace.header, {name: column_array(table[name]) for name in table.column_names})


def branch_rows(trace: Trace) -> list[tuple[str, str, str, str]]:
    """Return acceptance of each node of a tree as table rows: depth, branch, P(accepted), rows it is known of."""
    from ...collect.store.values import column_array

    columns = trace.table(["accepted", "labelled"])
    accepted, labelled = (column_array(columns[name]).astype(bool) for name in ("accepted", "labelled"))
    depths: list[int] = []
    ranks: dict[int, int] = {}
    rows = []
    for node, parent in enumerate(trace.header.topology):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        ranks[parent] = ranks.get(parent, 0) + 1
        known = int(labelled[:, node].sum())
        share = f"{(accepted & labelled)[:, node].sum() / known:.3f}" if known else "-"
        parent_name = f"node {parent}" if parent >= 0 else "the anchor"
        rows.append((str(depths[-1]), f"{ranks[parent]} of {parent_name}", share, str(known)))
    return rows


def sample_rows(trace: Trace) -> list[tuple[str, str]]:
    """Return the first row with an accepted token, or the first of all, as table rows: what a row looks like."""
    import pyarrow.compute as pc

    table = next((t for t in trace.shards() if t.num_rows), None)
    if table is None:
        return []
    first = pc.index(pc.greater(table["accepted_length"], 0), True).as_py()
    (row,) = table.slice(max(0, first), 1).to_pylist()  # first is -1 where no row has one
    return [(name, _short(value)) for name, value in row.items()]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_short(v) for v in value[:_NAMED]) + (" ..." if len(value) > _NAMED else "")
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _policy(path: Path) -> dict[str, Any]:
    from ...policies.learned import shaping_text
    from ...policies.storage import load_policy_folder

    policy = load_policy_folder(path)
    facts = policy.metadata
    hidden = ", ".join(f"{name} ({size} numbers)" for name, size in policy.sizes.items())
    return {
        "kind": "policy",
        "name": policy.name,
        "head": policy.head.kind,
        "rule": policy.rule.kind,
        "features": ", ".join(policy.features),
        **({"hidden states": hidden} if hidden else {}),
        "calibration": f"accept {policy.accept.kind}, next {policy.next.kind}",
        "first decision at depth": policy.first,
        **({"batches that are not asked about": undecided} if (undecided := policy.rule.undecided) else {}),
        "max depth": policy.max_depth,
        "weights": sum(array.size for array in policy.head.tensors().values()),
        "temperature": facts.temperature,
        "filter": shaping_text(facts.shaping),
        "verification": facts.verification,
        "label": facts.label,
        **{f"pair: {role}": value for role, value in facts.pair.items()},
        "rho (tokens/s)": facts.rho,
        **{f"provenance: {name}": _short(value) for name, value in facts.provenance.items()},
        **{name: value for name, value in facts.metrics.items() if not isinstance(value, list)},
    }


def _drafter(path: Path) -> dict[str, Any]:
    from ...decode.drafters.folder import load_drafter

    trained = load_drafter(path)
    network: Any = trained.network
    shape = dataclasses.asdict(network.shape)
    metrics = dict(trained.metrics)
    shares = metrics.pop("acceptance", None)
    return {
        "kind": "drafter",
        "name": f"{trained.kind}:{path}",
        "network": trained.kind,
        "depth": shape.pop("depth"),
        "target": trained.target,
        "hash": trained.identity,
        "weights": sum(tensor.numel() for tensor in network.state_dict().values()),
        **{name.replace("_", " "): size for name, size in shape.items() if size},  # heads have no layer
        **(
            {f"acceptance, depth {depth}": share for depth, share in enumerate(shares, 1)}
            if isinstance(shares, list)
            else {}
        ),
        **{f"provenance: {name}": _short(value) for name, value in trained.provenance.items()},
        **{name: value for name, value in metrics.items() if not isinstance(value, list)},
    }


def _model(path: Path) -> dict[str, Any]:
    """Return what `generation_config.json` of a model says of the texts that it writes."""
    from transformers import AutoConfig, GenerationConfig

    from ...decode.verify.sampling import IGNORED, NEUTRAL, model_defaults
    from ...policies.learned import shaping_text

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        there = (path / "generation_config.json").is_file()
        defaults = GenerationConfig.from_pretrained(path) if there else GenerationConfig.from_model_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    fields = model_defaults(defaults)
    parts = {
        "sampling defaults": {name: value for name, value in fields.items() if name in NEUTRAL},
        "defaults left out": {name: value for name, value in fields.items() if name in IGNORED},
        "defaults that cannot be applied": {name: fields[name] for name in fields if name not in {*NEUTRAL, *IGNORED}},
    }
    return {
        "kind": "model",
        "architecture": ", ".join(config.architectures or []) or config.model_type,
        "vocabulary": config.get_text_config().vocab_size,
        "end-of-text tokens": str(defaults.eos_token_id),
        **{name: shaping_text(part) for name, part in parts.items() if part or name == "sampling defaults"},
    }


def _profile(path: Path) -> dict[str, Any]:
    from ...policies.profile import Profile

    profile = Profile.load(path)
    return {
        "kind": "profile",
        "verdict": UNJUDGED if profile.noise is None else profile.noise.text,
        **{
            f"{side} context ({table.context:.0f}): {name}": value
            for side, table in (("short", profile.low), ("long", profile.high))
            for name, value in (
                ("draft step, ms", f"{table.draft_s[0] * 1e3:.2f}"),
                ("verification of 0, 1, ... tokens, ms", " ".join(f"{v * 1e3:.2f}" for v in table.verify_s)),
            )
        },
        **(_batch_facts(profile, profile.batch) if profile.batch else {}),
        "framework overhead, ms a round": profile.round_s * 1e3,
        "framework overhead, ms a drafted token": profile.step_s * 1e3,
        **{f"decision of {name}, us": profile.decision(name) * 1e6 for name in profile.decision_s},
        **dict(profile.facts),
    }


def _batch_facts(profile: Profile, costs: BatchCosts) -> dict[str, str]:
    """Return what a step of plain decoding, a draft step and a full verification of each batch size cost."""
    context, facts = 0.5 * (costs.low.context + costs.high.context), {}
    for size in costs.sizes:
        tokens = costs.low.verify_s[size][-1][0]
        parts = (
            profile.verify_s(size, size, context),
            profile.draft_s(size, context),
            profile.verify_s(size, tokens, context),
        )
        plain, draft, full = (f"{float(part) * 1e3:.2f}" for part in parts)
        facts[f"batch of {size}, ms"] = f"plain {plain}, draft step {draft}, verification of {tokens} tokens {full}"
    return facts
