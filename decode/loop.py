"""The round loop: draft, decide, verify, commit.

A round starts at its roots: the anchor, the last committed token, which neither model has read yet (or, under a mode that
defers it, several alternatives for the token to come). The draft reads its backlog and proposes candidates while the policy
keeps their branches; the target reads roots and candidates in one call; the verification mode accepts a path, which is
committed with one more token of the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..policies import kernels
from ..policies.checking import check_policy
from ..policies.contract import Array, RoundOutcome, StopPolicy
from ..policies.errors import InputError
from ..policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN, check_hidden, check_sizes
from ..policies.features.history import History
from ..policies.latency.profile import Profile
from .candidates import Candidates
from .captured import open_cache
from .charge import Guard
from .drafters import Drafter, ModelDrafter
from .drafting import DraftPhase
from .finite import FiniteRows, check_rows
from .hidden import KeepsStates, ask_for_states, hidden_width
from .modes import check_mode, find_mode, resolve_mode
from .noise import Choices, KeyedSource, Source
from .observer import Observer, Seen
from .pair import Pair, readable
from .records import Generation, Round
from .sampling import Sampler, check_processors
from .settings import Settings, Stopwatch, Text
from .transfer import upload


class Speculator:
    """Decodes prompts one at a time with one pair, one policy and one set of settings.

    The policy is asked from depth 0 on (or from its `first`). One that raises or breaks the contract is reported once
    and replaced by a fixed length: the text is not harmed.

    Args:
        pair: target and draft.
        policy: a stop policy.
        settings: see `Settings`.
        profile: supplies the modelled seconds that policies observe; verifications of chains are padded to a cheaper size.
        source: makes the random source of a stream from (key, window); the keyed noise unless a test injects another.
        drafter: proposes the candidates; the pair's draft model by default.
        observer: looks on, as a collector does.
        hidden: states that the observer wants beside those that the policy reads (`features.hidden_states`).

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
    ) -> None:
        check_policy(policy)
        kernels.load()  # not in the middle of a text
        self.pair, self.settings, self.profile = pair, settings or Settings(), profile
        tree, temperature = self.settings.topology, self.settings.temperature
        self.mode = find_mode(resolve_mode(self.settings.verification, policy, tree, temperature), temperature)
        check_mode(self.mode, policy, tree)
        check_processors(self.settings.shaping.processors, pair.vocabulary)
        self.topology = (tree.rooted() if self.mode.deferred else tree).limited(policy.max_depth)
        chain = self.topology.is_chain
        self._drafter = drafter or ModelDrafter(pair)
        widths = self._widths(check_hidden((*policy.hidden, *hidden), policy.name), policy.name)
        check_sizes(policy, widths)
        states = self._drafter if DRAFT_HIDDEN in widths and isinstance(self._drafter, KeepsStates) else None
        self._keeps_target = TARGET_HIDDEN in widths or self._drafter.reads_hidden
        self._guard = Guard(policy, chain, self.settings.fallback, self.settings.guard, widths)
        self._eos = () if self.settings.ignore_eos else pair.eos
        self._observer = observer
        on_level = observer.level if observer else None
        self._phase = DraftPhase(
            self._drafter, self.mode, self._guard, self.topology, self._eos, temperature, on_level, states
        )
        self._padded = profile.padded() if profile and chain else ()
        self._source = source
        self._target = open_cache(pair.target, 0, pair.vocabulary, self._keeps_target)

    def _widths(self, names: Sequence[str], who: str) -> dict[str, int]:
        """Return the width of each hidden state that is wanted, once whoever has it keeps it."""
        return {
            name: ask_for_states(self._drafter, who) if name == DRAFT_HIDDEN else hidden_width(self.pair.target)
            for name in names
        }

    def renew(self) -> None:
        """Go on as a newly made loop would: under the policy given, with nothing carried over from earlier texts."""
        self._guard.renew()

    def prepare(self, lengths: Sequence[int]) -> None:
        """Have a GPU record what chains in texts of these lengths call for, so that no round that is timed does."""
        self._reserve(max(lengths))
        self._target.prepare([(tokens, 0) for tokens in range(1, self.topology.deepest + 2)], lengths)
        if isinstance(self._drafter, ModelDrafter):
            self._drafter.prepare(lengths)

    @property
    def policy(self) -> StopPolicy:
        """The policy in charge: the one given, until it fails."""
        return self._guard.policy

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
            prompt: token ids, at least one.
            key: of the stream (`noise.stream_key`); without effect at temperature 0.
            on_commit: called with the tokens of each round, for streaming.
            padding: tokens that stood left of the prompt: logits processors and stopping criteria see them, models do not.

        Raises:
            InputError: the prompt is empty, or longer than the models can read with the new tokens.
            PairError: a model gives logits that are not finite.
        """
        watch = Stopwatch(self.pair.device)
        begin = watch.now()
        text = self._prefill(list(prompt), key, list(padding))
        prefill_s = watch.now() - begin
        if on_commit and text.generated:
            on_commit(text.tokens[text.prompt :])
        rounds = []
        while not text.ended:
            done = len(text.tokens)
            rounds.append(self._round(text))
            if on_commit:
                on_commit(text.tokens[done:])
        if self.policy.carries:
            self._guard.carried = text.policy_state
        return Generation(tuple(text.tokens[text.prompt :]), tuple(rounds), text.prompt, prefill_s, watch.now() - begin)

    def _prefill(self, prompt: list[int], key: int, padding: list[int]) -> Text:
        """Read the prompt with the target and draw the first roots; the drafter reads when it is first asked."""
        if not prompt:
            raise InputError("the prompt is empty: expected at least one token")
        settings = self.settings
        self._reserve(len(prompt) + settings.max_new_tokens)
        seen = len(padding) + len(prompt)
        processors = settings.shaping.build(settings.temperature, seen, self._eos, self.pair.device)
        source = self._open_source(key, self.topology.deepest + 1)
        logits = self._target.read(upload([prompt], self.pair.device), rows=1)[0]
        check_rows(logits)
        sampler = Sampler(processors, settings.temperature, padding)
        text = Text(prompt, len(prompt), source, sampler, [], logits, None, History.start(1), self._hidden(-1))
        sampled = sampler(logits, lambda: [prompt])[0]
        text.roots = self.mode.start(sampled, self.topology.roots, self._choices(text, len(prompt)))
        if not self.mode.deferred:
            self._extend(text, text.roots)
        self._guard.start(text, key)
        return text

    def _open_source(self, key: int, window: int) -> Source:
        if self._source is not None:
            return self._source(key, window)
        return KeyedSource(key, self.pair.vocabulary, window, self.pair.logits_dtype, self.pair.device)

    def _reserve(self, tokens: int) -> None:
        """Empty both caches, with room for `tokens` and a round beyond them."""
        capacity = tokens + max(len(self.topology), len(self._padded)) + 1
        self._readable = capacity
        for role, model in (("target", self.pair.target), ("draft", self.pair.draft)):
            limit = readable(model)
            self._readable = min(self._readable, limit)
            if tokens > limit:
                raise InputError(
                    f"prompt and new tokens are {tokens} together, but the {role} reads at most {limit}; "
                    "shorten the prompt or lower --max-new-tokens"
                )
        if self._target.capacity < capacity:
            self._target = open_cache(self.pair.target, capacity, self.pair.vocabulary, self._keeps_target)
        self._target.roll_back(0)
        self._drafter.reserve(capacity)

    def _hidden(self, row: int) -> Tensor | None:
        states = self._target.states
        return None if states is None else states[:, row]

    def _choices(self, text: Text, position: int) -> Choices:
        """Return the random choices of the next round, whose roots stand at `position`."""
        choices = Choices(text.source, text.round, position, self.settings.temperature == 0.0)
        text.round += 1
        return choices

    def _round(self, text: Text) -> Round:
        watch = Stopwatch(self.pair.device)
        begin = watch.now()
        context, anchor = len(text.tokens), text.generated
        base = context if self.mode.deferred else context - 1
        anchor_row, anchor_hidden = text.anchor_row, text.hidden
        backlog = self._drafter.backlog(text.tokens)
        choices = self._choices(text, base)
        allowed = self.settings.max_new_tokens - text.generated - 1  # one place is the target's
        found = self._phase.run(text, base, choices, allowed, watch)
        sent = found.sent()
        logits, sampled, finite = self._verify(text, base, found, sent, watch)
        with finite:
            path, roots = self.mode.accept(found, sent, sampled, choices)
        committed = self._commit(text, base, found, sent, path, roots, logits)
        accepted, verified, cut = len(path) - 1, len(sent) - found.roots, text.ended or found.capped
        watch.start()
        if self._guard.decider.layout.history and not cut:
            text.history = text.history.after(np.array([accepted]), np.array([verified]))
        if self._guard.listens:
            self._guard.finished(text, accepted, verified, cut)
            self._guard.ended(
                text, lambda: self._outcome(context, found, verified, accepted, backlog, cut, watch.now() - begin)
            )
        watch.lap("policy")
        laps = watch.laps
        record = Round(
            anchor,
            context,
            found.drafted,
            verified,
            accepted,
            committed,
            found.decisions,
            backlog,
            cut,
            laps["first"],
            laps["draft"],
            laps["verify"],
            laps["policy"],
            watch.now() - begin,
        )
        if self._observer is not None:
            self._observer.round(Seen(text, anchor_row, found, sent, path, logits, sampled, record, anchor_hidden))
        return record

    def _verify(
        self, text: Text, base: int, found: Candidates, sent: Sequence[int], watch: Stopwatch
    ) -> tuple[Tensor, Tensor, FiniteRows]:
        """Return the target's raw and processed logits [len(sent), V] behind each place sent, and the check of them."""
        tokens = [found.tokens[place] for place in sent]
        watch.start()
        if len(sent) == found.depth[sent[-1]] + 1:  # a single path
            padding = self._padding(len(text.tokens), len(sent) - 1)
            read = upload([tokens + tokens[-1:] * padding], self.pair.device)
            logits = self._target.read(read)[0, : len(sent)]
        else:
            logits = self._target.read_tree(tokens, base, found.topology, [], [found.rows[p] for p in sent])[0]
        finite = FiniteRows(logits)
        watch.lap("verify")
        sampled = text.sampler(logits, lambda: [[*text.tokens[:base], *found.tokens_to(p)] for p in sent])
        return logits, sampled, finite

    def _padding(self, context: int, proposed: int) -> int:
        """Return how many tokens to fill a verification up with: a larger one may be cheaper."""
        size = self._padded[proposed] if proposed < len(self._padded) else proposed
        return size - proposed if context + size <= self._readable else 0

    def _commit(
        self,
        text: Text,
        base: int,
        found: Candidates,
        sent: Sequence[int],
        path: Sequence[int],
        roots: list[int],
        logits: Tensor,
    ) -> int:
        """Append the accepted path, and the next root unless it is deferred; compact both caches along the path.

        Returns:
            The tokens committed.
        """
        row = {place: at for at, place in enumerate(sent)}
        self._target.keep(base, [base + row[place] for place in path])
        self._drafter.commit(base, path)
        if self.mode.deferred:
            new = [found.tokens[place] for place in path]
        else:
            new = [*(found.tokens[place] for place in path[1:]), *roots]
        text.roots, last = roots, row[path[-1]]
        text.anchor_row = logits[last : last + 1]
        text.hidden = self._hidden(last)
        return self._extend(text, new)

    def _extend(self, text: Text, new: Sequence[int]) -> int:
        """Commit tokens one by one until the text ends: EOS, a stopping criterion, the limit. Return their number."""
        before = len(text.tokens)
        for token in new:
            text.tokens.append(token)
            text.ended = text.generated >= self.settings.max_new_tokens or token in self._eos or self._stops(text)
            if text.ended:
                break
        return len(text.tokens) - before

    def _stops(self, text: Text) -> bool:
        """Ask transformers' stopping criteria, as plain decoding does after each token."""
        if not self.settings.stops:
            return False
        ids = torch.tensor([[*text.sampler.padding, *text.tokens]], device=self.pair.device)
        return any(bool(torch.as_tensor(stop(ids, None)).all()) for stop in self.settings.stops)

    def _outcome(
        self,
        context: int,
        found: Candidates,
        verified: int,
        accepted: int,
        backlog: int,
        cut: bool,
        elapsed: float,
    ) -> RoundOutcome:
        def one(value: float) -> Array:
            return np.array([value])

        drafted, sent = one(found.drafted), one(verified)
        if self.policy.reads_clock or self.profile is None:
            seconds = one(elapsed if self.policy.reads_clock else 0.0)
        else:
            price = self.profile.decision(self.policy.cost_name)
            fed = None if found.topology.is_chain else np.array([found.fed()])
            seconds = self.profile.round_seconds(
                one(context), drafted, sent, one(backlog), one(found.decisions), price, fed
            )
        return RoundOutcome(one(True), drafted, sent, one(accepted), one(cut), seconds)
