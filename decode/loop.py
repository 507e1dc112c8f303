"""The live loop: decodes texts round by round (`rounds`) with the models of a pair.

A round starts at the anchor, the last committed token, which neither model has read yet. The draft reads its backlog and
proposes candidates while the policy keeps a branch. The target reads anchor and candidates in one call. The verification
mode accepts a path, which is committed with one more token of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ..policies import kernels
from ..policies.arguments import check_limits
from ..policies.contract import StopPolicy
from ..policies.display import silent
from ..policies.errors import InputError, PolicyError
from ..policies.features import DRAFT_HIDDEN, check_hidden, check_sizes
from ..policies.fixed import FixedLength
from ..policies.host import PolicyHost, validate_policy
from ..policies.profile import Profile
from ..policies.routing import OneDrafter
from .drafters import Drafter, find_drafters
from .drafters.spec import drafter_index, drafter_names
from .drift_monitor import make_monitor
from .hooks import Hook, Timer
from .model_source import ModelSource
from .models.cache import CachedModel
from .models.outputs import hidden_widths
from .models.pair import Pair
from .records import Generation, Round
from .round_state import RoundState
from .rounds import play_round
from .settings import Settings
from .texts import Request as Request
from .topology import with_drafters
from .verify.modes import check_mode, find_mode, resolve_mode
from .verify.noise import KeyedSource

OnCommit = Callable[[int, list[int]], None]
"""Called with a request's number and its new tokens."""


