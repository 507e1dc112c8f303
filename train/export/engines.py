"""What each serving engine reads: vLLM, SGLang, TensorRT-LLM, llama.cpp. Formats are those of the versions named below.

| engine | source of the format |
|---|---|
| vLLM 0.33.0 | `vllm/v1/spec_decode/dynamic/utils.py`, `vllm/config/speculative.py`, `adaptive_verification.py` |
| SGLang 0.5.23 | `sglang/srt/speculative/adaptive_spec_params.py`; cost table: `dspark_components/dspark_sps.py` |
| TensorRT-LLM | `tensorrt_llm/llmapi/llm_args.py`, `_torch/speculative/dspark_planner.py` (published source, not run) |
| llama.cpp 00dc805 | `tools/server/README.md` |
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression

from ...collect.schema import NO_TOKEN, Header, draft_of, drafter_of
from ...decode.drafters.lookup import LONGEST
from ...decode.drafters.spec import change_paths, needs_draft, reads_states
from ...decode.engines.settings import KEY as VLLM_KEY, missing_in_engines
from ...decode.engines.sglang import KEY as SGLANG_KEY, rule_entry
from ...policies.contract import StopPolicy
from ...policies.errors import TraceError
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.storage import save_policy
from ..evaluate.serving import off_from, round_seconds
from ..replay.arrays import TraceArrays, typical_context
from .basis import TOP, Basis

PROPOSER = "specstop.decode.engines.vllm.Proposer"
CLAMP = 40.0
"""Limit of log-odds in vLLM's `acceptance_estimator.py` (0.32.0, 0.33.0)."""

MAX_FIT_ROWS, MIN_FIT_ROWS = 200_000, 100

Range = tuple[int, int, int]
"""First and last batch size, and their draft length."""


Exported = tuple[dict[str, str | bytes], dict[str, Any], dict[str, Any]]
"""Files of an export by path, its figures, and further facts for its page."""


def length_ranges(table: Sequence[dict[str, Any]]) -> list[Range]:
    """Return ranges of batch sizes with one length each; sizes between two measured ones have the length of the smaller."""
    ranges: list[Range] = []
    for row, after in itertools.zip_longest(table, table[1:]):
        last = after["batch"] - 1 if after else row["batch"]
        if ranges and ranges[-1][2] == row["length"]:
            ranges[-1] = (ranges[-1][0], last, row["length"])
        else:
            ranges.append((row["batch"], last, row["length"]))
    return ranges


def _table(basis: Basis) -> tuple[list[Range], dict[str, Any], dict[str, str | bytes]]:
    """Return the ranges of lengths, figures of them, and the lengths by batch and context as a file for any engine."""
    table, settings = basis.length_table(), basis.settings()
    first = basis.held_fixed[table[0]["length"]]
    off = {str(context): batch for context, batch in off_from(settings).items()}
    figures = {"alone": basis.single_request(first), "batches": table, "lengths": settings, "off_from": off}
    return length_ranges(table), figures, {"lengths.json": _json({"lengths": settings, "off_from": off})}


class CostCurves(NamedTuple):
    """Milliseconds of the steps of an engine.

    Attributes:
        drafts: (requests, ms) of drafting the full length.
        calls: (tokens of all requests, anchors included; ms) of the rest of a round.
    """

    drafts: list[tuple[int, float]]
    calls: list[tuple[int, float]]


def cost_curves(profile: Profile, sizes: Sequence[int], context: float, depth: int) -> CostCurves:
    """Return the costs of the batch sizes at a context length; equal numbers of tokens have the median of their costs."""
    calls: dict[int, list[float]] = defaultdict(list)
    drafts = []
    for size in sizes:
        later = float(profile.draft_s(size, context))
        drafts.append((size, 1e3 * (float(profile.first_draft_s(size, context)) + (depth - 1) * later)))
        for length in range(depth + 1):
            tokens = size * (length + 1)
            calls[tokens].append(1e3 * float(profile.verify_s(size, tokens, context)))
    return CostCurves(drafts, [(tokens, float(np.median(ms))) for tokens, ms in sorted(calls.items())])


def _curves(basis: Basis) -> CostCurves:
    return cost_curves(basis.profile, basis.sizes(), typical_context(basis.fit), basis.depth)


def vllm_costs(curves: CostCurves) -> dict[str, Any]:
    """Return the arguments of vLLM's `AdaptiveVerificationManager.set_cost_curves`."""
    return {"draft_curve": curves.drafts, "verify_curve": curves.calls}


