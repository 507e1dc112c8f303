"""A policy as a repository for `generate(custom_generate=...)`: transformers loads its code, which runs the exact policy.

transformers 5.23 copies `custom_generate/generate.py` into a cache and calls its function with all arguments of `generate`,
`assistant_model` and `tokenizer` included. Code is run only with `trust_remote_code=True`, also from a local folder. The
function does not receive the repository, so `generate_exported` reads it from the frame of the calling `generate`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from ...policies.conditions import sampling_text
from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, SpecstopWarning
from ...policies.files import prepare_output_dir, staged_folder, write_atomic, write_json
from ...policies.learned import LearnedPolicy
from ...policies.registry import BUILTINS, load_policy
from ...policies.safe_loading import read_json
from ...policies.storage import load_policy_folder, save_policy
from ..drafters.folder import TrainedDrafter, save_drafter
from ..drafters.spec import (
    BUILTINS as DRAFTERS,
    TRAINED,
    check_drafter,
    load_trained,
    needs_draft,
    parse_spec,
    paths_of,
)
from .arguments import generate_arguments
from .generate import check_draft_model, specstop_generate

FOLDER, POLICY, DRAFTER, FIGURES = "custom_generate", "policy", "drafter", "figures.json"
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only")
"""Arguments of `generate` for the download of a repository."""

GENERATE = '''"""Decodes with the stop policy of this repository. The code is in the package specstop."""

from specstop.decode.hf import generate_exported


def generate(model, **arguments):
    """Return the output of `model.generate`, drafted with the policy and the drafter of this repository."""
    return generate_exported(model, arguments)
'''


@dataclass(frozen=True)
class ExportedDrafter:
    """The drafter of an export.

    Attributes:
        spec: as of `find_drafter`; the folder of a trained drafter is `DRAFTER`.
        source: original folder of a trained drafter, else "".
        trained: the trained drafter.
    """

    spec: str = "model"
    source: str = ""
    trained: TrainedDrafter | None = None


def drafter_for(policy: StopPolicy, spec: str | None) -> ExportedDrafter:
    """Return the drafter that a policy is exported with.

    Args:
        policy: a learned policy remembers the drafter it was trained with.
        spec: as of `find_drafter`; None = the drafter of the training, else the draft model.

    Raises:
        InputError: there is no such drafter, or it reads a text file, which is not exported.
    """
    facts = policy.metadata if isinstance(policy, LearnedPolicy) else None
    spec = spec or (str(facts.provenance.get("drafter", "model")) if facts else "model")
    check_drafter(spec)
    last = [*parse_spec(spec).parts()][-1]
    source = str(last.value) if last.kind in TRAINED else ""
    if files := [path for path in paths_of(spec) if path != source]:
        raise InputError(
            f"--drafter: {spec} reads the file {files[0]}, which is not exported; use --drafter suffix without a file"
        )
    if not source:
        return ExportedDrafter(spec)
    return ExportedDrafter(spec.removesuffix(source) + DRAFTER, source, load_trained(last.kind, source))


def deploy_hf(
    policy: str | Path,
    out: str | Path,
    *,
    drafter: str | None = None,
    settled: LearnedPolicy | None = None,
    gains: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a repository for `target.generate(custom_generate=folder, trust_remote_code=True, draft_model=...)`.

    Args:
        policy: a policy folder, `hub:owner/name`, or a built-in such as `confidence:0.4`.
        out: the folder: `custom_generate/`, `policy/` with the policy folder, `drafter/` with that of a trained drafter,
            `README.md` and `figures.json`.
        drafter: as of `find_drafter`; None = the one that the policy was trained with.
        settled: exported instead of a learned policy, such as the same one tuned for another profile.
        gains: figures for the card, such as replayed ratios; by default those of the policy folder.
        overwrite: replace the contents of `out`.

    Returns:
        The contents of `figures.json`.

    Raises:
        InputError: `out` is not empty, or there is no such drafter, or it cannot be exported.
        PolicyError: there is no such policy, or it is a plugin, whose code is not exported.
    """
    chosen = settled or load_policy(policy)
    drafts = drafter_for(chosen, drafter)
    _warn_other_drafter(chosen, drafts)
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[policy, drafts.source or None])
    learned = chosen if isinstance(chosen, LearnedPolicy) else None
    if learned is None and str(policy).partition("?")[0].partition(":")[0] not in BUILTINS:
        raise PolicyError(
            f"--policy: {policy} is a plugin, whose code is not exported; install the plugin on the serving machine and name "
            "it there"
        )
    metadata = dict(gains) if gains is not None else {"metrics": dict(learned.metadata.metrics)} if learned else {}
    figures = {
        "schema": 1,
        "kind": "export",
        "engine": "hf",
        "policy": chosen.name,
        "spec": None if learned is not None else str(policy),
        "drafter": drafts.spec,
        "exact": True,
        "specstop": version("specstop"),
        **metadata,
    }
    with staged_folder(folder) as stage:
        if learned is not None:
            save_policy(learned, stage / POLICY)
        if drafts.trained is not None:
            save_drafter(drafts.trained, stage / DRAFTER)
        write_atomic(stage / FOLDER / "generate.py", GENERATE)
        write_atomic(stage / FOLDER / "requirements.txt", f"specstop>={version('specstop')}\n")
        write_json(stage / FIGURES, figures)
        write_atomic(stage / "README.md", page(chosen, learned, drafts, figures))
    return figures


