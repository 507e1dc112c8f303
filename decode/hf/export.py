"""A policy as a folder for `generate(custom_generate=...)`: transformers loads its code, its code runs the exact policy.

What is known of transformers 5.23: `custom_generate/generate.py` is copied into a cache and run there, with the modules that
it imports from beside itself and no other file; so the policy's files travel in such a module, as text. Everything that
`generate` was called with arrives, `assistant_model` and `tokenizer` among it, nothing prepared; the code is run only with
`trust_remote_code=True`, for a local folder too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError
from ...policies.files.atomic import write_atomic, write_json
from ...policies.files.outputs import claim_folder, staged_folder
from ...policies.learned.conditions import sampling_text
from ...policies.learned.policy import LearnedPolicy
from ...policies.registry import BUILTINS, load_policy
from ...policies.storage.folder import save_policy
from ..drafters.folder import save_drafter
from ..drafters.known import BUILTINS as DRAFTERS, TRAINED, needs_draft, read_known
from .carried import (
    DRAFTER,
    CarriedDrafter,
    carried_drafter,
    carried_module,
    carried_policy,
    drafter_for,
    tell_untrained_on,
)
from .generate import check_draft_model, specstop_generate

CODE, DATA, REQUIREMENTS = "generate.py", "carried.py", "requirements.txt"
FOLDER, POLICY = "custom_generate", "policy"

GENERATE = '''"""Decodes with the stop policy of this repository; everything else is in the package specstop."""

from specstop.decode.hf import generate_carried

from .carried import DRAFTER, DRAFTER_FILES, FILES, SPEC


def generate(model, **arguments):
    """Return what `model.generate` would, drafting with the drafter that is carried."""
    return generate_carried(model, arguments, FILES, SPEC, DRAFTER, DRAFTER_FILES)
'''


def deploy_hf(
    policy: str | Path,
    out: str | Path,
    *,
    drafter: str | None = None,
    settled: LearnedPolicy | None = None,
    gains: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a folder that `target.generate(custom_generate=folder, trust_remote_code=True, draft_model=...)` takes.

    Args:
        policy: a policy folder, `hub:owner/name`, or a built-in such as `confidence:0.4`.
        out: the folder: `custom_generate/`, `policy/` with the policy folder, `drafter/` with that of a trained drafter,
            `README.md` and `figures.json`.
        drafter: as of `find_drafter`; None = the one that the policy was trained with.
        settled: what is written in the place of a learned policy, such as the same one settled for another profile.
        gains: figures for the card, such as replayed ratios; by default those that the policy folder states.
        overwrite: replace what is in `out`.

    Returns:
        The figures.

    Raises:
        InputError: `out` is not empty, or as `claim_folder`; there is no such drafter, or it cannot be carried.
        PolicyError: there is no such policy, or it is a plugin's, whose code is not carried.
    """
    chosen = settled or load_policy(policy)
    drafts = drafter_for(chosen, drafter)
    tell_untrained_on(chosen, drafts)
    folder = claim_folder(out, overwrite=overwrite, inputs=[policy, drafts.source or None])
    learned = chosen if isinstance(chosen, LearnedPolicy) else None
    if learned is None and str(policy).partition("?")[0].partition(":")[0] not in BUILTINS:
        raise PolicyError(
            f"--policy: {policy} is a plugin, whose code an exported folder does not carry; install the plugin where it is "
            "to run and name it there"
        )
    known = dict(gains) if gains is not None else {"metrics": dict(learned.facts.metrics)} if learned else {}
    figures = {
        "schema": 1,
        "kind": "export",
        "engine": "hf",
        "policy": chosen.name,
        "drafter": drafts.spec,
        "exact": True,
        "specstop": version("specstop"),
        **known,
    }
    with staged_folder(folder) as stage:
        if learned is not None:
            save_policy(learned, stage / POLICY)
        if drafts.trained is not None:
            save_drafter(drafts.trained, stage / DRAFTER)
        spec = None if learned is not None else str(policy)
        code = stage / FOLDER
        write_atomic(code / CODE, GENERATE)
        write_atomic(code / DATA, carried_module(_data(stage / POLICY), spec, drafts.spec, _data(stage / DRAFTER)))
        write_atomic(code / REQUIREMENTS, f"specstop>={version('specstop')}\n")
        write_json(stage / "figures.json", figures)
        write_atomic(stage / "README.md", page(chosen, learned, drafts, figures))
    return figures


