"""What can be chosen once drafters are there, by exact replay: the nodes of their trees, and which of two drafts a round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specstop.collect.prompts.read import Prompt, encode
from specstop.collect.run import collect, reading_room
from specstop.decode import Pair, with_drafter
from specstop.decode.profile import add_decisions, measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies import FixedLength
from specstop.policies.latency.profile import Profile
from specstop.policies.progress import Progress
from specstop.train.drafters.choice import SureChoice, choose_sure
from specstop.train.fit.run import train
from specstop.train.replay.bounds.oracle import oracle_seconds
from specstop.train.replay.bounds.static_tree import best_static_tree
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays
from specstop.train.report.intervals import Resamples


@dataclass(frozen=True)
class Ground:
    """Where all of it is measured.

    Attributes:
        pair: with its draft.
        train, test: prompts.
        tokens, depth: of a text, of a chain.
        effort: of profiles.
        room: for traces.
        progress: see `Progress`.
    """

    pair: Pair
    train: list[Prompt]
    test: list[Prompt]
    tokens: int
    depth: int
    effort: Effort
    room: Path
    progress: Progress

    def traces(self, drafter: str, name: str, tree: str | None = None) -> tuple[TraceArrays, TraceArrays, Profile, Any]:
        """Return greedy dense traces of a drafter over training and test prompts, its profile, and the first as a trace."""
        pair, made = with_drafter(self.pair, drafter), []
        for side, prompts in (("train", self.train), ("test", self.test)):
            made.append(
                collect(
                    pair, prompts, self.room / f"{name}-{side}", depth=self.depth, tree=tree, temperature=0.0,
                    max_new_tokens=self.tokens, draft=drafter, progress=self.progress,
                )
            )  # fmt: skip
        ids = encode(self.train, pair.tokenizer, reading_room(pair, self.tokens))
        profile = measure_profile(pair, ids, depth=self.depth, tree=tree, effort=self.effort, progress=self.progress)
        return trace_arrays(made[0]), trace_arrays(made[1]), profile, made[0]


def chosen_nodes(ground: Ground, drafter: str, name: str, tree: str) -> dict[str, Any]:
    """Return tokens a second on test prompts of a whole tree, of the best static part of it, and of learned nodes.

    Tree, head and rule are found on training prompts.
    """
    fitted, held, profile, trace = ground.traces(drafter, name, tree)
    static, _ = best_static_tree(fitted, profile)
    policy = train(trace, profile, rule="gain").policy
    profile = add_decisions(profile, [policy], ground.pair.vocabulary)
    whole, part, learned = (replay(held, one, profile) for one in (FixedLength(fitted.depth), static, policy))
    boot = Resamples(held.prompt_ids)
    ratio = boot.interval(boot.total(part.seconds) / boot.total(learned.seconds))
    bound = float(learned.tokens.sum() / oracle_seconds(held, profile).sum())
    return {
        "whole tree": whole.rate, "static tree": part.rate, "static nodes": static.shape.nodes, "learned": learned.rate,
        "learned nodes": float(learned.verified.sum() / learned.rounds.sum()), "oracle": bound,
        "ratio": ratio.value, "low": ratio.low, "high": ratio.high,
    }  # fmt: skip


def chosen_drafter(ground: Ground) -> tuple[SureChoice, SureChoice]:
    """Return from which chance on training prompts have the suffix draft beside the draft model; then on test ones."""
    suffix, model = (ground.traces(name, f"chain-{name}") for name in ("suffix", "model"))
    profiles, policy = (suffix[2], model[2]), FixedLength(ground.depth)
    found = choose_sure(suffix[0], model[0], policy, profiles)
    return found, choose_sure(suffix[1], model[1], policy, profiles, () if found.sure is None else (found.sure,))
