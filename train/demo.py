"""`demo`: the whole pipeline on the embedded pair: collect, profile, train, evaluate, decode live."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..collect.prompts import encode, read_prompts
from ..collect.run import collect, facts, reading_room
from ..decode.pair import load_pair
from ..decode.profile import add_decisions, measure_profile
from ..decode.settings import Settings
from ..policies.baselines import FixedLength
from ..policies.contract import StopPolicy
from ..policies.files import claim_folder
from ..policies.folder import load_policy_folder
from ..policies.progress import Progress, silent
from .data import trace_arrays
from .evaluate import evaluate
from .live import LiveLine, compare_live, run_alternating
from .pair import demo_pair
from .records import Report
from .run import HEAD_KINDS, train
from .tune import best_of, fixed_grid

PROFILE_PROMPTS = 16


@dataclass(frozen=True)
class Sizes:
    """How much the demo does: prompts to train on, to evaluate, to decode live; tokens of each text; depth K."""

    train: int = 192
    test: int = 80
    live: int = 20
    tokens: int = 128
    depth: int = 10


@dataclass(frozen=True)
class Demo:
    """What the demo leaves: its folder, the report of the replay, the live comparison, and the pair's folder."""

    folder: Path
    report: Report
    live: list[LiveLine]
    pair: Path


def demo(
    out: str | Path,
    *,
    pair: str | Path | None = None,
    temperature: float = 0.0,
    sizes: Sizes | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Demo:
    """Run the whole pipeline and leave traces, profile, policies, report and plot in `out`.

    Args:
        out: a folder that is empty or not there.
        pair: folder of a pair made by `make_pair`; by default the embedded one, built when it is first needed.
        temperature: 0 = greedy.
        sizes: how much of everything.
        seed: of noise, splits and fits.
        overwrite: replace what is in `out`.
        progress: see `Progress`.
    """
    sizes = sizes or Sizes()
    folder = claim_folder(Path(out), overwrite=overwrite)
    where = Path(pair) if pair is not None else demo_pair(progress=progress)
    models = load_pair(where / "target", where / "draft")
    prompts = {
        side: read_prompts(where / f"prompts-{side}.jsonl", count)
        for side, count in (("train", sizes.train), ("test", sizes.test))
    }
    traces = {
        side: collect(
            models,
            chosen,
            folder / f"traces-{side}",
            target=str(where / "target"),
            draft=str(where / "draft"),
            depth=sizes.depth,
            temperature=temperature,
            max_new_tokens=sizes.tokens,
            seed=seed,
            progress=_named(progress, side),
        )
        for side, chosen in prompts.items()
    }
    profile = measure_profile(
        models,
        encode(prompts["train"][:PROFILE_PROMPTS], models.tokenizer, reading_room(models, 1)),
        depth=sizes.depth,
        temperature=temperature,
        facts=facts(models),
        progress=progress,
    )
    profile.save(folder / "profile.json")
    learned: list[StopPolicy] = []
    for kind in HEAD_KINDS:
        path = folder / "policies" / kind
        train(traces["train"], profile, head=kind, out=path, seed=seed, progress=progress)
        learned.append(load_policy_folder(path))
    profile = add_decisions(profile, learned, models.vocabulary)
    report = evaluate(
        traces["test"],
        profile,
        learned,
        train_traces=traces["train"],
        out=folder / "report",
        seed=seed,
        progress=progress,
    )
    arrays = trace_arrays(traces["test"])
    chosen = list(range(min(sizes.live, arrays.sequences)))
    best = best_of(fixed_grid(trace_arrays(traces["train"]), profile)).name
    policies: list[StopPolicy] = [FixedLength(0), FixedLength(int(best.split(":")[1])), *learned]
    ids = encode(prompts["test"], models.tokenizer, reading_room(models, sizes.tokens))
    named = {p.id: tokens for p, tokens in zip(prompts["test"], ids, strict=True)}
    subset = arrays.subset(chosen)
    generations = run_alternating(
        models,
        [(name, named[name]) for name in subset.prompt_ids],
        policies,
        Settings(temperature, sizes.tokens, sizes.depth),
        profile=profile,
        seed=seed,
        progress=progress,
    )
    return Demo(folder, report, compare_live(generations, policies, subset, profile), where)


def _named(progress: Progress, side: str) -> Progress:
    def advance(task: str, done: int, total: int) -> None:
        progress(f"{task} {side}", done, total)

    return advance
