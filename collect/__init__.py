"""Traces: prompts, schema, store, collectors."""

from .prompts import Prompt, read_prompts
from .run import collect
from .schema import SCHEMA_VERSION, Header
from .store import Trace, open_trace

__all__ = ["SCHEMA_VERSION", "Header", "Prompt", "Trace", "collect", "open_trace", "read_prompts"]