def _data(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder that loading reads, by name."""
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*")) if p.suffix in (".json", ".safetensors")}


def generate_carried(
    model: PreTrainedModel,
    arguments: Mapping[str, Any],
    files: Mapping[str, str],
    spec: str | None,
    drafter: str = "model",
    drafter_files: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Generate with a carried policy: what the `generate.py` of an exported folder calls.

    Args:
        model: the target.
        arguments: of `generate`, as transformers hands them to a repository's code. `draft_model` or `assistant_model` is
            the draft, where the drafter takes one; `streamer`, and `tokenizer` for stop strings, are understood; `policy`
            and `drafter` name others; every other one goes to `specstop_generate` or `generate`.
        files: base64 by name, of a policy folder.
        spec: a policy's name, where there are no files.
        drafter, drafter_files: as carried (`carried.carried_drafter`); folders of earlier versions hold neither.

    Raises:
        PolicyError: the files are not in order: they are checked as those of any policy folder.
        InputError: see `specstop_generate`.
    """
    options = {name: value for name, value in arguments.items() if value is not None}
    # `generate` drops `assistant_model` and `streamer` where a callable decodes: they go on under names that it keeps.
    draft = options.pop("assistant_model", None)
    if draft is not None and options.setdefault("draft_model", draft) is not draft:
        raise InputError("specstop_generate: draft_model= and assistant_model= are two models; give one of them")
    named_drafter = options.get("drafter", drafter)  # as it is called in the folder
    check_draft_model(options.setdefault("draft_model", None), named_drafter, "draft_model= or assistant_model=")
    options.setdefault("policy", carried_policy(tuple(files.items()), spec))
    if (streamer := options.pop("streamer", None)) is not None:
        options.setdefault("text_streamer", streamer)
    _take_stop_strings(options)
    decode: Any = model.generate
    with carried_drafter(drafter, {} if "drafter" in options else drafter_files) as named:
        return decode(**{"drafter": named, **options}, custom_generate=specstop_generate)


def _take_stop_strings(options: dict[str, Any]) -> None:
    """Turn stop strings into a criterion: `generate` keeps the tokenizer to itself when a callable decodes."""
    tokenizer = options.pop("tokenizer", None)
    config = options.get("generation_config")
    strings = options.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    if tokenizer is None or not strings:
        if strings:
            options["stop_strings"] = strings
        return
    if getattr(config, "stop_strings", None):
        config = copy.deepcopy(config)  # the caller's own stays as it is
        setattr(config, "stop_strings", None)  # noqa: B010 - any configuration may have it
        options["generation_config"] = config
    more = [*options.get("stopping_criteria", ()), StopStringCriteria(tokenizer, strings)]
    options["stopping_criteria"] = StoppingCriteriaList(more)


def page(policy: StopPolicy, learned: LearnedPolicy | None, drafts: CarriedDrafter, figures: Mapping[str, Any]) -> str:
    """Return the folder's card."""
    facts = learned.facts if learned is not None else None
    trained = (
        f"It was trained for {facts.verification} verification at {sampling_text(facts.temperature, facts.shaping)}; "
        "under another it decodes as correctly and stops less well."
        if facts
        else "It needed no training."
    )
    models = 'target = AutoModelForCausalLM.from_pretrained("TARGET")'
    beside = f", and so is the drafter, in `{DRAFTER}/`" if drafts.trained is not None else ""
    draft = same = ""
    if needs_draft(drafts.spec):
        models = 'target, draft = (AutoModelForCausalLM.from_pretrained(name) for name in ("TARGET", "DRAFT"))'
        draft, same = "    draft_model=draft,\n", "`assistant_model=draft` means the same. "
    return (
        "---\nlibrary_name: transformers\ntags: [custom_generate, speculative-decoding, stop-policy, specstop]\n---\n\n"
        f"# {policy.name}: a stop policy for speculative decoding\n\n"
        f"Decodes with {_drafting(drafts)} under the specstop policy `{policy.name}`, as `specstop decode` does. "
        f"{trained}\n\n"
        "## Use\n\n```console\npip install specstop\n```\n\n```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"{models}\n"
        'tokenizer = AutoTokenizer.from_pretrained("TARGET")\n'
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "ids = target.generate(\n"
        "    **inputs,\n"
        '    custom_generate="THIS FOLDER OR OWNER/NAME",\n'
        "    trust_remote_code=True,\n"
        f"{draft}"
        "    max_new_tokens=128,\n"
        ")\n```\n\n"
        f"{same}`tokenizer=` serves `stop_strings=`, `streamer=` shows one text; `policy=`, "
        "`verification=`, `tree=`, `drafter=`, `seed=` and `profile=` go to `specstop.decode.specstop_generate`.\n\n"
        "`trust_remote_code=True` runs `custom_generate/generate.py`: ten lines that call the installed package. The policy "
        f"is data, in `{FOLDER}/{DATA}` and, for people and for `specstop info`, in `{POLICY}/`{beside}; names, "
        "sizes, checksums and tensor headers are checked before anything is used, and nothing is unpickled.\n\n"
        f"## What to expect\n\n{_gains(figures)}\n\n"
        "## What is lost\n\n* Nothing of the policy.\n"
        "* Rows of a batch are decoded side by side, but ended ones are not refilled: a serving engine is faster under "
        "load.\n\n"
        "## To the hub\n\nThe hub's own command uploads a folder:\n\n```console\nhf upload OWNER/NAME THIS_FOLDER\n```\n"
    )


def _drafting(drafts: CarriedDrafter) -> str:
    """Return what drafts, in words."""
    if drafts.spec == "model":
        return "a draft model"
    own = "which was trained for one target" if drafts.trained is not None else "which needs no training"
    if any(part.kind not in (*DRAFTERS, *TRAINED) for part in read_known(drafts.spec).parts()):
        own = "which an installed package brings: install it as well"
    also = ", and a draft model," if needs_draft(drafts.spec) else ""
    return f"the drafter `{drafts.spec}`{also} ({own})"


def _ratio(found: Mapping[str, Any]) -> str:
    """Return a ratio with its interval, if it has one."""
    value = f"{found['value']:.3f}"
    return value if found["low"] is None else f"{value} [{found['low']:.3f}, {found['high']:.3f}]"


def _gains(figures: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    alone, metrics = figures.get("alone"), figures.get("metrics")
    if alone:
        rows = [
            ("plain decoding", alone["to_plain"]),
            (f"best fixed length ({alone['best_fixed']})", alone["to_best_fixed"]),
        ]
        body = "\n".join(f"| {what} | {_ratio(found)} |" for what, found in rows)
        where = f"Replayed on {alone['prompts']}, decision time included, with the profile's latency; 95% intervals."
        if figures.get("settled"):
            where += f" The policy was trained under another profile; this folder holds it as replayed: {figures['settled']}."
        return f"{where}\n\n| times as fast as | ratio |\n|---|---|\n{body}"
    if metrics and "held_out_ratio_to_best_fixed" in metrics:
        return (
            f"On the held-out prompts of its training, by replay: {metrics['held_out_ratio_to_best_fixed']:.3f} times the "
            "best fixed length. The gain depends on pair, prompts and hardware: `specstop evaluate` says it for others."
        )
    return "Not stated here: it depends on pair, prompts and hardware. `specstop evaluate` says it for a pair."
