"""What a loop holds is freed with it, at once: its caches do not wait for Python to look for cycles."""

from __future__ import annotations

import gc
import weakref

import pytest
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.weak import weak_method
from specstop.policies.contract import StopPolicy
from specstop.policies.fixed import Confidence, FixedLength


class Looks:
    """An observer that takes no note."""

    def level(self, *seen: object) -> None:
        """See `Observer`."""

    round = level


@pytest.mark.parametrize("observer", [None, Looks()])
@pytest.mark.parametrize(
    ("policy", "tree"), [(FixedLength(3), None), (Confidence(0.4, 4), None), (FixedLength(2), "2,1")]
)
def test_a_loop_frees_its_caches(
    pair: Pair, prompt_ids: list[list[int]], policy: StopPolicy, tree: str | None, observer: Looks | None
) -> None:
    loop = Speculator(pair, policy, Settings(0.7, 12, tree=tree, verification="match"), observer=observer)
    loop.generate(prompt_ids[0], 1)
    held = [weakref.ref(part) for part in (loop, loop._source, loop._source.target, loop._drafter)]
    gc.disable()
    try:
        del loop
        assert [part() for part in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_weak_method_does_what_the_method_does() -> None:
    class Own:
        def add(self, one: int, other: int) -> int:
            return one + other

    own = Own()
    add = weak_method(own.add)
    assert add(2, 3) == own.add(2, 3) == 5
    assert weak_method(add) is add
    alive = weakref.ref(own)
    del own
    assert alive() is None
