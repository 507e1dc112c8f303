"""Which part of a run is this process's: read from the environment that torchrun or accelerate sets.

Processes never talk to each other. Shards are dealt by number, a shard lies whole in the folder or not at all, and a
shard's rows do not depend on who collects it: so nothing has to be agreed on, and a lost process is made good by
running the command again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..policies.errors import InputError


@dataclass(frozen=True)
class Place:
    """One process of several: `rank` of `world`, and `local`, its number on this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    def takes(self, index: int) -> bool:
        """Whether shard `index` is dealt to this process."""
        return index % self.world == self.rank

    def device(self, name: str) -> str:
        """Return the device this process uses: `cuda` becomes `cuda:<local>` where there are several processes."""
        return f"cuda:{self.local}" if name == "cuda" and self.world > 1 else name


ALONE = Place()
"""The only process."""


def read_place(environment: Mapping[str, str]) -> Place:
    """Read RANK, WORLD_SIZE and LOCAL_RANK; without the first two the process is the only one.

    Raises:
        InputError: only one of the two is set, or they are not numbers that fit together.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return ALONE
    values = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environment.get(name, "0" if name == "LOCAL_RANK" else "")
        if not text.isdecimal():
            raise InputError(
                f"{name}: expected a number, as torchrun sets it together with RANK and WORLD_SIZE, not {text!r}; "
                "unset all of them to run one process"
            )
        values.append(int(text))
    rank, world, local = values
    if rank >= world:
        raise InputError(f"RANK: expected less than WORLD_SIZE ({world}), not {rank}")
    return Place(rank, world, local)
