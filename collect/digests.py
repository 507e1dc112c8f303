"""Digests of what a run is given beside its options and prompts, which may change while its name stays."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ..policies.contract import StopPolicy
from ..policies.learned import LearnedPolicy
from ..policies.profile import Profile
from ..policies.storage import content
from .completions import Completions, find_completion
from .prompts.read import Prompt


def short_hash(value: Any) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def digests(
    policy: StopPolicy, profile: Profile | None, prompts: Sequence[Prompt], completions: Completions | None
) -> dict[str, str]:
    """Return a digest of each; empty = there is none, which differs from any."""
    texts = (
        None if completions is None else [_completion(find_completion(completions, p.id, p.sample)) for p in prompts]
    )
    return {
        "policy": policy_digest(policy),
        "profile": "" if profile is None else short_hash(profile.to_dict()),
        "completions": "" if texts is None else short_hash(texts),
    }


def policy_digest(policy: StopPolicy) -> str:
    """Return what tells a policy from one of the same name."""
    return short_hash(_settings(policy))


def _completion(text: str | Sequence[int] | None) -> Any:
    return text if text is None or isinstance(text, str) else [int(token) for token in text]


def _settings(value: Any) -> Any:
    """Return what a policy is made of, as a JSON value that is the same in every process."""
    if isinstance(value, LearnedPolicy):
        return content(value)
    if isinstance(value, StopPolicy):
        # How it is called, and where it was read, says nothing of what it does; a `_dict` may hold what it has worked out.
        known = {name: of for name, of in vars(value).items() if name not in ("label", "source")}
        told = [name for name in sorted(known) if not (name.startswith("_") and isinstance(known[name], dict))]
        return [type(value).__qualname__, [[name, _settings(known[name])] for name in told]]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist() if value.dtype.kind in "biuf" else str(value.dtype)
    if isinstance(value, (tuple, list)):
        return [_settings(one) for one in value]
    if isinstance(value, Mapping):
        return sorted(([str(name), _settings(of)] for name, of in value.items()), key=itemgetter(0))
    if isinstance(value, Profile):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Fields that begin with _ hold what was worked out from the others.
        told = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        return [type(value).__qualname__, [[name, _settings(getattr(value, name))] for name in told]]
    # Whatever else there is may print as an address.
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__
