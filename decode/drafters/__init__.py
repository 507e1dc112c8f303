"""Drafters: a draft model, search in the text itself, heads on the target's hidden states, or a plugin."""

from ..round_state import RoundState as RoundState, Rows as Rows
from .base import Drafter as Drafter, Proposal as Proposal
from .ctc import CTCDrafter as CTCDrafter
from .folder import TrainedDrafter as TrainedDrafter, load_drafter as load_drafter, save_drafter as save_drafter
from .heads import HeadsDrafter as HeadsDrafter
from .layer import LayerDrafter as LayerDrafter
from .lookup import LookupDrafter as LookupDrafter
from .model import ModelDrafter as ModelDrafter
from .spec import (
    find_drafters as find_drafters,
    with_drafter as with_drafter,
)
from .suffix import SuffixDrafter as SuffixDrafter
