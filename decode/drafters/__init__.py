"""Where candidates come from: a draft model, the text itself (prompt lookup), or what a plugin brings."""

from .base import Drafter, Proposal
from .find import find_drafter
from .lookup import LookupDrafter
from .model import ModelDrafter

__all__ = ["Drafter", "LookupDrafter", "ModelDrafter", "Proposal", "find_drafter"]
