"""Sections of the live loop: texts and rounds, what policies are shown, shapes of trees."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from oracle_inputs import EOS, Inputs, byte_pair
from oracle_policies import FEATURES, OWN, QUIET, Raising, Watching, WatchingTrees
from specstop.decode import (
    Generation,
    Grammar,
    Pair,
    SamplingParams,
    Settings,
    Speculator,
    decode,
    find_drafter,
    join,
    parse_tree,
    plain_texts,
    stream_key,
    with_drafter,
)
from specstop.policies import load_policy
from transformers import LogitsProcessor, StoppingCriteria

Cases = Iterator[tuple[str, Any]]

NEW = 14
COUNTS = [
    "anchor",
    "context",
    "drafted",
    "verified",
    "accepted",
    "committed",
    "decisions",
    "backlog",
    "together",
    "deepest",
]
DRAFTERS = [
    "model",
    "lookup",
    "lookup:2",
    "suffix",
    "suffix:corpus?keep=1",
    "suffix+model",
    "suffix:corpus?confidence=0.6+medusa:medusa",
    "medusa:medusa",
    "hydra:hydra",
    "ctc:ctc",
    "ctc-released:ctc",
    "layer:layer",
]
TREE = "3,2,1,1"
SAMPLED = ("match", "rejection", "rejection_replace", "block", "point", "target_init", "typical", "auto")
GREEDY = ("match", "block", "target_init", "auto")
"""At temperature 0 every mode but `target_init` is greedy matching."""


def lines(generations: list[Generation]) -> list[dict[str, Any]]:
    """Return the tokens and the rounds of texts, without seconds."""
    out = []
    for text in generations:
        rounds = [" ".join(str(getattr(r, name)) for name in COUNTS) + " cut" * r.cut for r in text.rounds]
        result: dict[str, Any] = {"tokens": list(text.tokens), "rounds": rounds}
        if text.failure is not None:
            result["failed"] = True
        out.append(result)
    return out


def answer(call: Any) -> Any:
    """Return what a call returns, or the type of the error that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return {"refused": type(error).__name__}


def run(inputs: Inputs, pair: Pair, policy: Any, drafter: str, batch: int, count: int, **options: Any) -> Any:
    """Return the lines of a few prompts, or the refusal."""
    more = {name: options.pop(name) for name in ("profile", "seed") if name in options}
    settings = Settings(**{"max_new_tokens": NEW, **options}) if "settings" not in options else options["settings"]
    prompts = inputs.prompt_ids[-count:]
    spec = inputs.drafter(drafter)
    return lines(decode(pair, prompts, policy, settings=settings, drafter=spec, batch=batch, **more))


def texts(inputs: Inputs, small: bool = False) -> Cases:
    """Texts and rounds by drafter, verification, shape, batch, temperature and policy."""
    learned = {None: inputs.policy("logistic-derived"), TREE: inputs.policy("tree-free")}
    turn = 0
    for drafter, temperature in itertools.product(DRAFTERS, (0.0, 0.8)):
        for verification, tree in itertools.product(GREEDY if temperature == 0.0 else SAMPLED, (None, TREE)):
            policies = ("fixed:3", "confidence:0.4", learned[tree])
            for batch in (1, 3, 8):
                # Each policy comes with each batch size, in turn; at one text all three.
                for policy in policies if batch == 1 and temperature else [policies[turn % 3]]:
                    turn += 1
                    if small and turn % 97:
                        continue
                    shown = policy.rpartition("/")[2]
                    name = f"{drafter} | {verification} | {tree or 'chain'} | S={batch} | T={temperature:g} | {shown}"
                    count = {1: 2, 3: 4, 8: 8}[batch]
                    options = {"temperature": temperature, "verification": verification, "tree": tree}
                    how = inputs, inputs.compact, policy, drafter, batch, count
                    yield name, answer(lambda how=how, options=options: run(*how, **options))


class AddsByLength(LogitsProcessor):
    """Adds numbers that depend on the length and the last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = torch.arange(scores.shape[-1])
        wave = torch.sin((place[None] + 1) * (input_ids[:, -1:] + input_ids.shape[1]) * 0.7)
        return scores + 2.0 * wave.to(scores.dtype)


class AfterToken(StoppingCriteria):
    """Ends a text after any of some tokens."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        return torch.tensor([int(row[-1]) in self.tokens for row in input_ids])


