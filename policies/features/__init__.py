"""Features: their definitions, the summary of a row that they are made of, and the columns that a policy reads."""

from .columns import Columns as Columns, Layout as Layout
from .definitions import (
    ANCHOR_FEATURES as ANCHOR_FEATURES,
    CHAIN_FEATURES as CHAIN_FEATURES,
    FEATURES as FEATURES,
    LEVEL_FEATURES as LEVEL_FEATURES,
    RUN_FEATURES as RUN_FEATURES,
    SIBLING_FEATURES as SIBLING_FEATURES,
    TOKEN_FEATURES as TOKEN_FEATURES,
    TREE_FEATURES as TREE_FEATURES,
    Feature as Feature,
    Kind as Kind,
    feature as feature,
)
from .summary import (
    TOP as TOP,
    Drawn as Drawn,
    Need as Need,
    Plan as Plan,
    Summary as Summary,
    summarise as summarise,
)
