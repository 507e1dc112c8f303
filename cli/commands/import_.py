"""`specstop import`."""

from __future__ import annotations

from pathlib import Path

from ...policies.errors import InputError
from .. import options
from ..output import next_step
from .info import show_artefact

_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


def import_(
    source: Path,
    out: Path,
    target: str | None = None,
    draft: str | None = None,
    dtype: str = "float32",
    threshold: float | None = None,
    depth: int | None = None,
    rejection_weight: float = 1.0,
    lengths: list[str] | None = None,
    column: list[str] | None = None,
    free: list[str] | None = None,
    bonus: bool = False,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Import released weights (a stop head of DynaSD or SpecDec++, or Medusa's heads) or records of acceptance.

    Records are those of vLLM, SGLang, llama.cpp or inference-lab, or with --lengths a table of the accepted length at every
    position. No code of the file is run. Example: specstop import vllm.jsonl --out traces
    """
    if lengths:
        of_others = {"draft": draft, "threshold": threshold, "dtype": dtype != "float32" or None}
        if name := next((name for name, value in of_others.items() if value is not None), None):
            raise InputError(f"--{name}: a table of accepted lengths has none; leave it out")
        from ...collect.table import import_table

        import_table(
            source, out, options.key_texts("--lengths", lengths), columns=options.key_texts("--column", column),
            bonus=bonus, free=free or (), depth=depth, target=target or "", overwrite=overwrite,
        )  # fmt: skip
        show_artefact(out, json=json)
        return
    if column or free or bonus:
        raise InputError("--column, --free, --bonus: describe a table; give --lengths NAME=COLUMN for each drafter")
    if not _has_weights(source):
        from ...collect.engines.records import import_records

        import_records(source, out, target=target or "", draft=draft or "", overwrite=overwrite)
    elif draft is not None:
        raise InputError("--draft: expected it with records only; weights have no draft model")
    elif target is not None:
        of_policy = {
            "threshold": threshold is not None, "depth": depth is not None,
            "rejection-weight": rejection_weight != 1.0,
        }  # fmt: skip
        if name := next((name for name, is_set in of_policy.items() if is_set), None):
            raise InputError(f"--{name}: a drafter has none; leave it out, or --target to import a policy")
        from ...train.released import import_medusa

        models = options.Models(target, drafter=["lookup"], dtype=dtype)  # without a draft model
        import_medusa(source, models.open(engine="plain"), out, overwrite=overwrite)
    elif dtype != "float32":
        raise InputError("--dtype: is that of the target of Medusa's heads; give --target with it, or leave it out")
    else:
        from ...train.released import import_weights

        import_weights(
            source, out, threshold=threshold, depth=depth, rejection_weight=rejection_weight, overwrite=overwrite
        )
    values = show_artefact(out, json=json)
    if values["kind"] == "drafter" and not json:
        spec = ("--drafter", f"medusa:{out}", "--depth", values["depth"])
        next_step("collect", *options.repeated("target", "dtype"), *spec)


def _has_weights(source: Path) -> bool:
    """Return whether a file has the suffix of weights, or a folder has such a file."""
    if source.is_dir():
        return any(path.suffix in _SUFFIXES for path in source.iterdir())
    return source.suffix in _SUFFIXES
