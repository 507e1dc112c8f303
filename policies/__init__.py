"""What a stop policy is: features, rules, heads, baselines, the folder on disk, plugins.

Names are imported when they are first used: errors and file helpers must not cost the import of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import attach

if TYPE_CHECKING:
    from .baselines.fixed import Confidence as Confidence, FixedLength as FixedLength
    from .contract import (
        DraftStep as DraftStep,
        DraftTree as DraftTree,
        RoundOutcome as RoundOutcome,
        StopPolicy as StopPolicy,
    )
    from .costs import CostTable as CostTable
    from .errors import (
        InputError as InputError,
        PairError as PairError,
        PolicyError as PolicyError,
        SpecstopError as SpecstopError,
        SpecstopWarning as SpecstopWarning,
        TraceError as TraceError,
    )
    from .learned.policy import LearnedPolicy as LearnedPolicy
    from .profile import Profile as Profile
    from .storage.folder import (
        from_pretrained as from_pretrained,
        load_policy_folder as load_policy_folder,
        save_policy as save_policy,
        save_pretrained as save_pretrained,
    )
    from .storage.registry import load_policy as load_policy

__getattr__, __all__ = attach(
    __name__,
    {
        "baselines.fixed": "Confidence FixedLength",
        "contract": "DraftStep DraftTree RoundOutcome StopPolicy",
        "errors": "InputError PairError PolicyError SpecstopError SpecstopWarning TraceError",
        "costs": "CostTable",
        "learned.policy": "LearnedPolicy",
        "profile": "Profile",
        "storage.folder": "from_pretrained load_policy_folder save_policy save_pretrained",
        "storage.registry": "load_policy",
    },
)
