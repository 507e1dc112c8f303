"""All that the oracle imports from inside the packages: the one module to adapt when modules move.

The other modules use only what `specstop.decode`, `specstop.policies`, `specstop.collect` and `specstop.train` export. What
`make_policies` and `make_drafters` make is written to folders; a check reads the folders of the baseline, and does not call
these two functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1]

Array = np.ndarray[Any, Any]


def use_helpers() -> None:
    """Put the folders of the test helpers on the path, as pytest does."""
    for folder in (TESTS, TESTS / "policies", TESTS / "decode", TESTS / "train"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def builtin_policies() -> list[str]:
    """Return the names of the built-in policies, as `specstop policies` lists them."""
    from specstop.policies.registry import BUILTINS

    return sorted(BUILTINS)


def silent() -> Any:
    """Return the progress display that shows nothing."""
    from specstop.policies.display import silent

    return silent


def request(prompt: Sequence[int], key: int) -> Any:
    """Return a prompt with the key of its stream, as `Speculator.run` takes it."""
    from specstop.decode.loop import Request

    return Request(prompt, key)


def replayed(arrays: Any, policy: Any, profile: Any) -> Any:
    """Return a policy replayed on the arrays of a trace, with the details of each round."""
    from specstop.train.replay.run import replay

    return _Replayed(replay(arrays, policy, profile), max(1, arrays.tree.limited(policy.max_depth).deepest))


def replayed_many(arrays: Any, policies: Sequence[Any], profile: Any) -> list[Any]:
    """Return several policies replayed together."""
    from specstop.train.replay.run import replay_many

    return [_Replayed(one) for one in replay_many(arrays, policies, profile)]


def replayed_batch(arrays: Any, policy: Any, profile: Any, batch: int) -> Any:
    """Return a policy replayed on a batch of texts."""
    from specstop.train.replay.batch import replay_batch

    rounds = replay_batch(arrays, policy, profile, batch, np.arange(arrays.sequences) * 5e-3)
    return SimpleNamespace(
        log=_log(rounds, BATCH_LOG),
        tokens=rounds.tokens.numpy(),
        seconds=rounds.seconds.numpy(),
        ended=rounds.ended.numpy(),
        sequence=rounds.text.numpy(),
    )


ROUND_LOG = ("sequence", "anchor", "drafted", "verified", "accepted")
BATCH_LOG = (
    "call", "sequence", "stream", "anchor", "context", "drafted", "verified", "accepted", "committed", "backlog",
    "decisions",
)  # fmt: skip


def _log(rounds: Any, names: Sequence[str]) -> Any:
    """Return [R, names] int64, columns of rounds."""
    return np.stack([getattr(rounds, name).numpy() for name in names], 1)


class _Replayed:
    """Rounds in the layout of the baseline: sums by text, and a log."""

    def __init__(self, rounds: Any, depth: int = 0) -> None:
        import torch

        self.name, self.history, self.tokens, self.seconds = rounds.name, rounds.history, rounds.tokens, rounds.seconds
        self.log = torch.from_numpy(_log(rounds, ROUND_LOG))
        self.committed = rounds.by_sequence(rounds.committed).long()
        # In chains one token is fed at each step.
        fed = (torch.arange(depth) < rounds.drafted[:, None]).long() if rounds.fed is None else rounds.fed
        columns = torch.stack([rounds.context, rounds.backlog, rounds.decisions], 1)
        self.details = torch.cat([columns, fed], 1) if depth else None


def export_hf(policy: str, out: Path, drafter: str | None = None) -> dict[str, Any]:
    """Write the folder for `generate(custom_generate=...)` of a policy and return its figures."""
    from specstop.train.export.deploy import deploy

    return deploy("hf", out, policy, drafter=drafter)


def export_onnx(policy: Any, out: Path) -> dict[str, Any]:
    """Write the ONNX file of a learned policy and return what is said of it."""
    from specstop.train.export.onnx_model import export_onnx as export

    return export(policy, out)


def run_command(*arguments: object) -> tuple[int, str]:
    """Run `specstop` with these arguments in this process; return its exit code and standard output."""
    use_helpers()
    from benchmark_scripts import family

    answer = family("in_process").cli(*arguments)
    return answer.code, answer.out


def probabilities(policy: Any, features: Array, depth: int, hidden: dict[str, Array]) -> tuple[Array, Array]:
    """Return the calibrated outputs of a learned policy's head."""
    from specstop.policies.learned import TreeGain

    if not isinstance(policy, TreeGain):
        return policy.probabilities(features, depth, hidden)
    rows = np.ascontiguousarray(features, dtype=np.float32).reshape(-1, features.shape[-1])
    scores = policy.head.scores(rows, depth).reshape(*features.shape[:-1], 2)
    ranks, certain = policy.rule.level(depth, features.shape[-2]).ranks, np.ones(features.shape[:-1])
    return policy.accept.of(certain, scores[..., 0], depth, ranks), policy.next.of(
        certain, scores[..., 1], depth, ranks
    )


