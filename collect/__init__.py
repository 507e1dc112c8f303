"""Traces: prompts, schema, store, collectors.

Names are imported when they are first used: reading a trace must not cost the import of the decoder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimates import Estimate, estimate
    from .processes import Place, read_place
    from .prompts import Choice, Columns, Prompt, apply_chat_template, read_prompts
    from .run import collect, plan_run
    from .schema import SCHEMA_VERSION, Header
    from .shards import Plan, record
    from .store import Trace, merge, open_trace

__all__ = [
    "SCHEMA_VERSION",
    "Choice",
    "Columns",
    "Estimate",
    "Header",
    "Place",
    "Plan",
    "Prompt",
    "Trace",
    "apply_chat_template",
    "collect",
    "estimate",
    "merge",
    "open_trace",
    "plan_run",
    "read_place",
    "read_prompts",
    "record",
]

_HOME = {
    "Choice": "prompts",
    "Columns": "prompts",
    "Estimate": "estimates",
    "Header": "schema",
    "Place": "processes",
    "Plan": "shards",
    "Prompt": "prompts",
    "SCHEMA_VERSION": "schema",
    "Trace": "store",
    "apply_chat_template": "prompts",
    "collect": "run",
    "estimate": "estimates",
    "merge": "store",
    "open_trace": "store",
    "plan_run": "run",
    "read_place": "processes",
    "read_prompts": "prompts",
    "record": "shards",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
