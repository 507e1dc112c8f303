"""Traces: prompts, schema, store, collectors.

Names are imported when they are first used: reading a trace must not cost the import of the decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import attach

if TYPE_CHECKING:
    from .estimates import Estimate as Estimate, estimate as estimate
    from .plan import plan_run as plan_run
    from .processes import Place as Place, read_place as read_place
    from .prompts.read import (
        Choice as Choice,
        Columns as Columns,
        Prompt as Prompt,
        apply_chat_template as apply_chat_template,
        read_prompts as read_prompts,
    )
    from .run import collect as collect
    from .schema import SCHEMA_VERSION as SCHEMA_VERSION, Header as Header
    from .shards import Plan as Plan, record as record
    from .store.folder import Trace as Trace, merge as merge, open_trace as open_trace

__getattr__, __all__ = attach(
    __name__,
    {
        "estimates": "Estimate estimate",
        "processes": "Place read_place",
        "prompts.read": "Choice Columns Prompt apply_chat_template read_prompts",
        "plan": "plan_run",
        "run": "collect",
        "schema": "Header SCHEMA_VERSION",
        "shards": "Plan record",
        "store.folder": "Trace merge open_trace",
    },
    is_callable=True,
)
