"""The live loop: texts decoded round by round (`rounds`) with the models of a pair.

A round starts at its roots: the anchor, the last committed token, which neither model has read yet (or, under a mode that
defers it, several alternatives for the token to come). The draft reads its backlog and proposes candidates while the policy
keeps their branches; the target reads roots and candidates in one call; the verification mode accepts a path, which is
committed with one more token of the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..policies import kernels
from ..policies.checking import check_policy
from ..policies.contract import StopPolicy
from ..policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN, check_hidden, check_sizes
from ..policies.latency.profile import Profile
from .drafters import Drafter, ModelDrafter
from .model_source import ModelSource
from .models.hidden import ask_for_states, hidden_width
from .models.pair import Pair
from .observer import Observer, Seen
from .reader import Logits
from .records import Generation, Round
from .rounds import play_round
from .runner import GuardedRunner
from .settings import Settings, Stopwatch, Text
from .verify.modes import check_mode, find_mode, is_trimming, resolve_mode
from .verify.noise import Source
from .verify.sampling import check_processors


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
        self._drafter, self._observer = drafter or ModelDrafter(pair), observer
        self._sizes = self._widths(check_hidden((*policy.hidden, *hidden), policy.name), policy.name)
        check_sizes(policy, self._sizes)
        keeps = TARGET_HIDDEN in self._sizes, DRAFT_HIDDEN in self._sizes
        padded = profile.padded() if profile and chain else ()
        trimming = policy.trims, is_trimming(policy)
        self._source = ModelSource(
            pair, self._drafter, self.mode, self.topology, self.settings, trimming, keeps, padded, source
        )
        self._runner = GuardedRunner(policy, profile, chain, self.settings.fallback, self.settings.guard)
        self._runner.replaced = self._read_for
        self._read_for(policy)
        self._clock()

    def _clock(self) -> None:
        """Time the parts of rounds, and show the observer what is drawn: neither source nor runner knows of it."""
        self._watch, source, runner = Stopwatch(self.pair.device), self._source, self._runner
        self._watch.wrap(source, {"feed": "draft", "read": "verify", "step": "policy", "note": "policy"})
        self._watch.wrap(runner, {"keep": "policy", "select": "policy", "finished": "policy"})
        runner.elapsed = lambda: self._watch.now() - self._begun
        if (observer := self._observer) is not None:
            draw = source.draw

            def seen(feeding: list[int]) -> tuple[list[int], Logits | None]:
                places, logits = draw(feeding)
                if logits is not None:
                    observer.level(source.found, places, logits)
                return places, logits

            setattr(source, "draw", seen)  # noqa: B010 - the type checker knows no other way

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
        self._runner.renew()

    def prepare(self, lengths: Sequence[int]) -> None:
        """Have a GPU record what chains in texts of these lengths call for, so that no round that is timed does."""
        self._source.reserve(max(lengths))
        self._source.target.prepare([(tokens, 0) for tokens in range(1, self.topology.deepest + 2)], lengths)
        if isinstance(self._drafter, ModelDrafter):
            self._drafter.prepare(lengths)

    @property
    def policy(self) -> StopPolicy:
        """The policy in charge: the one given, until it fails."""
        return self._runner.policy

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
        source, watch = self._source, self._watch
        source.settings = self.settings
        begin = watch.now()
        text = source.open(list(prompt), key, list(padding))
        self._runner.begin(key)
        prefill_s = watch.now() - begin
        if on_commit and text.generated:
            on_commit(text.tokens[text.prompt :])
        rounds = []
        while not text.ended:
            done = len(text.tokens)
            rounds.append(self._round(text))
            if on_commit:
                on_commit(text.tokens[done:])
        return Generation(tuple(text.tokens[text.prompt :]), tuple(rounds), text.prompt, prefill_s, watch.now() - begin)

    def _round(self, text: Text) -> Round:
        """Play a round and return its record."""
        watch, source = self._watch, self._source
        watch.restart()
        self._begun = watch.now()
        anchor = text.generated
        made = play_round(source, self._runner)
        found, laps = made.found, watch.laps
        draft = laps["draft"]
        record = Round(
            anchor,
            int(made.context[0]),
            int(found.drafted[0]),
            int(found.verified[0]),
            int(made.accepted[0]),
            int(made.committed[0]),
            int(found.decisions[0]),
            int(made.backlog[0]),
            bool(made.cut[0]),
            draft[0] if draft else 0.0,
            sum(draft[1:]),
            sum(laps["verify"]),
            sum(laps["policy"]),
            watch.now() - self._begun,
        )
        if self._observer is not None:
            row, hidden = source.before
            self._observer.round(
                Seen(
                    text, row, source.found, source.sent, source.path, source.raw, source.sampled, record, hidden,
                    self._runner.state,
                )
            )  # fmt: skip
        return record
