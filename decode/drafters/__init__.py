"""Drafters: a draft model, search in the text itself, heads on the target's hidden states, or a plugin."""

from ..round_state import RoundState, Rows
from .base import Drafter, Proposal
from .ctc import CTCDrafter
from .fallback import FallbackDrafter
from .folder import TrainedDrafter, load_drafter, save_drafter
from .heads import HeadsDrafter
from .layer import LayerDrafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .spec import find_drafter, with_drafter
from .suffix import SuffixDrafter

__all__ = [
    "CTCDrafter",
    "Drafter",
    "FallbackDrafter",
    "HeadsDrafter",
    "LayerDrafter",
    "LookupDrafter",
    "ModelDrafter",
    "Proposal",
    "RoundState",
    "Rows",
    "SuffixDrafter",
    "TrainedDrafter",
    "find_drafter",
    "load_drafter",
    "save_drafter",
    "with_drafter",
]
