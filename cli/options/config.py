"""`--config run.yaml` and `--set key=value` for every option, and the resolved configuration beside every result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import typer
import yaml

from ...policies.errors import InputError, close_match
from ...policies.files import RUN_FILE, write_atomic

_OWN = ("config", "set", "help")
_RENAMED = {"vector": "hidden", "guard": "drift"}  # options as files of earlier versions name them


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


_running: ContextVar[typer.Context | None] = ContextVar("running", default=None)


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take option values from a YAML file; values given on the command line win. Runs for every command."""
    _running.set(context)
    if path is None:
        return None
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError:
        raise InputError(f"--config: the file {path} does not exist") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config: {path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(raw, dict):
        raise InputError(f"--config: expected a mapping of options in {path}, not {type(raw).__name__}")
    command = raw.pop("command", context.command.name)
    if command != context.command.name:
        raise InputError(f"--config: {path} is of `specstop {command}`, not of `specstop {context.command.name}`")
    context.default_map = {**_checked(context, raw, str(path)), **(context.default_map or {})}
    return path


def apply_settings(context: typer.Context, settings: list[str]) -> list[str]:
    """Take option values written as key=value."""
    values = {}
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set: expected key=value, not {text!r}")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InputError(f"--set: {value!r} is not YAML; quote it, or write a plain value") from None
    # Over those of --config, whichever of the two stands first. Click asks the command line before it asks these.
    context.default_map = {**(context.default_map or {}), **_checked(context, values, "--set")}
    return settings


def _checked(context: typer.Context, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return values by the names of the command's options; unknown ones are refused."""
    known = {p.name for p in context.command.params if p.name and p.name not in _OWN}
    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    resolved = {_RENAMED.get(key, key): value for key, value in named.items()}
    if len(resolved) < len(values):
        raise InputError(f"{where}: an option is given twice, with - and with _; keep one of them")
    for key in resolved:
        if key not in known:
            raise InputError(
                f"{where}: unknown option {key!r}{close_match(key, known)}; known: {', '.join(sorted(known))}"
            )
    return resolved


@contextlib.contextmanager
def config_saved(out: Path) -> Iterator[None]:
    """Write the resolved options of the running command to the result `out` of the block, unless they are there."""
    yield
    if out.is_dir() and not (out / RUN_FILE).exists():
        save_config(out)


def save_config(folder: Path, name: str = RUN_FILE) -> None:
    """Write the resolved options of the running command to a file of a folder."""
    context = _running.get()
    if context is not None:
        write_atomic(folder / name, _resolved(context))


def given_config(saved: Path) -> Path | None:
    """Return the file of `--config`; None where `saved`, which this run writes again, is that file and stays as it is."""
    context = _running.get()
    given: Path | None = context.params.get("config") if context is not None else None
    if context is None or given is None or not saved.exists() or not saved.samefile(given):
        return given
    return None if saved.read_bytes() == _resolved(context).encode() else given


def running_options() -> dict[str, Any]:
    """Return the resolved options of the running command, as plain values."""
    context = _running.get()
    return {} if context is None else _values(context)


def _resolved(context: typer.Context) -> str:
    return str(yaml.safe_dump(_values(context), sort_keys=False))


def _values(context: typer.Context) -> dict[str, Any]:
    values = {key: _plain(value) for key, value in context.params.items() if key not in _OWN and value is not None}
    return {"command": context.command.name, **values}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float)) else str(value)