def sglang_costs(curves: CostCurves) -> dict[str, Any]:
    """Return SGLang's `SpsAdditiveCostTable`: a step takes bias + alpha(requests) + theta(tokens) seconds."""
    first = curves.drafts[0][1]
    return {
        "bias_seconds": max(first * 1e-3, 1e-6),
        "bs_probes": [size for size, _ in curves.drafts],
        "alpha_seconds": [(ms - first) * 1e-3 for _, ms in curves.drafts],
        "m_probes": [tokens for tokens, _ in curves.calls],
        "theta_seconds": [ms * 1e-3 for _, ms in curves.calls],
    }


def trtllm_costs(curves: CostCurves) -> dict[str, Any]:
    """Return TensorRT-LLM's `SpsCostTable`: ms of a step by verified tokens, and what verifying less does not save."""
    first = min(ms for _, ms in curves.drafts)
    return {
        "token_counts": [tokens for tokens, _ in curves.calls],
        "step_time_ms": [ms for _, ms in curves.calls],
        "fixed_overhead_ms": first,
        "batch_sizes": [size for size, _ in curves.drafts],
        "batch_overhead_ms": [ms - first for _, ms in curves.drafts],
        "_meta": {"lookup": "interp", "source": "specstop"},
    }


def vllm(basis: Basis, out: Path) -> Exported:
    """Return vLLM's speculative configs: the policy itself if vLLM can run it, the length table, acceptance coefficients."""
    ranges, figures, files = _table(basis)
    config = {
        **vllm_drafter(basis.header),
        "num_speculative_tokens": max(1, *(length for *_, length in ranges)),  # vLLM accepts no 0
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in ranges],
    }
    files |= {"speculative_config.json": _json(config), "cost_curves.json": _json(vllm_costs(_curves(basis)))}
    if (coefficients := fit_acceptance(basis.fit, basis.depth)) is not None:
        files["acceptance.json"] = _json(coefficients)
    policy, drafter, obstacle = basis.policy, drafter_of(basis.header), ""
    if policy is not None and not (obstacle := vllm_obstacle(policy, drafter)):
        files |= vllm_policy(policy, basis.header, basis.depth, out)
    has_table = drafter == "model" or config["method"] != "draft_model"
    return files, figures, {"obstacle": obstacle, "has_table": has_table}


def vllm_drafter(header: Header) -> dict[str, Any]:
    """Return the entries of `--speculative-config` that name vLLM's drafter; lookup is its ngram."""
    if match := re.fullmatch(r"lookup(?:(?::|\?longest=)(\d+))?", drafter_of(header)):
        return {"method": "ngram", "prompt_lookup_max": int(match[1] or LONGEST), "prompt_lookup_min": 1}
    return {"method": "draft_model", "model": draft_of(header)}


def vllm_obstacle(policy: StopPolicy, drafter: str) -> str:
    """Return why vLLM cannot run a policy with its drafter; "" if it can."""
    if reads_states(drafter):
        return f"its drafter, {drafter}, reads the target's hidden states, which vLLM does not pass to a class"
    if missing := missing_in_engines(policy):
        return f"it reads {', '.join(missing)}, which vLLM does not pass to a drafter"
    return "" if policy.max_depth else "it never drafts"


def vllm_policy(policy: StopPolicy, header: Header, depth: int, out: Path) -> dict[str, str | bytes]:
    """Return the files with which vLLM runs the policy itself (`decode.engines.vllm`).

    Args:
        policy: the policy.
        header: of the traces, which names the drafter.
        depth: most tokens of a draft.
        out: folder of the export, which the configuration refers to.
    """
    drafter, folder = drafter_of(header), {}
    if isinstance(policy, LearnedPolicy):
        with tempfile.TemporaryDirectory() as stage:
            saved = save_policy(policy, Path(stage) / "policy")
            folder = {f"policy/{path.name}": path.read_bytes() for path in sorted(saved.glob("[!.]*"))}
    settings: dict[str, Any] = {"policy": str((out / "policy").resolve()) if folder else policy.shown_name}
    if needs_draft(drafter):
        settings["draft"] = draft_of(header)
    if drafter != "model":
        settings["drafter"] = change_paths(drafter, lambda path: str(Path(path).expanduser().resolve()))
    if header.temperature > 0:
        settings["temperature"] = header.temperature
    drafts = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": min(policy.max_depth, depth)}
    return {"proposer.json": _json(drafts), "additional_config.json": _json({VLLM_KEY: settings}), **folder}


