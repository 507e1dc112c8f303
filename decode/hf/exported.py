"""Runs an exported policy in `generate(custom_generate=...)`: the code of the repository calls this module.

transformers 5.23 copies `custom_generate/generate.py` into a cache and calls its function with all arguments of `generate`,
`assistant_model` and `tokenizer` included. Code is run only with `trust_remote_code=True`, also from a local folder. The
function does not receive the repository, so `generate_exported` reads it from the frame of the calling `generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from ...policies.errors import InputError
from ...policies.files import read_json
from ..drafters.spec import change_paths
from .arguments import generate_arguments, refuse
from .generate import check_draft_model, specstop_generate

POLICY, DRAFTER, FIGURES = "policy", "drafter", "figures.json"
"""Folders and file of an export (`train.export.hf`)."""

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only")
"""Arguments of `generate` for the download of a repository."""


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
    folder = _local_folder(str(repository), {name: options.pop(name) for name in HUB_ARGUMENTS if name in options})
    figures = read_json(folder / FIGURES, "custom_generate")
    if not isinstance(figures, dict) or figures.get("kind") != "export":
        raise InputError(
            f"custom_generate: expected an export in {folder / FIGURES}; write it again with specstop deploy --to hf"
        )
    # `generate` does not pass `assistant_model` and `streamer` to a callable.
    draft = options.pop("assistant_model", None)
    if draft is not None and options.setdefault("draft_model", draft) is not draft:
        raise refuse("draft_model", "got both draft_model= and assistant_model=; pass one of them")
    exported = str(figures.get("drafter", "model"))
    check_draft_model(options.get("draft_model"), options.get("drafter", exported), "draft_model= or assistant_model=")
    options.setdefault("drafter", change_paths(exported, lambda path: str(folder / path)))
    options.setdefault("policy", figures.get("spec") or folder / POLICY)
    if (streamer := options.pop("streamer", None)) is not None:
        options.setdefault("text_streamer", streamer)
    _replace_stop_strings(options)
    # The method of the class: a model loaded from the same repository has an attribute `generate` that leads here.
    cls: Any = type(model)
    return cls.generate(model, **options, custom_generate=specstop_generate)


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


def _replace_stop_strings(options: dict[str, Any]) -> None:
    """Replace stop strings by a stopping criterion, because `generate` does not pass the tokenizer to a callable."""
    tokenizer, config = options.pop("tokenizer", None), options.get("generation_config")
    strings = options.get("stop_strings") or getattr(config, "stop_strings", None)
    if tokenizer is None or not strings:
        return
    options.pop("stop_strings", None)
    if config is not None:
        options["generation_config"] = config = copy.deepcopy(config)  # the caller's config is not modified
        config.stop_strings = None
    criteria = [*options.get("stopping_criteria", ()), StopStringCriteria(tokenizer, strings)]
    options["stopping_criteria"] = StoppingCriteriaList(criteria)
