"""Where candidates come from: a draft model, the text itself, heads on the target's states, or what a plugin brings."""

from .base import Drafter, Proposal
from .either import EitherDrafter
from .find import find_drafter, with_drafter
from .folder import TrainedDrafter, load_drafter, save_drafter
from .heads.ctc import CTCDrafter
from .heads.drafter import HeadsDrafter
from .heads.layer import LayerDrafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .suffix import SuffixDrafter

__all__ = [
    "CTCDrafter",
    "Drafter",
    "EitherDrafter",
    "HeadsDrafter",
    "LayerDrafter",
    "LookupDrafter",
    "ModelDrafter",
    "Proposal",
    "SuffixDrafter",
    "TrainedDrafter",
    "find_drafter",
    "load_drafter",
    "save_drafter",
    "with_drafter",
]
