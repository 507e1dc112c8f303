"""Inside transformers: `generate`, stopping criteria, and folders for the Hub, which import from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...policies.lazy import attach

if TYPE_CHECKING:
    from .export import deploy_hf as deploy_hf, generate_carried as generate_carried
    from .generate import PolicyStoppingCriteria as PolicyStoppingCriteria, specstop_generate as specstop_generate

__getattr__, __all__ = attach(
    __name__, {"export": "deploy_hf generate_carried", "generate": "PolicyStoppingCriteria specstop_generate"}
)