def _warn_other_drafter(policy: StopPolicy, drafts: ExportedDrafter) -> None:
    """Warn if a learned policy was trained with another drafter than the trained one it is exported with."""
    if not isinstance(policy, LearnedPolicy) or drafts.trained is None:
        return
    draft = policy.metadata.pair.get("draft", "")
    if draft and not draft.endswith(drafts.trained.identity):  # of two drafters the second identity comes last
        warnings.warn(
            f"{policy.name} was trained with another drafter ({draft}) than {drafts.source} ({drafts.trained.identity})",
            SpecstopWarning,
            stacklevel=3,
        )


def generate_exported(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Any:
    """Generate with an exported policy. The `generate.py` of the repository calls this function.

    Args:
        model: the target.
        arguments: of `generate`. `draft_model` or `assistant_model` is the draft model, if the drafter needs one; `streamer`
            and `stop_strings` with `tokenizer` are supported; `policy` and `drafter` replace those of the repository;
            `HUB_ARGUMENTS` are used for downloads; other arguments are passed to `specstop_generate`.

    Raises:
        PolicyError: the files of the policy are damaged.
        InputError: the repository cannot be read, or see `specstop_generate`.
    """
    options = {name: value for name, value in arguments.items() if value is not None}
    repository = generate_arguments().get("custom_generate") or model.config.name_or_path
    download = {name: options.pop(name) for name in HUB_ARGUMENTS if name in options}
    folder = _local_folder(str(repository), download)
    figures = read_json(folder / FIGURES, "custom_generate")
    if not isinstance(figures, dict) or figures.get("kind") != "export":
        raise InputError(
            f"custom_generate: expected an export in {folder / FIGURES}; write it again with specstop deploy --to hf"
        )
    # `generate` does not pass `assistant_model` and `streamer` to a callable.
    draft = options.pop("assistant_model", None)
    if draft is not None and options.setdefault("draft_model", draft) is not draft:
        raise InputError("specstop_generate: got both draft_model= and assistant_model=; pass one of them")
    drafter = str(figures.get("drafter", "model"))
    expected = "draft_model= or assistant_model="
    check_draft_model(options.setdefault("draft_model", None), options.get("drafter", drafter), expected)
    if drafter.endswith(DRAFTER) and (folder / DRAFTER).is_dir():
        drafter = drafter.removesuffix(DRAFTER) + str(folder / DRAFTER)
    if "policy" not in options:
        stamp = (folder / FIGURES).stat().st_mtime_ns
        options["policy"] = _load_policy(folder, figures.get("spec"), stamp)
    if (streamer := options.pop("streamer", None)) is not None:
        options.setdefault("text_streamer", streamer)
    _replace_stop_strings(options)
    # The method of the class: a model loaded from the same repository has an attribute `generate` that leads here.
    cls: Any = type(model)
    return cls.generate(model, **{"drafter": drafter, **options}, custom_generate=specstop_generate)


def _local_folder(repository: str, download: Mapping[str, Any]) -> Path:
    """Return the folder of a repository, downloaded if necessary."""
    if Path(repository).is_dir():
        return Path(repository)
    import huggingface_hub

    try:
        patterns = [FIGURES, f"{POLICY}/*", f"{DRAFTER}/*"]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns, **download))
    except (OSError, ValueError) as error:  # the errors of huggingface_hub are subclasses of these
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"custom_generate: expected a folder or a repository of the hub, and {repository} cannot be downloaded: {reason}"
        ) from None