def chain_seconds(profile: Any, columns: Sequence[Array], decision: float) -> Array:
    """Return seconds of rounds of chains; columns are context, drafted, verified, backlog, decisions."""
    return profile.round_seconds(*columns, decision)


def tree_seconds(profile: Any, columns: Sequence[Array], decision: float, fed: Array) -> Array:
    """Return seconds of rounds of trees; `fed` [S, K] is how many tokens the draft read at each step."""
    return profile.round_seconds(*columns, decision, fed)


def costs_by_length(profile: Any, context: float, decision: float, first: int, depth: int) -> Array:
    """Return the seconds of rounds of chains that draft 0, 1, ... tokens."""
    return profile.chain_costs(context, decision, first, depth)


def prompt_seconds(profile: Any, lengths: Array) -> Array:
    """Return the seconds of reading prompts."""
    return profile.prefill_seconds(lengths)


def padded_sizes(profile: Any) -> list[int]:
    """Return how many tokens are best verified for 0, 1, ... drafted tokens."""
    return list(profile.padded())


def decision_seconds(profile: Any, policy: Any, decisions: Array) -> Array:
    """Return the seconds of a policy's decisions."""
    return profile.decision(policy.cost_name) * decisions


def noise_of(profile: Any) -> dict[str, Any]:
    """Return what the measurements of a profile say of the machine."""
    return {} if profile.noise is None else vars(profile.noise)


def estimated_again(profile: Any) -> dict[str, Any]:
    """Return the JSON form of the measurements of a profile."""
    contexts = profile.low.context, profile.high.context
    return type(profile).measured(profile.measurements, contexts, profile.max_depth).to_dict()


def make_timed_profile(costs: Any) -> Any:
    """Return a profile with synthetic measurements of a machine that has these costs."""
    use_helpers()
    from timed import timed_profile

    return timed_profile(costs, ("confidence", "heuristic"), pace=0.05, jitter=0.1)


def measure(pair: Any, prompts: Sequence[Sequence[int]]) -> Any:
    """Return a profile measured on this machine in a few seconds."""
    from specstop.decode import measure_profile
    from specstop.decode.profile.measuring import Effort

    return measure_profile(
        pair,
        prompts,
        depth=4,
        temperature=0.8,
        policies=["confidence:0.4"],
        effort=Effort(repetitions=4),
        progress=silent(),
        tree="2,2,1",
        batch=(2, 4),
    )


def batch_seconds(profile: Any, streams: int, lengths: int, context: float) -> dict[str, Any]:
    """Return seconds of the parts of a round of a batch, and of the whole."""
    one = np.full(streams, lengths, dtype=np.int64)
    return {
        "draft": float(profile.draft_s(streams, context)),
        "verify": float(profile.verify_s(streams, streams * (1 + lengths), context)),
        "round": profile.batch_seconds(np.full(streams, context), one, one, one, 0.0),
    }


def make_drafters(pair: Any, folder: Path) -> None:
    """Write a folder for each kind of trained drafter, with random weights that agree with the target now and then."""
    use_helpers()
    from small_drafters import output_weight, small_network
    from specstop.decode.drafters import TrainedDrafter, save_drafter

    output = output_weight(pair).cpu().float()
    for kind in ("medusa", "hydra", "ctc", "layer"):
        network = small_network(kind, output.shape[1], pair.vocabulary, output)
        save_drafter(TrainedDrafter(kind, network, pair.fingerprint["target"]), folder / kind)