SHAPINGS = {
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.2),
    "repetition": SamplingParams(repetition_penalty=1.6),
    "ngram": SamplingParams(no_repeat_ngram=2),
    "min_new": SamplingParams(min_new_tokens=9),
    "typical_p": SamplingParams(typical_p=0.5),
    "bad_words": SamplingParams(bad_words_ids=[[9], [30, 31]]),
    "by length": SamplingParams(processors=(AddsByLength(),)),
    "many": SamplingParams(top_k=9, top_p=0.8, repetition_penalty=1.4, no_repeat_ngram=3, processors=(AddsByLength(),)),
}
JOINT = [
    "tetris:2",
    "adaptive-verification:4",
    "load?table=1:4,3:2,8:1",
    "smartspec:0.7",
    "batch-best",
    "batch-all",
    "batch-first2",
    "logistic-sizes",
]
TREE_RULES = ["ddd:-0.8", "eagle:5", "opt:0.4", "c2t:1", "gain:0.1", "tree-gain", "tree-root", "mlp-any"]
CHAIN_RULES = [
    "entropy:0.6",
    "maxprob:0.5",
    "product:0.2",
    "heuristic-transient:4",
    "heuristic:4",
    "adaedl:0.6",
    "online:0.4",
    "roc:0.4",
    "bandit?kind=thompson&arms=fixed:2,fixed:4,confidence:0.4",
    "bandit",
    "fixed:0",
    "mlp-survival",
    "mlp-calibrated",
    "tokens-derived",
    "xgboost-derived",
    "resnet-derived",
    "resnet-both",
    "specdec",
    "specdec-published",
    "dynasd-soft",
    "dynasd-hard",
    "resnet-draft",
    "logistic-first2",
]


def named(inputs: Inputs, policy: str) -> str:
    """Return the path of a policy folder, or the spec itself."""
    return inputs.policy(policy) if policy in inputs.policies else policy


def more_texts(inputs: Inputs, small: bool = False) -> Cases:
    """Texts under every policy, every sampling, every engine, and options that `texts` leaves alone."""
    pair = inputs.compact

    def case(
        policy: Any, count: int = 4, batch: int = 1, drafter: str = "model", own: Pair | None = None, **options: Any
    ) -> Any:
        options = {"temperature": 0.8, "verification": "match", "max_new_tokens": 20, **options}
        return answer(lambda: run(inputs, own or pair, policy, drafter, batch, count, **options))

    policies = [*CHAIN_RULES, *TREE_RULES]
    for name in policies[:2] if small else policies:
        for tree in (None, "3,2,2,1") if name in TREE_RULES or name.startswith("mlp") else (None,):
            for verification in ("match", "rejection"):
                label = f"policy {name} | {verification} | {tree or 'chain'}"
                yield label, case(named(inputs, name), tree=tree, verification=verification)
    if small:
        return
    for name, batch in itertools.product(JOINT, (1, 3, 8)):
        for verification, profile in (("match", None), ("match", "batches"), ("rejection", "batches")):
            costs = {} if profile is None else {"profile": inputs.profile(profile)}
            label = f"joint {name} | {verification} | S={batch} | profile {profile}"
            yield label, case(named(inputs, name), 8, batch, verification=verification, **costs)
    for name, cls in OWN.items():
        for tree, batch, verification in itertools.product(
            (None, "2,2,1"), (1, 3), ("match", "rejection", "target_init")
        ):
            label = f"own {name} | {verification} | {tree or 'chain'} | S={batch}"
            yield label, case(cls(), batch=batch, tree=tree, verification=verification)
        yield f"own {name} | profile", case(cls(), profile=inputs.profile(), max_depth=5)
        yield f"own {name} | hydra", case(cls(), drafter="hydra:hydra", tree="2,2,1")
    for tree in (None, "2,1"):
        yield f"raising | {tree or 'chain'}", case(Raising(), tree=tree, fallback=2)
        yield f"raising | S=3 | {tree or 'chain'}", case(Raising(), 8, 3, tree=tree, fallback=3)
    for (name, sampling), tree, temperature in itertools.product(SHAPINGS.items(), (None, "2,2,1"), (0.0, 0.8)):
        for verification in ("match", "rejection") if temperature else ("match",):
            label = f"sampling {name} | {verification} | {tree or 'chain'} | T={temperature:g}"
            options = {"temperature": temperature, "verification": verification, "tree": tree, "sampling": sampling}
            yield label, case("confidence:0.3", batch=3, **options)
    shared = {
        "float64 plain": inputs.plain,
        "eager": inputs.pair(attention="eager"),
        "float32": inputs.pair(dtype="float32"),
    }
    for (name, own), drafter, tree in itertools.product(
        shared.items(), ("model", "layer:layer", "suffix+model"), (None, TREE)
    ):
        spec = drafter if name != "float32" or ":" not in drafter else "lookup"
        yield f"pair {name} | {spec} | {tree or 'chain'}", case("fixed:3", batch=3, drafter=spec, own=own, tree=tree)
    target = inputs.pair().target
    target.generation_config.eos_token_id = None
    endless = join(target, inputs.plain.draft)
    for tree in (None, "2,2"):
        shown = tree or "chain"
        yield f"endless | {shown}", run_ids(inputs, endless, "confidence:0.3", tree)
        yield f"ignore_eos | {shown}", case("fixed:4", ignore_eos=True, max_new_tokens=40, tree=tree)
        yield f"max_depth | {shown}", case("fixed:6", max_depth=2, tree=tree)
        yield f"stops | {shown}", case("fixed:4", stops=(AfterToken((9, 21, 33, 40)),), tree=tree)
        yield f"profile | {shown}", case("fixed:4", profile=inputs.profile(), max_depth=6, tree=tree)
        for drift in ("warn", "fallback"):
            result = case(inputs.policy("mlp-survival"), drift=drift, max_new_tokens=60, ignore_eos=True, tree=tree)
            yield f"drift {drift} | {shown}", result
    for seed in (1, 2):
        yield f"seed {seed}", case("fixed:3", seed=seed)
    for tree in ("2", "8", "fork:3x3", "chain:6", "parents:-1,-1,0,0,1", "medusa-63", "ctc-released"):
        for drafter in ("model", "medusa:medusa", "ctc-released:ctc"):
            yield f"tree {tree} | {drafter}", case("fixed:6", tree=tree, drafter=drafter, count=2, max_new_tokens=10)
    for drafter in ("lookup", "medusa:medusa", "suffix+model"):
        yield f"with_drafter {drafter}", answer(lambda drafter=drafter: carried(inputs, drafter))
    for temperature in (0.0, 0.8):
        keys = [stream_key(0, p.id) for p in inputs.prompts]
        plain = plain_texts(pair, inputs.prompt_ids, keys, 20, temperature)
        yield f"plain | T={temperature:g}", plain.tokens
    yield from grammars()
    yield "streamed", streamed(inputs)
    for spec in ("nothing", "medusa", "suffix:", "model+lookup", "lookup?x=1"):
        yield f"drafter {spec}", answer(lambda spec=spec: type(find_drafter(spec, pair)).__name__)


