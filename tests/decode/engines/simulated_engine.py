"""A serving engine without a model: the target's texts are fixed in advance, and the batch changes as in real engines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Propose = Callable[[list[list[int]], np.ndarray, np.ndarray], list[list[int]]]


@dataclass
class Request:
    """A prompt, the text that the target will write, and the number of its tokens that are committed."""

    name: str
    prompt: list[int]
    answer: list[int]
    done: int = 0
    draft: list[int] = field(default_factory=list)
    unread: int = 0  # prompt tokens that a chunked prefill has not read
    rounds: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # (context, draft, tokens that follow)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer[: self.done]


class Engine:
    """Places requests in a batch, commits accepted tokens, and calls the drafter after each step.

    Args:
        requests: in the order of their arrival.
        places: size of the batch.
        seed: of arrivals, preemptions, moves, trimmed drafts and aborted requests.
        gentle: without these events.
    """

    def __init__(self, requests: Sequence[Request], places: int, seed: int, *, gentle: bool = False) -> None:
        self.waiting, self.running, self.finished = list(requests), list[Request](), list[Request]()
        self.places, self.chance, self.gentle = places, random.Random(seed), gentle
        self.tokens = np.zeros((places, 4096), dtype=np.int32)
        self.counts = Counter[str]()

    @property
    def names(self) -> list[str]:
        return [request.name for request in self.running]

    def run(self, propose: Propose) -> None:
        while self.waiting or self.running:
            self._schedule()
            sampled = [self._advance(request) for request in self.running]
            for place, request in enumerate(self.running):
                self.tokens[place, : len(request.text)] = request.text
            lengths = np.array([len(request.text) for request in self.running])
            for request, draft in zip(self.running, propose(sampled, lengths, self.tokens), strict=True):
                request.draft = draft
                self.counts["rounds"] += bool(draft)
            self.finished += [request for request in self.running if request.done >= len(request.answer)]
            self.running = [request for request in self.running if request.done < len(request.answer)]

    def _event(self, name: str, chance: float) -> bool:
        occurs = not self.gentle and self.chance.random() < chance
        self.counts[name] += occurs
        return occurs

    def _schedule(self) -> None:
        if len(self.running) > 1 and self._event("preempted", 0.1):
            request = self.running.pop(self.chance.randrange(len(self.running)))
            request.draft, request.unread = [], len(request.text)
            self.waiting.insert(0, request)
        if len(self.running) > 1 and self._event("aborted", 0.05):
            self.running.pop(self.chance.randrange(len(self.running)))
        if len(self.running) > 1 and self._event("moved", 0.2):
            self.chance.shuffle(self.running)
        while self.waiting and len(self.running) < self.places and (self.gentle or self.chance.random() < 0.5):
            request = self.waiting.pop(0)
            request.unread = request.unread or len(request.prompt)
            self.running.append(request)

    def _advance(self, request: Request) -> list[int]:
        """Read a part of the prompt, or verify the draft and commit the accepted tokens and one more."""
        if request.unread > 4 and not self.gentle:
            request.unread -= 4
            return []
        request.unread, draft = 0, request.draft
        if draft and self._event("trimmed", 0.1):
            draft = draft[: self.chance.randrange(len(draft))]
        left, agreed = request.answer[request.done :], 0
        while agreed < min(len(draft), len(left) - 1) and draft[agreed] == left[agreed]:
            agreed += 1
        request.rounds.append((len(request.text), list(request.draft), left[: agreed + 1]))
        request.done += agreed + 1
        return left[: agreed + 1]
