"""Traces: prompts, schema, store, collectors.

Names are imported when they are first used: reading a trace must not import the decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import attach

if TYPE_CHECKING:
    from .prompts import Prompt as Prompt, apply_chat_template as apply_chat_template, read_prompts as read_prompts
    from .run import CollectOptions as CollectOptions, collect as collect, plan_run as plan_run
    from .schema import SCHEMA_VERSION as SCHEMA_VERSION, Header as Header
    from .shards import DistributedRank as DistributedRank, Plan as Plan, record as record
    from .store import Trace as Trace, check_trace as check_trace, load_trace as load_trace

__getattr__, __all__ = attach(
    __name__,
    {
        "prompts": "Prompt apply_chat_template read_prompts",
        "run": "CollectOptions collect plan_run",
        "schema": "Header SCHEMA_VERSION",
        "shards": "DistributedRank Plan record",
        "store": "Trace check_trace load_trace",
    },
    is_callable=True,
)
