"""A policy as a repository for `generate(custom_generate=...)` of transformers (`decode.hf.exported` runs it)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...decode.drafters.folder import TrainedDrafter, load_drafter, save_drafter
from ...decode.drafters.spec import (
    BUILTINS as DRAFTERS,
    NETWORKS,
    change_paths,
    check_drafter,
    needs_draft,
    parse_spec,
    paths_of,
)
from ...decode.hf.exported import DRAFTER, FIGURES, POLICY
from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, SpecstopWarning
from ...policies.files import prepare_output_dir, staged_folder, write_atomic, write_json
from ...policies.learned import LearnedPolicy, sampling_text
from ...policies.registry import BUILTINS, load_policy
from ...policies.storage import save_policy

GENERATE = '''"""Decodes with the stop policy of this repository. The code is in the package specstop."""

from specstop.decode.hf.exported import generate_exported


def generate(model, **arguments):
    """Return the output of `model.generate`, drafted with the policy and the drafter of this repository."""
    return generate_exported(model, arguments)
'''


def exported_drafter(policy: StopPolicy, spec: str | None) -> tuple[str, TrainedDrafter | None]:
    """Return the spec of the drafter that a policy is exported with, and the trained drafter in it.

    Args:
        policy: a learned policy stores the drafter it was trained with.
        spec: as of `find_drafter`; None = the drafter of the training, by default the draft model.

    Raises:
        InputError: there is no such drafter, or it reads a text file, which is not exported.
    """
    learned = policy.metadata.provenance.get("drafter") if isinstance(policy, LearnedPolicy) else None
    spec = spec or str(learned or "model")
    check_drafter(spec)
    *before, last = parse_spec(spec)
    if files := [part.path for part in (*before, last) if part.path and part.name not in NETWORKS]:
        raise InputError(
            f"--drafter: {spec} reads the file {files[0]}, which is not exported; use --drafter suffix without a file"
        )
    return spec, load_drafter(last.path, kind=NETWORKS[last.name]) if last.name in NETWORKS else None


def deploy_hf(
    policy: str | Path,
    out: str | Path,
    *,
    drafter: str | None = None,
    settled: LearnedPolicy | None = None,
    figures: Mapping[str, Any] | None = None,
    gains: str = "",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a repository for `target.generate(custom_generate=folder, trust_remote_code=True, draft_model=...)`.

    Args:
        policy: a policy folder, `hub:owner/name`, or a built-in such as `confidence:0.4`.
        out: the folder: `custom_generate/`, `policy/` with the policy folder, `drafter/` with that of a trained drafter,
            `README.md` and `figures.json`.
        drafter: as of `find_drafter`; None = the one that the policy was trained with.
        settled: exported instead of a learned policy, such as the same one tuned for another profile.
        figures: for `figures.json`, such as replayed ratios; by default the metrics of the policy folder.
        gains: Markdown about the expected gain for the card; by default that of the policy folder.
        overwrite: replace the contents of `out`.

    Returns:
        The contents of `figures.json`.

    Raises:
        InputError: `out` is not empty, or there is no such drafter, or it cannot be exported.
        PolicyError: there is no such policy, or it is a plugin, whose code is not exported.
    """
    chosen = settled or load_policy(policy)
    spec, trained = exported_drafter(chosen, drafter)
    learned = chosen if isinstance(chosen, LearnedPolicy) else None
    metrics = dict(learned.metadata.metrics) if learned else {}
    if learned is None and str(policy).partition("?")[0].partition(":")[0] not in BUILTINS:
        raise PolicyError(
            f"--policy: {policy} is a plugin, whose code is not exported; install the plugin on the serving machine and name "
            "it there"
        )
    draft = learned.metadata.pair.get("draft", "") if learned else ""
    if trained is not None and draft and not draft.endswith(trained.identity):  # of two drafters the second one is last
        text = f"{chosen.name} was trained with another drafter ({draft}) than {spec} ({trained.identity})"
        warnings.warn(text, SpecstopWarning, stacklevel=2)
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[policy, *paths_of(spec)])
    spec = change_paths(spec, lambda _: DRAFTER)
    contents = {
        "schema": 1,
        "kind": "export",
        "engine": "hf",
        "policy": chosen.name,
        "spec": None if learned is not None else str(policy),
        "drafter": spec,
        "exact": True,
        "specstop": version("specstop"),
        **(figures or ({"metrics": metrics} if learned else {})),
    }
    if not gains and "held_out_ratio_to_best_fixed" in metrics:
        ratio = f"{metrics['held_out_ratio_to_best_fixed']:.3f} times the best fixed length"
        gains = f"On the held-out prompts of its training, by replay: {ratio}. "
    with staged_folder(folder) as stage:
        if learned is not None:
            save_policy(learned, stage / POLICY)
        if trained is not None:
            save_drafter(trained, stage / DRAFTER)
        write_atomic(stage / "custom_generate" / "generate.py", GENERATE)
        write_atomic(stage / "custom_generate" / "requirements.txt", f"specstop>={version('specstop')}\n")
        write_json(stage / FIGURES, contents)
        write_atomic(stage / "README.md", _card(chosen, spec, gains))
    return contents


CARD = """\
---
library_name: transformers
tags: [custom_generate, speculative-decoding, stop-policy, specstop]
---

# {name}: a stop policy for speculative decoding

Decodes with the drafter `{drafter}`{also} under the specstop policy `{name}`, as `specstop decode` does. {training}

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

`tokenizer=` enables `stop_strings=`, `streamer=` shows one text; `policy=`, `verification=`, `tree=`, `drafter=`, `seed=` and
`profile=` are passed to `specstop.decode.specstop_generate`.

`trust_remote_code=True` runs `custom_generate/generate.py`: ten lines that call the installed package. The policy and a
trained drafter are data: names, sizes, checksums and tensor headers are checked before use, and nothing is unpickled.

## Expected gain

{gains}It depends on pair, prompts and hardware: `specstop evaluate` measures it.

## What is lost

* Nothing of the policy.
* Rows of a batch are decoded side by side, but ended ones are not refilled: a serving engine is faster under load.

## Upload to the hub

```console
hf upload OWNER/NAME THIS_FOLDER
```
"""


def _card(policy: StopPolicy, drafter: str, gains: str) -> str:
    """Return the model card of the repository."""
    training = "It needed no training."
    if isinstance(policy, LearnedPolicy):
        metadata = policy.metadata
        training = (
            f"It was trained for {metadata.verification} verification at "
            f"{sampling_text(metadata.temperature, metadata.shaping)}; with other settings the text is as correct and the "
            "stops are less good."
        )
    models, draft, also = 'target = AutoModelForCausalLM.from_pretrained("TARGET")', "", ""
    if needs_draft(drafter):
        models = 'target, draft = (AutoModelForCausalLM.from_pretrained(name) for name in ("TARGET", "DRAFT"))'
        draft, also = "    draft_model=draft,  # or assistant_model=draft\n", " and a draft model"
    if plugins := [part.name for part in parse_spec(drafter) if part.name not in DRAFTERS]:
        also += f" (install the package of {', '.join(plugins)} as well)"
    return CARD.format(
        name=policy.name, drafter=drafter, also=also, training=training, models=models, draft=draft, gains=gains
    )