def fit_acceptance(arrays: TraceArrays, depth: int) -> dict[str, Any] | None:
    """Return coefficients of vLLM's adaptive verification, or None if `top1` or rows are missing.

    Acceptance is sigmoid(slope x log-odds of the draft's largest probability + intercept of the position). The rows are what
    verification observes: the accepted tokens and the first rejected one, if a token was drawn there.
    """
    if "top1" not in arrays.columns:
        return None
    top, length = arrays.column("top1")[:, :depth].double().numpy(), arrays.accepted.numpy()
    is_drawn = arrays.tokens[:, :depth].numpy() != NO_TOKEN
    row, at = np.nonzero((np.arange(depth) <= length[:, None]) & is_drawn & ~arrays.cut.numpy()[:, None])
    if len(row) > MAX_FIT_ROWS:
        chosen = np.random.default_rng(0).choice(len(row), MAX_FIT_ROWS, replace=False)
        row, at = row[chosen], at[chosen]
    accepted = at < length[row]
    if len(row) < MIN_FIT_ROWS or accepted.all() or not accepted.any():
        return None
    position = csr_matrix((np.ones(len(row)), (np.arange(len(row)), at)), shape=(len(row), depth))
    model = LogisticRegression(C=1e3, fit_intercept=False, max_iter=1000)  # vLLM continues from these coefficients
    model.fit(hstack([csr_matrix(log_odds(top[row, at])[:, None]), position]), accepted)
    slope, *intercepts = model.coef_[0].tolist()
    return {"slope": max(slope, 0.0), "intercepts": intercepts, "rows": len(row)}


def log_odds(probability: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return log(p / (1 - p)), within +-`CLAMP`."""
    p = np.clip(probability, 1e-18, 1.0)  # log 1e-18 = -41
    with np.errstate(divide="ignore"):
        odds: np.ndarray[Any, Any] = np.clip(np.log(p) - np.log1p(-p), -CLAMP, CLAMP)
    return odds


def sglang(basis: Basis, out: Path) -> Exported:
    """Return SGLang's adaptive configs: the length table, and the candidates of the rule of `decode.engines.sglang`."""
    ranges, figures, files = _table(basis)
    fixed = {str(first): {"candidate_steps": [length], "ceiling_coeff": 0} for first, _, length in ranges}
    reached = basis.fit.accepted[~basis.fit.cut].numpy()
    survival = [float((reached >= depth).mean()) for depth in range(basis.depth + 1)]
    acceptance = [after / before if before else 0.0 for before, after in itertools.pairwise(survival)]
    context = typical_context(basis.fit)
    seconds = {size: round_seconds(basis.profile, size, context, basis.depth).tolist() for size in basis.sizes()}
    near = {
        row["batch"]: sorted({max(row["length"] - 1, 0), row["length"], min(row["length"] + 1, basis.depth)})
        for row in figures["batches"]
    }
    costed: dict[str, Any] = {str(size): {"candidate_steps": steps} for size, steps in near.items()}
    costed[SGLANG_KEY] = rule_entry(acceptance, seconds)
    figures["start"] = ranges[0][2]
    costs = _json(sglang_costs(_curves(basis)))
    return {**files, "adaptive.json": _json(fixed), "costed.json": _json(costed), "sps.json": costs}, figures, {}


def trtllm(basis: Basis, out: Path) -> Exported:
    """Return TensorRT-LLM's speculative config; keys of the schedule are the last batch size of a range."""
    ranges, figures, files = _table(basis)
    config = {
        "decoding_type": "Draft_Target",
        "speculative_model": draft_of(basis.header),
        "max_draft_len": max(1, *(length for *_, length in ranges)),
        "draft_len_schedule": {last: length for _, last, length in ranges},
    }
    text = yaml.safe_dump({"speculative_config": config}, sort_keys=False)
    costs = _json(trtllm_costs(_curves(basis)))
    return {**files, "speculative_config.yaml": text, "confidence_cost_table.json": costs}, figures, {}


def llama_cpp(basis: Basis, out: Path) -> Exported:
    """Return llama.cpp's arguments: `p_min` and the draft length that replay fastest; raises `TraceError` without `top1`."""
    if "top1" not in basis.header.features:
        raise TraceError("--traces: expected the feature top1 (and top2 to top10); collect them again with it")
    p, most, rounds = basis.threshold()
    settings = {"p_min": p, "n_max": most}
    args = f"--spec-type draft-simple\n--spec-draft-n-max {most}\n--spec-draft-p-min {p:g}\n"
    figures = {"settings": settings, "alone": basis.single_request(rounds)}
    return {"llama.args": args}, figures, {"has_top": set(TOP) <= set(basis.header.features)}


ENGINES: dict[str, Callable[[Basis, Path], Exported]] = {
    "vllm": vllm,
    "sglang": sglang,
    "trtllm": trtllm,
    "llama.cpp": llama_cpp,
}
"""Serialisers by name of the engine."""


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