def make_policies(folder: Path, profile: Any, widths: dict[str, int]) -> None:
    """Write a policy folder for each head, rule and calibration, with random weights.

    Args:
        folder: that they are written to.
        profile: whose costs the rule for batches decides by.
        widths: of the hidden states of the models that policies are run with, by name.
    """
    use_helpers()
    import random_heads
    from head_tensors import NAMES, TENSORS, knots
    from specstop.policies import save_policy
    from specstop.policies.batch_rules import for_batches
    from specstop.policies.heads import build_head
    from specstop.policies.heads.layers import HARD_FEATURES
    from specstop.policies.learned import (
        Calibrator,
        LearnedPolicy,
        SurvivalMaps,
        TrainingMetadata,
    )
    from specstop.policies.rules import BatchRule, Derived, Threshold
    from trees import FREE, make_tree_policy

    maps = Calibrator("isotonic", knots=knots()), Calibrator("temperature", 1.5)
    facts = TrainingMetadata(
        0.8, "match", "match", {}, 52.5, (0.8, 0.75, 0.7, 0.7, 0.6), profile.to_dict(), {"seed": 1}, {"gain": 0.25}
    )
    draft, target = widths["draft_hidden"], widths["target_hidden"]

    def save(name: str, head: tuple[str, tuple[str, ...], dict[str, Array]], rule: Any, **more: Any) -> None:
        kind, names, tensors = head
        policy = LearnedPolicy(name, names, build_head(kind, names, tensors), *maps, rule, 5, facts, **more)
        save_policy(policy, folder / name)

    def scalar(kind: str) -> tuple[str, tuple[str, ...], dict[str, Array]]:
        return kind, NAMES, TENSORS[kind]()

    logistic, mlp = scalar("logistic"), scalar("mlp")
    derived = Derived([0.04, 0.06, 0.08, 0.05, 0.07])
    low = Derived([0.002, 0.003, 0.002, 0.001, 0.001])
    for kind in TENSORS:
        save(f"{kind}-derived", scalar(kind), low if kind == "resnet" else derived)
    kind, names, tensors = random_heads.RANDOM_HEADS["tokens"]
    save("tokens-derived", (kind, names, tensors), derived)
    save("mlp-survival", mlp, Threshold("survival", 0.2))
    save("mlp-step", mlp, Threshold("step", 0.35))
    save("mlp-any", mlp, Threshold("any", 0.4))
    save("logistic-first2", logistic, Derived([0.02, 0.02, 0.03, 0.05, 0.02], first=2))
    save(
        "logistic-sizes",
        logistic,
        Derived([0.02, 0.03, 0.04, 0.03, 0.03], 1, ((2, None), (8, 2)), ((1, 1.0), (4, 1.6))),
    )
    chance = np.random.default_rng(12)
    tables = np.sort(chance.random((3, 5, 2, 4), dtype=np.float32), -1)
    tables[..., 0, 0], tables[..., 0, -1] = 0.0, 1.0
    save("mlp-calibrated", mlp, Threshold("survival", 0.08), survival=SurvivalMaps(np.sort(tables, -1)))
    save("resnet-draft", random_heads.resnet((), {"draft_hidden": draft}), Threshold("survival", 0.2))
    save("resnet-both", random_heads.resnet(NAMES, {"draft_hidden": draft, "target_hidden": target}), low)
    save("specdec", random_heads.specdec(size=draft), Threshold("survival", 0.1))
    save("specdec-published", random_heads.specdec((0, 0, 0), draft), Threshold("survival", 0.1))
    save("dynasd-soft", ("dynasd-soft", (), random_heads.layers((draft, 6, 4, 1))), Threshold("any", 0.4))
    save("dynasd-hard", ("dynasd-hard", HARD_FEATURES, random_heads.layers((11, 9, 1))), Threshold("any", 0.4))
    plain = LearnedPolicy("batch", NAMES, build_head(*logistic), *maps, derived, 5, facts)
    for name, rule in {
        "batch-best": BatchRule("best"),
        "batch-all": BatchRule("all", ((1, 1.0), (4, 1.2)), 1),
        "batch-first2": BatchRule("best", (), 2),
    }.items():
        policy = for_batches(plain, rule=rule)
        policy.name = name
        save_policy(policy, folder / name)
    save_policy(make_tree_policy(), folder / "tree-gain")
    save_policy(make_tree_policy(FREE), folder / "tree-free")
    save_policy(make_tree_policy(FREE, first=0, rate=60.0), folder / "tree-root")
