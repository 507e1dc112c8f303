"""Traces: prompts, schema, store, collectors."""

from .estimate import Estimate, estimate
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
