"""Texts unrolled side by side, one a thread: the rows of a single text are too few to keep several cores busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch

from .unroll import Unroller

Item = TypeVar("Item")
Made = TypeVar("Made")


def map_threads(unroller: Unroller, work: Callable[[Unroller, Item], Made], items: Sequence[Item]) -> list[Made]:
    """Return `work(unroller, item)` of every item, in order; as many at once as threads and memory budget allow.

    Args:
        unroller: shared by nothing else meanwhile; each further thread gets one of its kind.
        work: what is done with an item; it may change nothing but the unroller it is given.
        items: of any kind.
    """
    threads = torch.get_num_threads()
    copies = unroller.copies(threads)
    if len(copies) == 1:
        return [work(unroller, item) for item in items]
    # An unroller has one cache and so one text at a time; the next item takes whichever is free.
    idle: SimpleQueue[Unroller] = SimpleQueue()
    for one in copies:
        idle.put(one)

    def run(item: Item) -> Made:
        one = idle.get()
        try:
            return work(one, item)
        finally:
            idle.put(one)

    try:
        with ThreadPoolExecutor(len(copies), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(run, items))
    finally:
        torch.set_num_threads(threads)  # the number of some libraries is that of the last thread that set one
