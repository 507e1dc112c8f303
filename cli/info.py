"""`specstop info`: describe a trace, a policy folder or a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..policies.errors import InputError
from .common import flat
from .console import print_json, table
from .options import Json

if TYPE_CHECKING:
    from ..collect.store import Trace


def info(
    path: Annotated[Path, typer.Argument(help="A trace folder, a policy folder, or a profile.")],
    json: Json = False,
) -> None:
    """Describe a trace, a policy folder or a latency profile."""
    if (path / "header.json").is_file():
        from ..collect.store import open_trace

        facts, rows = describe_trace(open_trace(path))
    elif (path / "policy.json").is_file():
        facts, rows = _policy(path), []
    elif path.is_file():
        facts, rows = _profile(path), []
    else:
        raise InputError(f"expected a trace folder, a policy folder or a profile, but {path} is none of them")
    if json:
        print_json(facts)
        return
    table(str(path), ("what", "value"), flat(facts))
    if rows:
        table("acceptance", ("depth", "P(A >= depth)", "anchors"), rows)


def describe_trace(trace: Trace) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """Return the plain facts of a trace, and its acceptance by depth as table rows."""
    import numpy as np

    from ..collect.store import finished

    header = trace.header
    rows = trace.rows.with_format("numpy")
    length, cut = np.asarray(rows["accepted_length"][:]), np.asarray(rows["cut"][:])
    uncut = length[~cut.astype(bool)]
    table_rows = (
        [
            (str(k), f"{float((uncut >= k).mean()):.3f}", str(int((uncut >= k - 1).sum())))
            for k in range(1, header.depth + 1)
        ]
        if len(uncut)
        else []
    )
    facts = {
        "kind": "trace",
        "collector": header.collector,
        "target": header.target,
        "draft": header.draft,
        "verification": f"{header.verification} (lossless)",
        "temperature": header.temperature,
        "depth": header.depth,
        "prompts": header.prompts,
        "anchors": len(length),
        "cut": int(cut.sum()),
        "shards": f"{len(finished(trace.folder, header))} of {header.shards}",
        "features": ", ".join((*header.anchor_features, *header.features)),
        "seed": header.seed,
        "made on": f"{header.facts.get('device')}, {header.facts.get('dtype')}, {header.facts.get('threads')} threads",
    }
    return facts, table_rows


def _policy(path: Path) -> dict[str, Any]:
    from ..policies.folder import load_policy_folder

    policy = load_policy_folder(path)
    facts = policy.facts
    return {
        "kind": "policy",
        "name": policy.name,
        "head": policy.head.kind,
        "rule": policy.rule.kind,
        "features": ", ".join(policy.features),
        "max depth": policy.max_depth,
        "temperature": facts.temperature,
        "verification": facts.verification,
        "rho (tokens/s)": facts.rho,
        **facts.metrics,
    }


def _profile(path: Path) -> dict[str, Any]:
    from ..policies.costs import Profile

    profile = Profile.load(path)
    return {
        "kind": "profile",
        **{
            f"{side} context ({table.context:.0f}): {name}": value
            for side, table in (("short", profile.low), ("long", profile.high))
            for name, value in (
                ("draft step, ms", f"{table.draft_s[0] * 1e3:.2f}"),
                ("verification of 0, 1, ... tokens, ms", " ".join(f"{v * 1e3:.2f}" for v in table.verify_s)),
            )
        },
        "outside, ms a round": profile.round_s * 1e3,
        "outside, ms a drafted token": profile.step_s * 1e3,
        **{f"decision of {name}, us": value * 1e6 for name, value in profile.decision_s.items()},
        **dict(profile.facts),
    }