def grammars() -> Cases:
    """Texts under grammars."""
    pair = byte_pair()
    sources = {
        "letters": 'root ::= ("ab" | "ba" "c" | "d" [0-9]+)+',
        "lark": 'start: ("x" "yz" | "w")+',
        "broken": "root ::= (",
        "schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    }
    setups = itertools.product(sources, (None, "2,2"), ("match", "rejection"), (0.0, 0.8))
    for name, tree, verification, temperature in setups:
        if temperature == 0.0 and verification != "match":
            continue
        how = sources[name], name == "schema", verification, tree, temperature
        label = f"grammar {name} | {verification} | {tree or 'chain'} | T={temperature:g}"
        yield label, answer(lambda how=how: under_grammar(pair, *how))


def under_grammar(
    pair: Pair, source: str, is_schema: bool, verification: str, tree: str | None, temperature: float
) -> Any:
    """Return the lines of texts under a grammar."""
    build = Grammar.from_json_schema if is_schema else Grammar.from_text
    sampling = SamplingParams(processors=(build(source, pair.tokenizer),))
    settings = Settings(temperature, 16, verification=verification, tree=tree, sampling=sampling)
    return lines(decode(pair, ["ab", "xyz", "{"], "confidence:0.2", settings=settings, batch=2))


def run_ids(inputs: Inputs, pair: Pair, policy: str, tree: str | None) -> Any:
    """Return the lines of texts of a pair that has no tokenizer."""
    loop = Speculator(pair, load_policy(policy), Settings(0.8, 30, verification="match", tree=tree))
    return lines([loop.generate(ids, stream_key(0, str(at))) for at, ids in enumerate(inputs.prompt_ids[:3])])


def carried(inputs: Inputs, drafter: str) -> Any:
    """Return the texts of a pair whose drafter replaces its draft model."""
    pair = with_drafter(inputs.compact, inputs.drafter(drafter))
    settings = Settings(0.8, NEW, verification="match")
    return [pair.draft is None, lines(decode(pair, inputs.prompt_ids[-3:], "fixed:3", settings=settings))]


def streamed(inputs: Inputs) -> Any:
    """Return the arguments of the callbacks during decoding: pieces of text, and which text has ended."""
    streamed: list[Any] = []
    texts = [prompt.text for prompt in inputs.prompts[3:6]]
    generations = decode(
        inputs.compact,
        texts,
        "fixed:3",
        settings=Settings(0.8, NEW, verification="match"),
        ids=["a", "b", "c"],
        batch=2,
        on_text=lambda number, text: streamed.append([number, text]),
        on_end=streamed.append,
    )
    return {"streamed": streamed, "texts": [one.text for one in generations], "eos": EOS}


def seen(inputs: Inputs, small: bool = False) -> Cases:
    """What policies are shown in the live loop: features, hidden states, parents, trees, outcomes."""
    hidden = ("draft_hidden", "target_hidden")
    setups = itertools.product(
        ("model", "lookup", "suffix+model", "medusa:medusa", "hydra:hydra", "ctc:ctc", "layer:layer"),
        ("match", "rejection", "block", "target_init", "typical"),
        (None, "3,2,1"),
        (0.0, 0.8),
    )
    for at, (drafter, verification, tree, temperature) in enumerate(setups):
        if temperature == 0.0 and verification not in ("match", "target_init"):
            continue
        if small and at % 37:
            continue
        for kind in (Watching, WatchingTrees):
            names = FEATURES if verification == "match" else QUIET
            if kind is WatchingTrees and verification != "match":
                names = tuple(n for n in names if n not in ("drawn_prob", "path_logprob", "drawn_token", "above_token"))
            states = hidden if drafter in ("model", "layer:layer") else ("target_hidden",) if at % 2 else ()
            batch = (1, 3)[at % 2]
            policy = kind(names, states)
            policy.max_depth = 5
            name = f"{drafter} | {verification} | {tree or 'chain'} | S={batch} | T={temperature:g} | {policy.name}"
            how = policy, drafter, verification, tree, temperature, batch
            yield name, answer(lambda how=how: shown(inputs, *how))


def shown(
    inputs: Inputs, policy: Any, drafter: str, verification: str, tree: str | None, temperature: float, batch: int
) -> dict[str, Any]:
    """Return what a policy has seen while a few texts were decoded, as arrays one behind the other."""
    settings = Settings(temperature, 10, verification=verification, tree=tree)
    more = {"profile": inputs.profile("batches")} if tree is None else {}
    generations = decode(
        inputs.compact, inputs.prompt_ids[-4:-1], policy, settings=settings, drafter=inputs.drafter(drafter), batch=batch,
        **more,
    )  # fmt: skip
    record = policy.seen
    steps, trees, outcomes = record.steps, record.trees, record.outcomes

    def joined(parts: list[Any], kind: Any) -> np.ndarray:
        return np.concatenate([np.asarray(part).ravel() for part in parts]).astype(kind) if parts else np.zeros(0, kind)

    return {
        "tokens": [list(one.tokens) for one in generations],
        "failed": any(one.failure is not None for one in generations),
        "depths": [f"{step.depth}:{step.alive.shape[0]}x{step.alive.shape[1]}" for step in steps],
        "alive": joined([step.alive for step in steps], np.uint8),
        "parent": joined([step.parent for step in steps], np.int32),
        "batch": joined([step.batch for step in steps], np.int32),
        "features": joined([step.features for step in steps], np.float32),
        **{name: joined([step.hidden[name] for step in steps], np.float32) for name in policy.hidden},
        "trees": [f"{tree.depth.shape[0]}x{tree.depth.shape[1]}" for tree in trees],
        **{
            f"tree {name}": joined([getattr(tree, name) for tree in trees], np.int32)
            for name in ("tokens", "parent", "depth", "drawn")
        },
        "outcomes": [
            [int(x) for name in ("active", "drafted", "verified", "accepted", "cut") for x in getattr(o, name)]
            for o in outcomes
        ],
        "seconds": joined([o.seconds for o in outcomes], np.float64),
    }


TREES = (
    *("1", "3", "8", "2,1", "2,2", "1,2", "3,2,1,1", "4,2,2,1", "fork:2x3", "fork:4x5", "chain:1", "chain:6"),
    *("parents:-1,-1,1,2", "parents:-1,-1,-1,0,0,1,3,3,4,6,9", "parents:-1,0,1,2", "medusa-63", "ctc-released"),
    *("", "0", "x", "2,0", "fork:2", "chain:0", "parents:0", "parents:-1,2", "chain:9999999", "medusa-64", "-1", "2;2"),
)


def trees(inputs: Inputs, small: bool = False) -> Cases:
    """Shapes of trees by their text."""
    for text in TREES:
        yield f"tree {text!r}", answer(lambda text=text: shape(text))
        for depth in (0, 1, 2, 4):
            yield f"tree {text!r} limited to {depth}", answer(lambda text=text, depth=depth: shape(text, depth))


def shape(text: str, depth: int | None = None) -> dict[str, Any]:
    """Return what a tree is."""
    tree = parse_tree(text) if depth is None else parse_tree(text).limited(depth)
    return {
        "name": tree.name,
        "parent": list(tree.parent),
        "depth": list(tree.depth),
        "rows": len(tree),
        "nodes": tree.nodes,
        "deepest": tree.deepest,
        "is_chain": bool(tree.is_chain),
        "width": tree.width,
    }
