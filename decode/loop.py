"""The live loop: texts decoded round by round (`rounds`) with the models of a pair.

A round starts at its roots: the anchor, the last committed token, which neither model has read yet (or, under a mode that
defers it, several alternatives for the token to come). The draft reads its backlog and proposes candidates while the policy
keeps their branches; the target reads roots and candidates in one call; the verification mode accepts a path, which is
committed with one more token of the target's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..policies import kernels
from ..policies.arguments import check_token_ids
from ..policies.baselines.fixed import FixedLength
from ..policies.contract import StopPolicy
from ..policies.errors import InputError
from ..policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN, check_hidden, check_sizes
from ..policies.host import PolicyHost
from ..policies.limits import check_limits
from ..policies.profile import Profile
from ..policies.validation import Failure, validate_policy
from .drafted import Finished
from .drafters import Drafter, find_drafter
from .drafters.base import Carries, Prepares, carries
from .drift_monitor import make_monitor
from .model_source import ModelSource
from .models.cache import CachedModel
from .models.hidden import ask_for_states, hidden_width
from .models.pair import Pair
from .observer import Observer, Seen
from .policy.reader import Logits
from .records import Generation, Round
from .rounds import play_round
from .settings import Settings, Stopwatch, shaping_of
from .stream import Request as Request, Text
from .verify.modes import check_mode, find_mode, is_trimming, resolve_mode
from .verify.noise import Source
from .weak import weak_method


@dataclass
class _Running:
    """A request that is being decoded: its number, its text, the seconds of its prompt, its rounds."""

    number: int
    request: Request
    text: Text
    prefill_s: float
    rounds: list[Round]


class Speculator:
    """Decodes prompts with one pair, one policy and one set of settings, up to S of them side by side.

    The policy is asked from depth 0 on (or from its `first`). One that raises or breaks the contract is reported once
    and replaced by a fixed length: the text is not harmed.

    Args:
        pair: target and draft.
        policy: a stop policy.
        settings: see `Settings`.
        profile: supplies the modelled seconds that policies observe; verifications of one chain are padded to a cheaper size.
        source: makes the random source of a stream from (key, window); the keyed noise unless a test injects another.
        drafter: proposes the candidates; the pair's by default.
        observer: looks on, as a collector does.
        hidden: states that the observer wants beside those that the policy reads (`features.hidden_states`).
        batch: S, the texts that are decoded side by side. A text that ends gives its place to the next prompt.

    Raises:
        PolicyError, InputError: policy, mode, drafter, tree or logits processors do not go together; the message says which.
    """

    def __init__(
        self,
        pair: Pair,
        policy: StopPolicy,
        settings: Settings | None = None,
        profile: Profile | None = None,
        source: Callable[[int, int], Source] | None = None,
        drafter: Drafter | None = None,
        observer: Observer | None = None,
        hidden: Sequence[str] = (),
        batch: int = 1,
    ) -> None:
        validate_policy(policy)
        check_limits(batch=batch)
        kernels.load()  # not in the middle of a text
        self.pair, self.settings, self.profile = pair, (settings or Settings()).for_pair(pair), profile
        tree, temperature = self.settings.topology, self.settings.temperature
        self.mode = find_mode(resolve_mode(self.settings.verification, policy, tree, temperature), temperature)
        check_mode(self.mode, policy, tree)
        # Deferred roots are alternatives for the next token: the tree's first level, drawn from the target and not drafted.
        self.topology = (tree.rooted() if self.mode.deferred else tree).limited(policy.max_depth)
        pair.check_topology(self.topology)
        chain = self.topology.is_chain
        policy = policy.limited(self.topology.deepest)  # as replay limits it to the depth of a trace
        self._drafter, self._observer = drafter or find_drafter(pair.drafter, pair), observer
        self._sizes = self._widths(check_hidden((*policy.hidden, *hidden), policy.name), policy.name)
        check_sizes(policy, self._sizes)
        keeps = TARGET_HIDDEN in self._sizes, DRAFT_HIDDEN in self._sizes
        self.batch = batch
        padded = profile.padded() if profile and chain and batch == 1 else ()
        trimming = policy.trims, is_trimming(policy)
        self._source = ModelSource(
            pair, self._drafter, self.mode, self.topology, self.settings, trimming, keeps, padded, source,
            batch,
        )  # fmt: skip
        fallback = min(self.settings.fallback, self.topology.deepest)
        observes_seconds = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
        self._host = PolicyHost(
            policy,
            profile=profile if observes_seconds else None,
            batch=batch,
            fallback=FixedLength(fallback),
            monitor=make_monitor(policy, self.settings.drift, chain, fallback, batch),
            on_replaced=weak_method(self._read_for),  # another policy reads other features
            clock=weak_method(self._elapsed),
        )
        alone = batch == 1 or profile is None or profile.batch is None
        priced = observes_seconds and chain and alone
        if profile and priced and profile.max_depth < self.topology.deepest:
            raise InputError(
                f"--profile: {policy.name} hears what rounds take and drafts up to {self.topology.deepest} tokens, but the "
                f"profile ends at {profile.max_depth}; measure it with --depth {self.topology.deepest}, or draft less"
            )
        self._read_for(policy)
        self._clock()

    def _clock(self) -> None:
        """Time the parts of rounds, and show the observer what is drawn: neither source nor host knows of it."""
        self._watch, source = Stopwatch(self.pair.device), self._source
        self._watch.wrap(source, {"feed": "draft", "read": "verify", "step": "policy", "note": "policy"})
        self._watch.wrap(self._host, {"keep": "policy", "select": "policy", "finished": "policy"})
        if (observer := self._observer) is not None:
            # Weak, since `seen` becomes an attribute of the source and would keep it alive.
            draw, playing = weak_method(source.draw), weakref.proxy(source)

            def seen(fed: list[list[int]]) -> tuple[list[list[int]], Logits | None]:
                places, logits = draw(fed)
                first = 0
                for own, some in zip(playing.streams, places, strict=True):
                    tokens = slice(first, first := first + len(some))
                    if logits is not None and some:
                        part = logits if len(playing.streams) == 1 else logits.part(tokens)
                        observer.level(own.number, own.found, some, part)
                return places, logits

            setattr(source, "draw", seen)  # noqa: B010 - the type checker knows no other way

    def _elapsed(self) -> float:
        return self._watch.now() - self._begun

    def _read_for(self, policy: StopPolicy) -> None:
        self._source.read_for(policy, self._sizes)

    def _widths(self, names: Sequence[str], who: str) -> dict[str, int]:
        """Return the width of each hidden state that is wanted, once whoever has it keeps it."""
        return {
            name: ask_for_states(self._drafter, who) if name == DRAFT_HIDDEN else hidden_width(self.pair.target)
            for name in names
        }

    def renew(self) -> None:
        """Go on as a newly made loop would: under the policy given, with nothing carried over from earlier texts."""
        self._host.reset()
        if isinstance(self._drafter, Carries):
            self._drafter.renew()

    @torch.inference_mode()
    def prepare(self, lengths: Sequence[int]) -> None:
        """Have a GPU record what chains in texts of these lengths call for, so that no round that is timed does."""
        self._source.reserve(max(lengths))
        self._source.target.prepare([(tokens, 0) for tokens in range(1, self.topology.deepest + 2)], lengths)
        if isinstance(self._drafter, Prepares):
            self._drafter.prepare(lengths)

    @property
    def target(self) -> CachedModel:
        """The target as this loop calls it."""
        return self._source.target

    @property
    def policy(self) -> StopPolicy:
        """The policy that is asked: the one given, until it fails."""
        return self._host.policy

    @property
    def carries(self) -> bool:
        """Whether something passes from text to text, of the policy's or the drafter's: rounds then depend on their order."""
        return self.policy.carries or carries(self._drafter)

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        key: int = 0,
        on_commit: Callable[[list[int]], None] | None = None,
        padding: Sequence[int] = (),
    ) -> Generation:
        """Decode one prompt.

        Args:
            prompt, key, padding: see `Request`.
            on_commit: called with the tokens of each round, for streaming.

        Raises: as `run`.
        """
        told = None if on_commit is None else lambda number, tokens: on_commit(tokens)
        return self.run([Request(prompt, key, padding)], told)[0]

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        on_commit: Callable[[int, list[int]], None] | None = None,
        on_end: Callable[[int, Generation, int], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts, S side by side: a text that ends gives its place to the next one.

        Args:
            requests: in the order in which they begin.
            on_commit: called with a request's number and its tokens of each round, for streaming.
            on_end: called with its number, its text and the stream that it was in, when it ends.

        Returns:
            What each request has become, in their order. Seconds are a text's share of what was done for several at once.

        Raises:
            InputError: a prompt is empty, or longer than the models can read with the new tokens.
            PairError: a model gives logits that are not finite.
        """
        source = self._source
        source.settings = self.settings
        self._host.restart()
        check_token_ids([getattr(request, "prompt", request) for request in requests])
        if not all(request.prompt for request in requests):
            raise InputError("the prompt is empty: expected at least one token")
        self.pair.check_prompts(request.prompt for request in requests)
        longest = max((len(request.prompt) for request in requests), default=0) + self.settings.max_new_tokens
        shifts, offsets = zip(*(request.excess for request in requests), strict=True) if requests else ([0], [0])
        source.reserve(longest, max(shifts), max(offsets), any(request.read is not None for request in requests))
        done: dict[int, Generation] = {}
        running: dict[int, _Running] = {}
        waiting = list(enumerate(requests))[::-1]  # popped from the end
        while waiting or running:
            self._fill(running, waiting, on_commit)
            # The token drawn from the prompt may have ended a text already.
            if any(not own.text.ended for own in running.values()):
                self._play(running, on_commit)
            for stream in [stream for stream, own in running.items() if own.text.ended]:
                own = running.pop(stream)
                source.texts[stream] = None
                done[own.number] = _generation(own, self._host.failure)
                if on_end:
                    on_end(own.number, done[own.number], stream)
        return [done[number] for number in range(len(requests))]

    def _fill(
        self,
        running: dict[int, _Running],
        waiting: list[tuple[int, Request]],
        on_commit: Callable[[int, list[int]], None] | None,
    ) -> None:
        """Begin waiting texts in the streams that are free."""
        watch, rows = self._watch, []
        for stream in range(self.batch):
            if stream in running or not waiting:
                continue
            number, request = waiting.pop()
            begin = watch.now()
            if request.shaping is not None:
                shaping = shaping_of(self.pair, request.shaping, self.settings.max_new_tokens)
                request = replace(request, shaping=shaping)
            text = self._source.open(stream, request)
            running[stream] = _Running(number, request, text, watch.now() - begin, [])
            rows.append(stream)
            if on_commit and text.generated:
                on_commit(number, text.tokens[text.prompt :])
        if rows:
            keys = np.array([running[stream].request.key for stream in rows], dtype=np.int64)
            self._host.refill(np.array(rows, dtype=np.int64), keys)

    def _play(self, running: dict[int, _Running], on_commit: Callable[[int, list[int]], None] | None) -> None:
        """Play a round of all that is running, and note it."""
        watch, source = self._watch, self._source
        watch.restart()
        self._begun = watch.now()
        before = {stream: own.text.generated for stream, own in running.items()}
        made = play_round(source, self._host)
        seconds = watch.now() - self._begun  # before the observer is told
        for stream, record in self._records(made, before, seconds).items():
            running[stream].rounds.append(record)
        if self._observer is not None:
            for played in source.streams:
                record = running[played.number].rounds[-1]
                self._observer.round(Seen.of(played, source.rows, record, self._host.state, self.batch))
        if on_commit:
            for stream, own in running.items():
                on_commit(own.number, own.text.tokens[own.text.prompt + before[stream] :])

    def _records(self, made: Finished, anchors: dict[int, int], seconds: float) -> dict[int, Round]:
        """Return the record of the round of each stream that had one; each bears its share of the seconds."""
        found, laps, share = made.found, self._watch.laps, 1.0 / len(self._source.streams)
        draft = laps["draft"]
        # The first draft step reads the backlog, so it is counted, and priced, by itself.
        times = (draft[0] if draft else 0.0, sum(draft[1:]), sum(laps["verify"]), sum(laps["policy"]), seconds)
        first_s, draft_s, verify_s, policy_s, whole_s = (share * part for part in times)
        records = {}
        for own in self._source.streams:
            s = own.number
            records[s] = Round(
                anchors[s],
                int(made.context[s]),
                int(found.drafted[s]),
                int(found.verified[s]),
                int(made.accepted[s]),
                int(made.committed[s]),
                int(found.decisions[s]),
                int(made.backlog[s]),
                bool(made.cut[s]),
                first_s,
                draft_s,
                verify_s,
                policy_s,
                whole_s,
                len(self._source.streams),
                max((own.found.depth[place] for place in own.sent), default=0),
            )
        return records


def _generation(own: _Running, failure: Failure | None) -> Generation:
    text = own.text
    seconds = own.prefill_s + sum(record.seconds for record in own.rounds)
    tokens = tuple(text.tokens[text.prompt :])
    return Generation(tokens, tuple(own.rounds), text.prompt, own.prefill_s, seconds, failure=failure)
