"""The round loop: draft, decide, verify, commit, for a chain under `match` verification (lossless).

A round starts at the anchor, the last committed token, which neither model has read yet. The draft reads its backlog and
proposes x_1, x_2, ... while the policy keeps the branch; the target reads the anchor and the proposals in one call; the
tokens that equal the target's own are committed, with one more of the target's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..policies.baselines import FixedLength
from ..policies.contract import (
    DraftTree,
    RoundOutcome,
    State,
    StopPolicy,
    checked_select,
)
from ..policies.costs import Profile
from ..policies.errors import InputError, PolicyError, SpecstopWarning
from ..policies.features import Rows
from ..policies.history import HistoryOne
from ..policies.single import Row
from .cache import CachedModel
from .decide import Base, Decider
from .noise import KeyedSource, Source, match_scores
from .pair import Pair
from .records import Generation, Round
from .settings import Chain, Settings, Stopwatch, Text


class Speculator:
    """Decodes prompts one at a time with one pair, one policy and one set of settings.

    The policy is asked from depth 0 on (or from its `first`). One that raises or breaks the contract is reported once
    and replaced by a fixed length: the text is the target's in any case.

    Args:
        pair: target and draft.
        policy: a stop policy; `vectors` are not supplied by this loop.
        settings: see `Settings`.
        profile: supplies the modelled seconds that policies observe; verifications are padded to a cheaper size.
        source: makes the random source of a stream from (key, window); the keyed noise unless a test injects another.
    """

    def __init__(
        self,
        pair: Pair,
        policy: StopPolicy,
        settings: Settings | None = None,
        profile: Profile | None = None,
        source: Callable[[int, int], Source] | None = None,
    ) -> None:
        if policy.vectors:
            raise PolicyError(f"{policy.name}: reads {', '.join(policy.vectors)}; this loop hands over scalars only")
        self.pair, self.policy, self.settings, self.profile = pair, policy, settings or Settings(), profile
        self._depth = min(self.settings.max_depth, policy.max_depth)
        self._decider = Decider(policy, pair.device)
        self._padded = profile.padded() if profile else ()
        self._source = source or self._keyed
        self._target = self._draft = CachedModel(pair.target, 0, pair.vocabulary)
        self._carried: State = None
        self._warned = False
        self._eos = () if self.settings.ignore_eos else pair.eos

    def _keyed(self, key: int, window: int) -> Source:
        return KeyedSource(key, self.pair.vocabulary, window, self.pair.logits_dtype, self.pair.device)

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], key: int = 0, on_commit: Callable[[list[int]], None] | None = None
    ) -> Generation:
        """Decode one prompt.

        Args:
            prompt: token ids, at least one.
            key: of the stream (`noise.stream_key`); without effect at temperature 0.
            on_commit: called with the tokens of each round, for streaming.

        Raises:
            InputError: the prompt is empty, or longer than the models can read with the new tokens.
        """
        watch = Stopwatch(self.pair.device)
        begin = watch.now()
        text = self._prefill(list(prompt), key)
        prefill_s = watch.now() - begin
        first = text.tokens[text.prompt :]
        if on_commit:
            on_commit(first)
        rounds = []
        while not text.ended:
            done = len(text.tokens)
            rounds.append(self._round(text))
            if on_commit:
                on_commit(text.tokens[done:])
        if self.policy.carries:
            self._carried = text.policy_state
        return Generation(tuple(text.tokens[text.prompt :]), tuple(rounds), text.prompt, prefill_s, watch.now() - begin)

    def _prefill(self, prompt: list[int], key: int) -> Text:
        """Read the prompt with the target and commit its first token; the draft reads when it is first asked."""
        if not prompt:
            raise InputError("the prompt is empty: expected at least one token")
        self._reserve(len(prompt) + self.settings.max_new_tokens)
        logits = self._target.read(torch.tensor([prompt], device=self.pair.device), rows=1)[0]
        source = self._source(key, self._depth + 1)
        token = int(self._scores(logits, source, len(prompt), 1).argmax())
        text = Text([*prompt, token], len(prompt), source, logits, self._carried, HistoryOne())
        text.ended = token in self._eos or self.settings.max_new_tokens == 1
        if self._carried is None:
            try:
                text.policy_state = self.policy.start(1, torch.tensor([key], device=self.pair.device))
            except Exception as error:  # a plugin may raise anything; the text must not suffer
                self._fail(text, error)
        return text

    def _reserve(self, tokens: int) -> None:
        """Empty both caches, with room for `tokens` and a round beyond them."""
        capacity = tokens + max(self._depth, len(self._padded)) + 1
        self._readable = capacity
        for role, model in (("target", self.pair.target), ("draft", self.pair.draft)):
            limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or capacity
            self._readable = min(self._readable, limit)
            if tokens > limit:
                raise InputError(
                    f"prompt and new tokens are {tokens} together, but the {role} reads at most {limit}; "
                    "shorten the prompt or lower --max-new-tokens"
                )
        if self._target.capacity < capacity:
            self._target = CachedModel(self.pair.target, capacity, self.pair.vocabulary)
            self._draft = CachedModel(self.pair.draft, capacity, self.pair.vocabulary)
        self._target.roll_back(0)
        self._draft.roll_back(0)

    def _scores(self, logits: Tensor, source: Source, position: int, count: int) -> Tensor:
        """Return [count, V], what the next tokens at `position`, ... are the argmax of."""
        if self.settings.temperature == 0.0:
            return logits
        return match_scores(logits, self.settings.temperature, source.gumbel(position, count))

    def _round(self, text: Text) -> Round:
        watch = Stopwatch(self.pair.device)
        begin = watch.now()
        context, anchor = len(text.tokens), text.generated
        backlog = context - self._draft.length
        chain = self._draft_chain(text, watch)
        verified = self._choose(text, chain)
        own, logits = self._verify(text, verified, watch)
        accepted, committed = self._commit(text, verified, own, logits)
        cut = text.ended or chain.capped
        watch.start()
        if self._decider.layout.history and not cut:
            text.history.add(accepted, len(verified))
        if type(self.policy).observe is not StopPolicy.observe:
            elapsed = watch.mark - begin
            self._observe(text, self._outcome(context, chain, len(verified), accepted, backlog, cut, elapsed))
        watch.lap("policy")
        laps = watch.laps
        return Round(
            anchor,
            context,
            len(chain.tokens),
            len(verified),
            accepted,
            committed,
            chain.decisions,
            backlog,
            cut,
            laps["first"],
            laps["draft"],
            laps["verify"],
            laps["policy"],
            watch.now() - begin,
        )

    def _draft_chain(self, text: Text, watch: Stopwatch) -> Chain:
        """Draw x_1, x_2, ... until the policy stops, EOS is drawn, or no more tokens are allowed."""
        chain = Chain([])
        allowed = self.settings.max_new_tokens - text.generated - 1  # one place is the target's
        base: Base | None = None
        unread = text.tokens[self._draft.length :]
        row: Rows | Row | None = None
        for depth in range(self._depth + 1):
            if depth == min(allowed, self._depth):
                chain.capped = depth < self._depth
                return chain
            if depth >= self.policy.first:
                watch.start()
                base = base or self._decider.base(text.anchor_row, text.tokens[-1], text.history)
                go_on = self._decide(text, depth, base, row)
                chain.decisions += 1
                watch.lap("policy")
                if not go_on:
                    chain.dropped = int(self.policy.trims and depth > 0)
                    return chain
            watch.start()
            logits = self._draft.read(torch.tensor([unread], device=self.pair.device), rows=1)[0]
            watch.lap("draft" if depth else "first")
            position = len(text.tokens) + depth
            scores = self._scores(logits, text.source, position, 1)
            drawn = scores.argmax(-1)
            unread = [int(drawn)]
            temperature = self.settings.temperature
            row = self._decider.row(logits, temperature, scores, drawn, unread[0], row, depth + 1)
            chain.tokens.append(unread[0])
            if unread[0] in self._eos:
                chain.capped = True
                return chain
        return chain

    def _decide(self, text: Text, depth: int, base: Base, row: Rows | Row | None) -> bool:
        """Ask the policy whether to go on from depth j; a policy that fails is replaced by the fallback length."""
        try:
            keep, text.policy_state = self._decider(depth, base, row, text.policy_state)
        except Exception as error:  # a plugin may raise anything; the text must not suffer
            self._fail(text, error)
            return depth < self.settings.fallback
        return keep

    def _fail(self, text: Text, error: Exception) -> None:
        """Warn once and go on with the fixed fallback length."""
        if not self._warned:
            warnings.warn(
                f"policy {self.policy.name} failed ({type(error).__name__}: {error}); "
                f"drafting {self.settings.fallback} tokens a round from here on",
                SpecstopWarning,
                stacklevel=2,
            )
        self._warned = True
        self.policy = FixedLength(self.settings.fallback)
        self._decider = Decider(self.policy, self.pair.device)
        text.policy_state = None
        self._carried = None

    def _choose(self, text: Text, chain: Chain) -> list[int]:
        """Return the drawn tokens that are sent to the target: all but those that the policy trims."""
        kept = chain.tokens[: len(chain.tokens) - chain.dropped]
        if type(self.policy).select is StopPolicy.select or not kept:
            return kept
        nodes = torch.arange(len(kept), device=self.pair.device)[None]
        tree = DraftTree(torch.tensor([kept], device=nodes.device), nodes - 1, nodes + 1, nodes >= 0)
        try:
            mask = checked_select(self.policy, tree, text.policy_state)
        except Exception as error:
            self._fail(text, error)
            return kept
        return kept if mask is None else kept[: int(mask[0].long().cumprod(0).sum())]

    def _verify(self, text: Text, proposed: list[int], watch: Stopwatch) -> tuple[list[int], Tensor]:
        """Return the target's own token after the anchor and after each proposal, and its logits [k + 1, V]."""
        read = [text.tokens[-1], *proposed]
        padding = self._padding(len(text.tokens), len(proposed))
        watch.start()
        logits = self._target.read(torch.tensor([read + read[-1:] * padding], device=self.pair.device))[0, : len(read)]
        watch.lap("verify")
        own = self._scores(logits, text.source, len(text.tokens), len(proposed) + 1).argmax(-1).tolist()
        return own, logits

    def _padding(self, context: int, proposed: int) -> int:
        """Return how many tokens to fill a verification up with: a larger one may be cheaper."""
        size = self._padded[proposed] if proposed < len(self._padded) else proposed
        return size - proposed if context + size <= self._readable else 0

    def _commit(self, text: Text, proposed: list[int], own: list[int], logits: Tensor) -> tuple[int, int]:
        """Append the accepted tokens and the target's next one, cut at EOS or the limit; roll both caches back.

        Returns:
            min(A, k), and the tokens committed.
        """
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == own[accepted]:
            accepted += 1
        new = own[: min(accepted + 1, self.settings.max_new_tokens - text.generated)]
        for index, token in enumerate(new):
            if token in self._eos:
                new = new[: index + 1]
                text.ended = True
                break
        before = len(text.tokens)
        text.tokens.extend(new)
        text.ended = text.ended or text.generated >= self.settings.max_new_tokens
        text.anchor_row = logits[len(new) - 1 : len(new)]
        self._target.roll_back(min(self._target.length, len(text.tokens) - 1))
        self._draft.roll_back(min(self._draft.length, before + accepted))
        return accepted, len(new)

    def _outcome(
        self,
        context: int,
        chain: Chain,
        verified: int,
        accepted: int,
        backlog: int,
        cut: bool,
        elapsed: float,
    ) -> RoundOutcome:
        one = torch.ones(1, dtype=torch.int64, device=self.pair.device)
        drafted, sent = one * len(chain.tokens), one * verified
        if self.policy.reads_clock or self.profile is None:
            seconds = torch.tensor([elapsed if self.policy.reads_clock else 0.0], dtype=torch.float64)
        else:
            decision_s = self.profile.decision(self.policy.cost_name)
            seconds = self.profile.round_seconds(
                one * context, drafted, sent, one * backlog, one * chain.decisions, decision_s
            )
        return RoundOutcome(one > 0, drafted, sent, one * accepted, (one * cut) > 0, seconds.to(one.device))

    def _observe(self, text: Text, outcome: RoundOutcome) -> None:
        """Tell the policy how the round went."""
        try:
            text.policy_state = self.policy.observe(outcome, text.policy_state)
        except Exception as error:
            self._fail(text, error)
