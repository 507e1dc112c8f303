"""`specstop profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.errors import InputError, PolicyError
from ...policies.files import uninterrupted
from ..common import batch_sizes, find_prompts, fitting, flat, say_defaults
from ..console.output import next_step, print_json, progress_bars, table
from ..console.streams import say
from ..options.config import given_config, save_config
from ..options.models import Found, Models
from ..options.prompts import Chat, Long
from ..options.sampling import Filters
from ..options.shared import TREES, Depth, Json, Overwrite, Policies, Prompts, Quiet, Temperature, Verification

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...decode.models.pair import Pair
    from ...policies.contract import StopPolicy
    from ...policies.measurements import Measurements
    from ...policies.profile import Profile

NEW_TOKENS = 96
"""Of each text that decisions are timed on."""


def profile(
    *,
    out: Annotated[Path | None, typer.Option(help="JSON file that the profile is written to.")] = None,
    prompts: Prompts = None,
    chat: Chat = False,
    long: Long = "skip",
    models: Models,
    policy: Policies = [],  # noqa: B006
    add_policy: Annotated[
        list[str],
        typer.Option(
            help="Time this policy's decisions, in the loop or, where --profile is of vLLM, inside it, and add them to it; "
            "repeatable."
        ),
    ] = [],  # noqa: B006
    profile: Annotated[
        Path | None, typer.Option(help="With --add-policy: the profile, replaced unless --out is given.")
    ] = None,
    depth: Depth = 10,
    temperature: Temperature = 0.0,
    filters: Filters,
    verification: Verification = "auto",
    tree: Annotated[str | None, typer.Option(help=f"Measure rounds of a tree as well: {TREES}.")] = None,
    batch: Annotated[
        str | None, typer.Option(help="Measure rounds of so many texts side by side as well: 1,2,4,8.")
    ] = None,
    through: Annotated[
        str | None, typer.Option(help="vllm: measure rounds inside vLLM, which decodes the prompts (docs/vllm.md).")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds at most; a quiet machine needs a fraction of them.")] = 90.0,
    repeats: Annotated[
        int | None, typer.Option(help="Repetitions, however noisy; by default as many as noise and --budget say.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what draft steps, verifications and decisions cost on this machine, through the decoding loop."""
    from ...collect.facts import facts
    from ...decode.drafters.spec import parse_spec
    from ...decode.profile import measure_profile
    from ...decode.profile.measuring import Effort
    from ...decode.settings import Settings
    from ...policies.files import check_separate, prepare_output_file
    from ...policies.profile import MARK
    from ...policies.registry import load_policy

    if add_policy:
        _add_policies(profile, add_policy, out, prompts, models, chat, long, overwrite, json, quiet)
        return
    if out is None:
        raise InputError("--out: expected a JSON file for the profile to go to")
    sizes, shaping = batch_sizes(batch), filters.shaping()
    if through is not None and through != "vllm":
        raise InputError(f"--through: expected vllm, not {through!r}")
    if through is not None and (tree or shaping.to_dict() or verification != "auto"):
        raise InputError(
            "--through vllm: expected chains; leave out --tree, --verification, and options that change what is sampled from"
        )
    prepare_output_file(out, MARK, overwrite=overwrite)
    saved = prepare_output_file(out.with_name(out.name + ".run.yaml"), b"command: profile", overwrite=True)
    check_separate(saved, [given_config(saved)])
    with progress_bars(quiet or json) as progress:
        found = models.find(progress)
        rules = [load_policy(spec).limited(depth) for spec in policy]
        chosen = find_prompts(prompts, found.demo, "train", 32)
        pair = models.open(found)
        settings = Settings(temperature, shaping=shaping)
        if not quiet:
            say_defaults(pair, settings)
        if through is not None and (sets := settings.for_pair(pair).shaping.to_dict()):
            raise InputError(
                f"--through vllm: expected no sampling defaults of the target, not {', '.join(sets)}; give "
                "--no-model-defaults"
            )
        ids = fitting(chosen, pair, 1, chat, long)[1]
        shared: dict[str, Any] = {
            "depth": depth,
            "temperature": temperature,
            "batch": sizes,
            "policies": rules,
            "effort": Effort(budget, repetitions=repeats),
            "facts": facts(pair),
            "progress": progress,
        }
        if through is not None:
            from ...collect.engines.vllm_profile import measure_vllm

            measured = measure_vllm(found.target, pair.draft_name, ids, **_of_pair(pair), **shared)
        else:
            measured = measure_profile(pair, ids, tree=tree, shaping=shaping, verification=verification, **shared)
    with uninterrupted:  # a signal leaves both files or neither
        measured.save(out)
        save_config(saved.parent, saved.name)
    if measured.noise is not None and measured.noise.is_noisy:
        say(f"warning: {measured.noise.text}")
    if len(parse_spec(pair.drafter)) > 1:
        say(
            f"warning: {pair.drafter}: a draft step has one price here, whichever drafts, nearest to that of the one that "
            "drafts most on these prompts; `specstop combine` prices each by a profile of its own"
        )
    _show(out, json)
    if not json:
        where = ("--for", through) if through else ()
        rule = ("--rule", "gain") if tree else ()
        next_step("train", "--traces", "TRACES", "--profile", out, *where, *rule, "--out", "policy")