@lru_cache(maxsize=8)
def _load_policy(folder: Path, spec: str | None, stamp: int) -> StopPolicy:
    """Return the exported policy. It is cached per `stamp`, the modification time of the export."""
    return load_policy_folder(folder / POLICY) if spec is None else load_policy(spec)


def _replace_stop_strings(options: dict[str, Any]) -> None:
    """Replace stop strings by a stopping criterion, because `generate` does not pass the tokenizer to a callable."""
    tokenizer = options.pop("tokenizer", None)
    config = options.get("generation_config")
    strings = options.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    if tokenizer is None or not strings:
        if strings:
            options["stop_strings"] = strings
        return
    if getattr(config, "stop_strings", None):
        config = copy.deepcopy(config)  # the caller's config is not modified
        setattr(config, "stop_strings", None)  # noqa: B010 - any configuration may have it
        options["generation_config"] = config
    criteria = [*options.get("stopping_criteria", ()), StopStringCriteria(tokenizer, strings)]
    options["stopping_criteria"] = StoppingCriteriaList(criteria)


CARD = """\
---
library_name: transformers
tags: [custom_generate, speculative-decoding, stop-policy, specstop]
---

# {name}: a stop policy for speculative decoding

Decodes with {drafting} under the specstop policy `{name}`, as `specstop decode` does. {training}

## Use

```console
pip install specstop
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{models}
tokenizer = AutoTokenizer.from_pretrained("TARGET")
inputs = tokenizer("Once upon a time", return_tensors="pt")
ids = target.generate(
    **inputs,
    custom_generate="THIS FOLDER OR OWNER/NAME",
    trust_remote_code=True,
{draft}    max_new_tokens=128,
)
```

{alias}`tokenizer=` enables `stop_strings=`, `streamer=` shows one text; `policy=`, `verification=`, `tree=`, `drafter=`,
`seed=` and `profile=` are passed to `specstop.decode.specstop_generate`.

`trust_remote_code=True` runs `custom_generate/generate.py`: ten lines that call the installed package. {data} Names,
sizes, checksums and tensor headers are checked before use, and nothing is unpickled.

## Expected gain

{gains}

## What is lost

* Nothing of the policy.
* Rows of a batch are decoded side by side, but ended ones are not refilled: a serving engine is faster under load.

## Upload to the hub

```console
hf upload OWNER/NAME THIS_FOLDER
```
"""


def page(policy: StopPolicy, learned: LearnedPolicy | None, drafts: ExportedDrafter, figures: Mapping[str, Any]) -> str:
    """Return the model card of the repository."""
    facts = learned.metadata if learned is not None else None
    training = "It needed no training."
    if facts:
        training = (
            f"It was trained for {facts.verification} verification at {sampling_text(facts.temperature, facts.shaping)}; "
            "with other settings the text is as correct and the stops are less good."
        )
    models, draft, alias = 'target = AutoModelForCausalLM.from_pretrained("TARGET")', "", ""
    if needs_draft(drafts.spec):
        models = 'target, draft = (AutoModelForCausalLM.from_pretrained(name) for name in ("TARGET", "DRAFT"))'
        draft, alias = "    draft_model=draft,\n", "`assistant_model=draft` is an alias of `draft_model=draft`. "
    data = f"The policy is data in `{POLICY}/`" if learned is not None else f"The spec of the policy is in `{FIGURES}`"
    if drafts.trained is not None:
        data += f", the drafter is data in `{DRAFTER}/`"
    return CARD.format(
        name=policy.name,
        drafting=_drafting(drafts),
        training=training,
        models=models,
        draft=draft,
        alias=alias,
        data=data + ".",
        gains=_gains(figures),
    )


def _drafting(drafts: ExportedDrafter) -> str:
    """Return what drafts, in words."""
    if drafts.spec == "model":
        return "a draft model"
    own = "which was trained for one target" if drafts.trained is not None else "which needs no training"
    if any(part.kind not in (*DRAFTERS, *TRAINED) for part in parse_spec(drafts.spec).parts()):
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
