"""A serving engine without a model: its target's texts are known, and it does to a drafter all that engines do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from conftest import VOCABULARY
from specstop.decode.drafters import Drafter
from specstop.decode.engines.drafting import Drafting, Options
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair
from specstop.policies.contract import StopPolicy

K, PLACES = 5, 4

Drafts = list[list[int]]
Propose = Callable[[list[list[int]], np.ndarray, np.ndarray], Drafts]


@dataclass
class Request:
    """Its prompt, the text that the target will write, and how much of it is there."""

    name: str
    prompt: list[int]
    answer: list[int]
    done: int = 0
    draft: list[int] = field(default_factory=list)
    unread: int = 0  # tokens that a chunked prefill has yet to read
    rounds: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # (context, draft, what followed)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer[: self.done]


class Engine:
    """Places requests in a batch, commits what the target accepts of their drafts, and calls the drafter after each step.

    Args:
        requests: in the order of their arrival.
        places: of the batch.
        seed: of arrivals, preemptions, moves, trimmed drafts and aborted requests.
    """

    def __init__(self, requests: Sequence[Request], places: int, seed: int, *, gentle: bool = False) -> None:
        self.waiting, self.running = list(requests), []
        self.places, self.chance, self.gentle = places, random.Random(seed), gentle
        self.tokens = np.zeros((places, 4096), dtype=np.int32)
        self.counts = {"preempted": 0, "moved": 0, "aborted": 0, "trimmed": 0, "rounds": 0}
        self.finished: list[Request] = []

    @property
    def names(self) -> list[str]:
        return [request.name for request in self.running]

    def run(self, propose: Propose, most: int = 10_000) -> None:
        while (self.waiting or self.running) and most:
            self.step(propose)
            most -= 1

    def step(self, propose: Propose) -> None:
        self._schedule()
        sampled = [self._advance(request) for request in self.running]
        for place, request in enumerate(self.running):
            self.tokens[place, : len(request.text)] = request.text
        lengths = np.array([len(request.text) for request in self.running])
        for request, draft in zip(self.running, propose(sampled, lengths, self.tokens), strict=True):
            request.draft = draft
            if draft:
                self.counts["rounds"] += 1
        for request in [r for r in self.running if r.done >= len(r.answer)]:
            self.running.remove(request)
            self.finished.append(request)

    def _schedule(self) -> None:
        if not self.gentle and len(self.running) > 1 and self.chance.random() < 0.1:
            request = self.running.pop(self.chance.randrange(len(self.running)))
            request.draft, request.unread = [], len(request.text)
            self.waiting.insert(0, request)
            self.counts["preempted"] += 1
        if not self.gentle and len(self.running) > 1 and self.chance.random() < 0.05:
            self.running.pop(self.chance.randrange(len(self.running)))
            self.counts["aborted"] += 1
        if not self.gentle and len(self.running) > 1 and self.chance.random() < 0.2:
            self.chance.shuffle(self.running)
            self.counts["moved"] += 1
        while self.waiting and len(self.running) < self.places and (self.gentle or self.chance.random() < 0.5):
            request = self.waiting.pop(0)
            request.unread = request.unread or len(request.prompt)
            self.running.append(request)

    def _advance(self, request: Request) -> list[int]:
        """Read a part of the prompt, or verify the draft and commit what it is worth."""
        if request.unread > 4 and not self.gentle:
            request.unread -= 4
            return []
        request.unread = 0
        draft = request.draft
        if draft and not self.gentle and self.chance.random() < 0.1:
            draft = draft[: self.chance.randrange(len(draft))]
            self.counts["trimmed"] += 1
        left = request.answer[request.done :]
        agreed = 0
        while agreed < min(len(draft), len(left) - 1) and draft[agreed] == left[agreed]:
            agreed += 1
        new = left[: agreed + 1]
        request.rounds.append((len(request.text), list(request.draft), new))
        request.done += len(new)
        return new


def requests_of(pair: Pair) -> list[Request]:
    """Return 14 requests with the target's own texts, two of them equal, two of which begin alike."""
    chance = np.random.default_rng(1)
    prompts = [[int(t) for t in chance.integers(17, 48, n)] for n in chance.integers(2, 12, 12)]
    prompts += [list(prompts[3]), [*prompts[5], 20, 21]]
    made = []
    for at, prompt in enumerate(prompts):
        cache = CachedModel(pair.target, 128, pair.vocabulary)
        logits, answer = cache.read(torch.tensor([prompt]), rows=1), []
        for _ in range(24):
            answer.append(int(logits[0, -1].argmax()))
            logits = cache.read(torch.tensor([answer[-1:]]))
        made.append(Request(f"r{at}", prompt, answer))
    return made


class Asked:
    """Drafting with its engine, and what it was asked for: each text with its draft.

    Args:
        drafter: that drafts, K tokens at most for `PLACES` requests.
        policy: that ends the drafts.
        seed: of the engine.
        requests: not begun yet; they are left so.
        named: the engine tells names.
        more: of `Options`.
    """

    def __init__(
        self, drafter: Drafter, policy: StopPolicy, seed: int, requests: Sequence[Request], named: bool, **more: int
    ) -> None:
        options = Options(**{"rows": PLACES, "depth": K, "readable": 128, "vocabulary": VOCABULARY, **more})
        self.drafting = Drafting(drafter, policy, options)
        self.engine = Engine([Request(r.name, r.prompt, r.answer) for r in requests], PLACES, seed)
        self.named = named
        self.asked: list[tuple[list[int], list[int]]] = []

    def propose(self, sampled: Drafts, lengths: np.ndarray, tokens: np.ndarray) -> Drafts:
        at = [i for i, new in enumerate(sampled) if new]
        texts = [tokens[i, : lengths[i]] for i in at]
        made = self.drafting.propose(texts, [self.engine.names[i] for i in at] if self.named else None)
        self.asked += [(text.tolist(), draft) for text, draft in zip(texts, made, strict=True)]
        drafts: Drafts = [[] for _ in sampled]
        for i, draft in zip(at, made, strict=True):
            drafts[i] = draft
        return drafts