def _add_policies(
    known: Path | None,
    specs: list[str],
    out: Path | None,
    prompts: Path | None,
    models: Models,
    chat: bool,
    long: str,
    overwrite: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Time policies' decisions in the loop and add them to a profile; the rest of it stays as it was measured."""
    from ...decode.verify.conditions import warn_other_profile
    from ...policies.files import prepare_output_file
    from ...policies.profile import MARK, Profile
    from ...policies.registry import load_policy

    if known is None:
        raise InputError("--add-policy: expected the profile to add to; give it with --profile")
    costs = Profile.load(known)
    place = known if out is None else prepare_output_file(out, MARK, overwrite=overwrite)
    try:
        rules = [load_policy(spec).limited(costs.max_depth) for spec in specs]
    except PolicyError as error:
        raise PolicyError(error.command_line.replace("--policy", "--add-policy", 1)) from None
    with progress_bars(quiet or json) as progress:
        found = models.find(progress)
        pair = models.open(found)
        warn_other_profile(costs, "this pair plays", drafter=pair.drafter)
        tokens = fitting(find_prompts(prompts, found.demo, "train", 32), pair, 1, chat, long)[1]
        timed = _decisions(costs, pair, found, rules, tokens)
    silent = {rule.name for rule in rules if not any(key.of == rule.cost_name for key in timed.series)}
    told = f"--add-policy: {', '.join(sorted(silent))} decided nothing in these texts, so there is no price to add"
    if len(silent) == len({rule.name for rule in rules}):
        raise InputError(told)
    if silent:
        say(f"warning: {told}")
    costs.with_measured_decisions(timed).save(place)
    _show(place, json)


def _decisions(
    costs: Profile, pair: Pair, found: Found, rules: Sequence[StopPolicy], tokens: Sequence[list[int]]
) -> Measurements:
    """Return the timings of decisions where the profile was measured: inside vLLM, or in the loop."""
    if str(costs.facts.get("engine", "")).startswith("vllm "):
        from ...collect.engines.vllm_profile import measure_vllm_decisions
        from ...decode.profile.decisions import largest_batch

        return measure_vllm_decisions(
            found.target,
            pair.draft_name,
            tokens,
            rules,
            depth=costs.max_depth,
            temperature=costs.temperature,
            most=largest_batch(costs),
            **_of_pair(pair),
        )
    from ...decode.profile import loop_decisions
    from ...decode.settings import Settings
    from ...decode.verify.sampling import SamplingParams

    shaping, mode = SamplingParams.from_dict(costs.shaping), _verification(costs, rules)
    settings = Settings(
        costs.temperature, NEW_TOKENS, costs.max_depth, ignore_eos=True, shaping=shaping, verification=mode
    )
    return loop_decisions(pair, rules, tokens, settings, costs)


def _verification(costs: Profile, rules: Sequence[StopPolicy]) -> str:
    """Return the mode that the profile was measured under; `auto` where it is not told, or refuses one of the policies."""
    from ...decode.topology import chain
    from ...decode.verify.modes import check_mode, find_mode

    if not costs.verification:
        return "auto"
    try:
        for rule in rules:
            check_mode(find_mode(costs.verification, costs.temperature), rule, chain(costs.max_depth))
    except PolicyError:
        return "auto"
    return costs.verification


def _of_pair(pair: Pair) -> dict[str, Any]:
    """Return what vLLM is told of a pair beside its names."""
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return {"drafter": pair.drafter, "readable": pair.readable, "dtype": dtype}


def _show(path: Path, json: bool) -> None:
    from .info import _profile

    described = _profile(path)
    if json:
        print_json(described)
    else:
        table(str(path), ("what", "value"), flat(described))
