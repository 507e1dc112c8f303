"""What an exported folder carries as text: the policy, and the drafter that it was trained with.

Both are data. A policy is the files of its folder or a built-in's name; a drafter is its spec and, where it is a trained one,
the files of its folder. All of it is checked on loading as any policy's or drafter's folder.
"""

from __future__ import annotations

import base64
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, SpecstopWarning
from ...policies.learned.policy import LearnedPolicy
from ...policies.registry import load_policy
from ...policies.storage.folder import load_policy_folder
from ...policies.storage.safe_loading import MOST_DATA
from ..drafters.folder import TrainedDrafter
from ..drafters.known import TRAINED, check_drafter, paths_of, read_known
from ..drafters.shared import load_named

DRAFTER = "drafter"
"""The folder of a trained drafter in the export, and what stands for it in the spec that is carried."""


@dataclass(frozen=True)
class CarriedDrafter:
    """A drafter as an export names it.

    Attributes:
        spec: as of `find_drafter`, a trained drafter's folder called `DRAFTER`.
        source: that folder here; "" where there is none.
        trained: what it holds.
    """

    spec: str = "model"
    source: str = ""
    trained: TrainedDrafter | None = None


def drafter_for(policy: StopPolicy, spec: str | None) -> CarriedDrafter:
    """Return the drafter that a policy is exported with.

    Args:
        policy: whose training remembers a drafter, if it is a learned one.
        spec: as of `find_drafter`; None = what the policy was trained with, else the draft model.

    Raises:
        InputError: there is no such drafter, or it reads a text file, which is not carried.
    """
    facts = policy.facts if isinstance(policy, LearnedPolicy) else None
    spec = spec or (str(facts.provenance.get("drafter", "model")) if facts else "model")
    check_drafter(spec)
    parts = [*read_known(spec).parts()]
    last, given = parts[-1], str(parts[-1].value)
    files = [path for path in paths_of(spec) if last.kind not in TRAINED or path != given]
    if files:
        raise InputError(
            f"--drafter: {spec} reads the file {files[0]}, which an exported folder does not carry; --drafter suffix does "
            "without it"
        )
    if last.kind not in TRAINED:
        return CarriedDrafter(spec)
    return CarriedDrafter(spec.removesuffix(given) + DRAFTER, given, load_named(last.kind, given))


def tell_untrained_on(policy: StopPolicy, drafts: CarriedDrafter) -> None:
    """Warn where a learned policy was trained on the drafts of another trained drafter than it is exported with."""
    if not isinstance(policy, LearnedPolicy) or drafts.trained is None:
        return
    known = policy.facts.pair.get("draft", "")
    # Of two drafters the identity of the second one comes last.
    if known and not known.endswith(drafts.trained.identity):
        warnings.warn(
            f"{policy.name} was trained with another drafter ({known}) than {drafts.source} holds "
            f"({drafts.trained.identity})",
            SpecstopWarning,
            stacklevel=3,
        )


def carried_module(
    files: Mapping[str, bytes],
    spec: str | None,
    drafter: str = "model",
    drafter_files: Mapping[str, bytes] | None = None,
) -> str:
    """Return the source of the module that holds a policy folder's files in base64, or a policy's name, and the drafter's.

    Raises:
        InputError: a file is larger than what is read of one.
    """
    lines = ['"""The policy and its drafter: the files of a folder in base64, or a name."""', "", f"SPEC = {spec!r}"]
    lines += [f"DRAFTER = {drafter!r}", "", *_table("FILES", files), "", *_table("DRAFTER_FILES", drafter_files or {})]
    return "\n".join([*lines, ""])


def _table(called: str, files: Mapping[str, bytes]) -> list[str]:
    """Return the lines of an assignment."""
    lines = [f"{called} = {{"]
    for name, data in files.items():
        if len(data) > MOST_DATA:
            raise InputError(
                f"{name} has {len(data) >> 20} MiB, but a folder for generate carries {MOST_DATA >> 20} MiB a file; train "
                "a smaller drafter"
            )
        text = base64.b64encode(data).decode()
        parts = [text[at : at + 100] for at in range(0, len(text), 100)] or [""]
        lines += [f"    {name!r}: (", *(f"        {part!r}" for part in parts), "    ),"]
    return [*lines, "}"]


# `generate` comes here each time.
@lru_cache(maxsize=8)
def carried_policy(files: tuple[tuple[str, str], ...], spec: str | None) -> StopPolicy:
    """Return the policy that is carried; its files are checked and loaded as a policy folder, which runs no code."""
    if spec is not None:
        return load_policy(spec)
    with _unpacked(dict(files), "policy") as folder:
        return load_policy_folder(folder)


@contextmanager
def carried_drafter(spec: str, files: Mapping[str, str]) -> Iterator[str]:
    """Name the drafter that is carried as `find_drafter` takes it, its folder there as long as the context lasts."""
    if not files:
        yield spec
        return
    with _unpacked(files, "drafter") as folder:
        yield spec.removesuffix(DRAFTER) + folder


@contextmanager
def _unpacked(files: Mapping[str, str], what: str) -> Iterator[str]:
    """Write files of base64 into a folder and remove it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            data = base64.b64decode(text, validate=True)
            # A name with folders in it could lead out of this one.
            if Path(name).name != name or len(data) > MOST_DATA:
                raise PolicyError(f"the carried file {name!r} is no file of a {what} folder; export it again")
            (Path(folder) / name).write_bytes(data)
        yield folder
