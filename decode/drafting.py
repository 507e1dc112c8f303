"""The draft phase of a round: candidates depth by depth, as far as the policy keeps their branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .candidates import Candidates
from .charge import Guard
from .decide import Base, Level, Logits
from .drafters import Drafter
from .hidden import KeepsStates
from .modes import is_trimming
from .noise import Choices
from .settings import Stopwatch, Text
from .topology import Topology
from .verify import Verification


class DraftPhase:
    """Drafts one round after the other.

    Args:
        drafter: scores the candidates.
        mode: draws them.
        guard: the policy, asked after each depth which branches to extend.
        topology: the tree of a round, no deeper than settings and policy allow.
        eos: ids that end a text; a branch that draws one is not extended.
        temperature: of the sampling.
        on_level: told of the tokens drawn at each depth and the logits they are from.
        states: the drafter, where its hidden states are wanted.
    """

    def __init__(
        self,
        drafter: Drafter,
        mode: Verification,
        guard: Guard,
        topology: Topology,
        eos: Sequence[int],
        temperature: float,
        on_level: Callable[[Candidates, Sequence[int], Logits], None] | None = None,
        states: KeepsStates | None = None,
    ) -> None:
        self._on_level, self._states = on_level, states
        self._drafter, self._mode, self._guard = drafter, mode, guard
        self._topology, self._eos, self._temperature = topology, frozenset(eos), temperature
        # What rejection sends to the target must not depend on tokens drawn later, so it selects level by level.
        self._select_each = mode.hides and is_trimming(guard.policy)
        # For the same reason it drops a token that ends its branch as readily as any other: trimming is asked about it.
        self._asks_ended = mode.hides and guard.policy.trims

    def run(self, text: Text, base: int, choices: Choices, allowed: int, watch: Stopwatch) -> Candidates:
        """Return the candidates of a round.

        Args:
            text: to continue.
            base: position of its roots.
            choices: of the round.
            allowed: depth at which the length limit ends drafting.
            watch: gets the laps `first`, `draft` and `policy`.
        """
        found = Candidates.at(text.roots, self._topology)
        known: Base | None = None
        level: Level | None = None
        alive = [place for place, token in enumerate(text.roots) if token not in self._eos]
        found.capped = not alive  # alternatives that all end the text
        deepest = self._topology.deepest
        for depth in range(deepest + 1):
            if depth == min(allowed, deepest):
                found.capped = depth < deepest or not self._going(found, alive)
                break
            if depth >= self._guard.policy.first:
                watch.start()
                known = known or self._guard.decider.base(
                    text.anchor_row, text.roots[0], text.tokens[base - 1], text.history, self._temperature, text.hidden
                )
                kept = self._guard.keep(text, depth, known, level, found, alive)
                if depth and self._guard.policy.trims:
                    for place in set(alive).difference(kept):
                        found.dropped[place] = True
                alive = kept
                found.decisions += 1
                watch.lap("policy")
            going = self._going(found, alive)
            feeding = [place for place in going if self._topology.children[found.rows[place]]]
            if not feeding:
                found.capped = found.capped or (bool(alive) and not going)
                break
            places, level = self._grow(text, base, found, feeding, choices, level, watch)
            alive = places if self._asks_ended else self._going(found, places)
            if self._select_each:
                alive = self._selected(text, found, places, alive)
            if not alive:
                found.capped = bool(places)
                break
        if not self._select_each and self._guard.selects:
            watch.start()
            self._selected(text, found, range(found.roots, len(found.tokens)), [])
            watch.lap("policy")  # else it would count as the loop's own
        return found

    def _going(self, found: Candidates, places: list[int]) -> list[int]:
        """Return the places whose branch has not drawn an end of text."""
        return [place for place in places if not found.depth[place] or found.tokens[place] not in self._eos]

    def _grow(
        self,
        text: Text,
        base: int,
        found: Candidates,
        feeding: list[int],
        choices: Choices,
        above: Level | None,
        watch: Stopwatch,
    ) -> tuple[list[int], Level | None]:
        """Feed the places, draw below them, and return the new places with what their features are computed from."""
        watch.start()
        raw = self._drafter.feed(text.tokens, base, found, feeding, text.hidden)
        watch.lap("draft" if found.depth[feeding[0]] else "first")
        states = self._states.states if self._states is not None else None
        sampled = text.sampler(raw, lambda: [[*text.tokens[:base], *found.tokens_to(place)] for place in feeding])
        if self._drafter.partial:
            known = torch.isfinite(sampled).any(-1).tolist()
            feeding = [place for place, any_ in zip(feeding, known, strict=True) if any_]
            raw, sampled = raw[known], sampled[known]
            if text.sampler.untruncated is not None:
                text.sampler.untruncated = text.sampler.untruncated[known]
            states = None if states is None else states[known]
            if not feeding:
                return [], None
        below = [self._topology.children[found.rows[place]] for place in feeding]
        drawn = self._mode.draw(sampled, [len(rows) for rows in below], found, feeding, choices)
        places, owner = [], []
        for at, place in enumerate(feeding):
            if drawn.source is not None:
                found.drawn_from[place] = drawn.source[at]
            for row, token in zip(below[at], drawn.tokens[at], strict=False):  # fewer where the draft knows no more
                places.append(found.add(place, row, token))
                owner.append(at)
        if not places:  # rows that no token can be drawn from
            return [], None
        shaped = sampled if text.sampler.reads_prefix and self._temperature > 0 else None
        untruncated = text.sampler.untruncated if shaped is not None else None
        logits = Logits(raw, shaped, drawn.scores, owner, states, drawn.best, untruncated)
        if self._on_level is not None:
            self._on_level(found, places, logits)
        decider = self._guard.decider
        if not decider.wants(found.depth[places[0]], self._topology.deepest):
            return places, None
        watch.start()
        level = decider.level(found, places, logits, self._temperature, above)
        watch.lap("policy")  # it is what the decision is made of
        return places, level

    def _selected(self, text: Text, found: Candidates, places: Sequence[int], alive: list[int]) -> list[int]:
        """Drop those of `places` that the policy does not select, and return what is left of `alive`."""
        mask = self._guard.select(text, found, self._mode.hides)
        if mask is None:
            return alive
        for place in places:
            found.dropped[place] = found.dropped[place] or not mask[found.rows[place]]
        return [place for place in alive if not found.dropped[place]]
