"""Features: their definitions, the summary of a row that they are made of, and the columns that a policy reads."""

from .columns import Columns, Layout
from .definitions import (
    ANCHOR_FEATURES,
    CHAIN_FEATURES,
    FEATURES,
    LEVEL_FEATURES,
    RUN_FEATURES,
    SIBLING_FEATURES,
    TOKEN_FEATURES,
    TREE_FEATURES,
    Feature,
    Kind,
    feature,
)
from .summary import TOP, Drawn, Need, Plan, Summary, summarise

__all__ = [
    "ANCHOR_FEATURES",
    "CHAIN_FEATURES",
    "FEATURES",
    "LEVEL_FEATURES",
    "RUN_FEATURES",
    "SIBLING_FEATURES",
    "TOKEN_FEATURES",
    "TOP",
    "TREE_FEATURES",
    "Columns",
    "Drawn",
    "Feature",
    "Kind",
    "Layout",
    "Need",
    "Plan",
    "Summary",
    "feature",
    "summarise",
]
