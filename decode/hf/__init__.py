"""Inside transformers: `generate`, stopping criteria, and folders for the Hub, which import from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...policies import attach

if TYPE_CHECKING:
    from .export import deploy_hf as deploy_hf, generate_exported as generate_exported
    from .generate import SpeculativeOutput as SpeculativeOutput, specstop_generate as specstop_generate
    from .stopping import PolicyStoppingCriteria as PolicyStoppingCriteria

__getattr__, __all__ = attach(
    __name__,
    {
        "export": "deploy_hf generate_exported",
        "generate": "SpeculativeOutput specstop_generate",
        "stopping": "PolicyStoppingCriteria",
    },
)
