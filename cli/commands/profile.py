"""`specstop profile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...policies.errors import InputError
from .. import options
from ..output import next_step, print_stderr, progress_bars
from .info import show_artefact

if TYPE_CHECKING:
    from ...decode.models.pair import Pair
    from ...decode.settings import Settings
    from ...policies.contract import StopPolicy
    from ...policies.measurements import Measurements
    from ...policies.profile import Profile

PROMPT_LIMIT = 32


def profile(
    *,
    out: Path | None = None,
    source: options.PromptSource,
    models: options.Models,
    policy: list[str] | None = None,
    profile: Path | None = None,
    table: Path | None = None,
    depth: int = 10,
    tree: str | None = None,
    verification: str = "auto",
    batch: str | None = None,
    through: str | None = None,
    sampling: options.Sampling,
    budget: float = 90.0,
    repeats: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """Measure the costs of draft steps, verifications and decisions on this machine, through the decoding loop.

    With --from, take them from a table of measured calls.

    Example: specstop profile --target T --draft D --prompts train.jsonl --out profile.json
    """
    from ...policies.files import prepare_output_file
    from ...policies.profile import MARK, Profile
    from ...policies.registry import load_policy

    # Everything is validated before torch is imported and a model is loaded.
    sizes = options.batch_sizes(batch)
    if through not in (None, "vllm"):
        raise InputError(f"--through: expected vllm, not {through!r}")
    if through and (tree or sampling.values() or verification != "auto"):
        raise InputError("--through vllm: expected chains; leave out --tree, --verification and --sampling")
    path = out or profile
    if path is None:
        raise InputError("--out: expected a JSON file for the profile")
    if table is not None:
        of_models = {"target": models.target, "draft": models.draft, "prompts": source.prompts, "policy": policy,
                     "profile": profile, "tree": tree, "through": through}  # fmt: skip
        _profile_table(table, path, depth, sizes, sampling.temperature, overwrite, of_models)
        return
    if profile is not None and not policy:
        raise InputError("--profile: expected --policy with it; its decisions are added to the profile")
    existing = None if profile is None else Profile.load(profile)
    rules = [load_policy(spec).limited(depth if existing is None else existing.max_depth) for spec in policy or ()]
    if out is not None:
        prepare_output_file(out, MARK, overwrite=overwrite)
    prompts = source.read(models, "train", PROMPT_LIMIT)
    with progress_bars(quiet) as progress:
        pair = models.open(progress)
        tokens = source.encode(prompts, pair, 1)[1]
        if existing is not None:
            measured = _add_decisions(existing, pair, models.names[0], rules, tokens)
        else:
            from ...collect.run import environment_facts
            from ...decode.profile import measure_profile
            from ...decode.profile.measuring import Effort
            from ...decode.settings import Settings

            settings = Settings(sampling.temperature, sampling=sampling.params())
            if not quiet:
                options.print_model_defaults(pair, settings)
            shared: dict[str, Any] = {
                "depth": depth, "temperature": sampling.temperature, "batch": sizes, "policies": rules,
                "effort": Effort(budget, repetitions=repeats), "facts": environment_facts(pair), "progress": progress,
            }  # fmt: skip
            if through:
                measured = _measure_vllm(models.names[0], pair, settings, tokens, shared)
            else:
                measured = measure_profile(
                    pair, tokens, tree=tree, sampling=settings.sampling, verification=verification, **shared
                )
            noises = [one.noise for one in (measured, *measured.others) if one.noise is not None]
            if noise := next((one for one in noises if one.is_noisy), None):
                print_stderr(f"warning: {noise.text}")
        measured.save(path)
    show_artefact(path)
    if existing is None:
        host = ("--for", through) if through else ()
        rule = ("--rule", "gain") if tree else ()
        next_step("train", "--traces", "TRACES", "--profile", path, *host, *rule, "--out", "policy")


def _profile_table(
    table: Path, path: Path, depth: int, sizes: Sequence[int], temperature: float, overwrite: bool,
    of_models: Mapping[str, object],
) -> None:  # fmt: skip
    """Write the profile of a table of measured calls. Raises `InputError` if an option of `of_models` has a value."""
    from ...policies.files import prepare_output_file
    from ...policies.profile import MARK
    from ...policies.profile_table import profile_from_table

    if name := next((name for name, value in of_models.items() if value), None):
        raise InputError(f"--{name}: expected no value with --from, a table of measured calls; leave out one of both")
    priced = profile_from_table(table, depth=depth, batch=sizes, temperature=temperature)
    prepare_output_file(path, MARK, overwrite=overwrite)
    priced.save(path)
    show_artefact(path)


def _measure_vllm(
    target: str, pair: Pair, settings: Settings, tokens: Sequence[list[int]], options: dict[str, Any]
) -> Profile:
    """Return the costs of rounds inside vLLM, which does not apply sampling defaults of the target."""
    from ...collect.engines.vllm_profile import measure_vllm

    if defaults := settings.for_pair(pair).sampling.to_dict():
        raise InputError(
            f"--through vllm: expected no sampling defaults of the target, not {', '.join(defaults)}; give "
            "--sampling model_defaults=false"
        )
    return measure_vllm(target, pair.draft_name, tokens, **_engine_options(pair), **options)


def _add_decisions(
    costs: Profile, pair: Pair, target: str, rules: Sequence[StopPolicy], tokens: Sequence[list[int]]
) -> Profile:
    """Return a profile with the decisions of policies timed on this machine."""
    from ...decode.verify.conditions import warn_other_profile

    warn_other_profile(costs, "this pair plays", drafter=pair.drafter)
    timed = _time_decisions(costs, pair, target, rules, tokens)
    priced = {key.of for key in timed.series}
    untimed = sorted({rule.name for rule in rules if rule.cost_name not in priced})
    message = f"--policy: {', '.join(untimed)} decided nothing in these texts, so no costs are added"
    if len(untimed) == len({rule.name for rule in rules}):
        raise InputError(message)
    if untimed:
        print_stderr(f"warning: {message}")
    return costs.with_measured_decisions(timed)


def _time_decisions(
    costs: Profile, pair: Pair, target: str, rules: Sequence[StopPolicy], tokens: Sequence[list[int]]
) -> Measurements:
    """Return the times of decisions where the profile was measured: inside vLLM, or in the decoding loop."""
    if str(costs.facts.get("engine", "")).startswith("vllm "):
        from ...collect.engines.vllm_profile import measure_vllm_decisions
        from ...decode.profile.decisions import largest_batch

        return measure_vllm_decisions(
            target, pair.draft_name, tokens, rules, depth=costs.max_depth, temperature=costs.temperature,
            most=largest_batch(costs), **_engine_options(pair),
        )  # fmt: skip
    from ...decode.profile import loop_decisions
    from ...decode.profile.decisions import settings_of_profile

    return loop_decisions(pair, rules, tokens, settings_of_profile(costs, rules), costs)


def _engine_options(pair: Pair) -> dict[str, Any]:
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return {"drafter": pair.drafter, "readable": pair.readable, "dtype": dtype}
