"""A profile of no machine that has batches: costs that rise evenly, in a step, and not at all."""

from __future__ import annotations

import dataclasses

from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.profile import Profile


def table(context: float) -> BatchTable:
    verify = {2: ((2, 4e-3), (12, 6e-3)), 4: ((4, 5e-3), (16, 5e-3), (17, 8e-3), (24, 8e-3))}
    return BatchTable(context, ((1, 8e-4), (4, 1.5e-3)), verify)


def with_batches(profile: Profile) -> Profile:
    """Return a profile with batches of 2 and 4 texts."""
    return dataclasses.replace(profile, batch=BatchCosts(table(8.0), table(40.0)))