class Speculator:
    """Decodes prompts with a pair, a policy and settings, up to S of them side by side.

    If the policy raises or breaks the contract, one warning is issued and a fixed draft length is used instead; the text is
    not affected.

    Args:
        pair: target and draft.
        policy: a stop policy.
        settings: see `Settings`.
        profile: models the seconds that policies observe; verifications of one chain are padded to a cheaper size.
        source: returns the random source of a stream for (key, window); default: keyed noise.
        drafters: propose the candidates; default: those of the pair. A policy that does not route uses one of them
            (`StopPolicy.drafter`).
        hooks: observe the rounds.
        hidden: names of hidden states that hooks need in addition to those of the policy (`features.HIDDEN_STATES`).
        batch: S. When a text ends, the next prompt uses its stream.

    Raises:
        PolicyError, InputError: policy, mode, drafter, tree or logits processors are incompatible.
    """

    def __init__(
        self,
        pair: Pair,
        policy: StopPolicy,
        settings: Settings | None = None,
        profile: Profile | None = None,
        source: Callable[[int, int], KeyedSource] | None = None,
        drafters: Sequence[Drafter] = (),
        hooks: Sequence[Hook] = (),
        hidden: Sequence[str] = (),
        batch: int = 1,
    ) -> None:
        validate_policy(policy)
        check_limits(batch=batch)
        kernels.load(silent, policy)  # compile before the first text, not within it
        self.pair, self.settings, self.batch = pair, (settings or Settings()).for_pair(pair), batch
        tree, temperature = self.settings.topology, self.settings.temperature
        self._drafters = list(drafters or find_drafters(pair.drafter, pair))
        if not policy.routes:
            index = drafter_index(policy, drafter_names(pair.drafter))
            self._drafters = [self._drafters[index]]
            tree = tree.trees[index] if tree.drafters > 1 else tree
        profile = profile and profile.of_policy(policy, drafter_names(pair.drafter))
        self.mode = find_mode(resolve_mode(self.settings.verification, policy, tree, temperature), temperature)
        check_mode(self.mode, policy, tree)
        self.topology = with_drafters(tree.limited(policy.max_depth), len(self._drafters))
        pair.check_topology(self.topology)
        chain = self.topology.is_chain
        policy = policy.limited(self.topology.deepest)  # as replay limits it to the depth of a trace
        self._hooks = tuple(hooks)
        names = check_hidden((*policy.hidden, *hidden), policy.name)
        if DRAFT_HIDDEN in names and len(self._drafters) > 1:
            raise PolicyError(
                f"{policy.name}: reads {DRAFT_HIDDEN}, which policies that route cannot; use other features"
            )
        widths = hidden_widths(pair, names, self._drafters[0], policy.name, "use another policy")
        check_sizes(policy, widths)
        self._timer = Timer(pair.device)
        self._source = ModelSource(
            pair, self._drafters, self.mode, self.topology, self.settings, policy, self._timer, widths,
            padded=profile.padded() if profile and chain and batch == 1 else (),
            open_source=source, streams=batch, hooks=self._hooks,
        )  # fmt: skip
        fallback = min(self.settings.fallback, self.topology.deepest)
        observes_seconds = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
        prices_chains = observes_seconds and chain and (batch == 1 or profile is None or profile.batch is None)
        if profile and prices_chains and profile.max_depth < self.topology.deepest:
            raise InputError(
                f"--profile: {policy.name} observes the seconds of rounds and drafts up to {self.topology.deepest} tokens, "
                f"but the profile ends at {profile.max_depth}; measure it with --depth {self.topology.deepest}, or draft less"
            )
        monitor = self._monitor = make_monitor(policy, self.settings.drift, chain, fallback, batch)
        self._host = PolicyHost(
            policy,
            profile=profile if observes_seconds else None,
            batch=batch,
            drafters=len(self._drafters),
            fallback=OneDrafter(fallback) if policy.routes else FixedLength(fallback),
            on_decision=None if monitor is None else monitor.on_decision,
            on_outcome=None if monitor is None else monitor.on_outcome,
            on_replaced=self._source.read_for,
            clock=self._timer.elapsed,
        )

    def reset(self) -> None:
        """Use the given policy again, and forget what policy and drafter carry over from earlier texts."""
        self._host.reset()
        if self._monitor is not None:
            self._monitor.reset()
        for drafter in self._drafters:
            drafter.reset()

    @torch.inference_mode()
    def prepare(self, lengths: Sequence[int]) -> None:
        """Record CUDA graphs for chains in texts of these lengths, so that no timed round does."""
        self._source.reserve(max(lengths))
        self._source.target.prepare([(tokens, 0) for tokens in range(1, self.topology.deepest + 2)], lengths)
        for drafter in self._drafters:
            drafter.prepare(lengths)

    @property
    def target(self) -> CachedModel:
        """The target as this loop calls it."""
        return self._source.target

    @property
    def policy(self) -> StopPolicy:
        """The policy in use: the given one unless it was replaced."""
        return self._host.policy

    @property
    def carries(self) -> bool:
        """Whether policy or drafter carry state from text to text. Rounds then depend on the order of texts."""
        return self.policy.carries or any(drafter.carries for drafter in self._drafters)

    def generate(self, prompt: Sequence[int], key: int = 0) -> Generation:
        """Decode one prompt; arguments as of `Request`, errors as of `run`."""
        return self.run([Request(prompt, key)])[0]

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        on_commit: OnCommit | None = None,
        on_end: Callable[[int, Generation, int], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts, S side by side. When a text ends, the next prompt uses its stream.

        Args:
            requests: in the order in which they begin.
            on_commit: called after each round with a request's number and its new tokens, for streaming.
            on_end: called with the number of a request that has ended, its result and its stream.

        Returns:
            The results in the order of the requests. The seconds of rounds are shared equally by the texts in them.

        Raises:
            InputError: a prompt is empty, or too long for the models together with the new tokens.
            PairError: a model returns logits that are not finite.
        """
        self._host.restart()
        if not all(isinstance(request, Request) for request in requests):
            raise InputError("requests: expected a list of `Request`; call `decode` for texts")
        if not all(request.prompt for request in requests):
            raise InputError("the prompt is empty: expected at least one token")
        self.pair.check_prompts(request.prompt for request in requests)
        longest = max((len(request.prompt) for request in requests), default=0) + self.settings.max_new_tokens
        self._source.reserve(longest, requests)
        texts = self._source.texts
        done: dict[int, Generation] = {}
        waiting = list(enumerate(requests))[::-1]  # popped from the end
        while len(done) < len(requests):
            self._refill(waiting, on_commit)
            if any(text is not None and not text.ended for text in texts):  # the first token may end a text
                self._play(on_commit)
            for stream, text in enumerate(texts):
                if text is not None and text.ended:
                    texts[stream] = None
                    done[text.number] = text.generation(self._host.failure)
                    if on_end:
                        on_end(text.number, done[text.number], stream)
        return [done[number] for number in range(len(requests))]

    def _refill(self, waiting: list[tuple[int, Request]], on_commit: OnCommit | None) -> None:
        """Begin waiting texts in free streams."""
        streams, keys = [], []
        for stream, text in enumerate(self._source.texts):
            if text is not None or not waiting:
                continue
            number, request = waiting.pop()
            begin = self._timer.wait()
            text = self._source.open(stream, request)
            text.number, text.prefill_s = number, self._timer.wait() - begin
            streams.append(stream)
            keys.append(request.key)
            if on_commit:
                on_commit(number, text.tokens[text.prompt_tokens :])
        if streams:
            self._host.refill(np.array(streams, dtype=np.int64), np.array(keys, dtype=np.int64))

    def _play(self, on_commit: OnCommit | None) -> None:
        """Play a round of all texts, record it and call the hooks."""
        self._timer.restart()
        round = play_round(self._source, self._host)
        seconds = self._timer.elapsed()
        round.records = round_records(round, self._timer.laps, seconds)
        round.policy_state = self._host.state
        for hook in self._hooks:
            hook.on_round_end(round)
        for stream, record in round.records.items():
            text = round.texts[stream]
            assert text is not None
            text.records.append(record)
            if on_commit:
                on_commit(text.number, text.tokens[-record.committed :])


def round_records(round: RoundState, laps: Mapping[str, list[float]], seconds: float) -> dict[int, Round]:
    """Return the record of each stream that had a round, with its share of the seconds.

    Args:
        round: committed.
        laps: seconds by phase.
        seconds: of the whole round.
    """
    streams, tree = [stream for stream, _ in round.target_rows], round.topology
    first_s, *later_s = laps["draft"] or [0.0]  # the first draft step reads the backlog and is priced separately
    phases = (first_s, sum(later_s), sum(laps["verify"]), sum(laps["policy"]), seconds)
    shares = [part / len(streams) for part in phases]
    prompts = np.array([0 if text is None else text.prompt_tokens for text in round.texts])
    deepest = round.verified if tree.is_chain else (round.sent * tree.depths).max(1)
    columns = (
        round.context - prompts, round.context, round.drafted, round.verified, round.accepted, round.committed,
        round.decisions, round.read_backlog, round.cut,
    )  # fmt: skip
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    alone = np.where(round.drafting.sum(1) == 1, round.drafting.argmax(1), -1)
    later = round.steps.reshape(len(deepest), -1, round.steps.shape[-1])[..., 1:]  # [S, D, K - 1]
    last_columns = (deepest, alone, np.count_nonzero(later, (1, 2)), later.sum((1, 2)))
    last = list(zip(*(column.tolist() for column in last_columns), strict=True))
    return {s: Round._make([*rows[s], *shares, len(streams), *last[s]]) for s in streams}
