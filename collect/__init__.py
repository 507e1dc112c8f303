"""Traces: prompts, schema, store, collectors.

Names are imported when they are first used: reading a trace must not import the decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import attach

if TYPE_CHECKING:
    from .prompts import Prompt as Prompt, apply_chat_template as apply_chat_template, read_prompts as read_prompts
    from .run import collect as collect
    from .schema import Header as Header
    from .shards import DistributedRank as DistributedRank
    from .store import Trace as Trace, check_trace as check_trace, load_trace as load_trace

__getattr__, __all__ = attach(
    __name__,
    {
        "prompts": "Prompt apply_chat_template read_prompts",
        "run": "collect",
        "schema": "Header",
        "shards": "DistributedRank",
        "store": "Trace check_trace load_trace",
    },
    is_callable=True,
)
