"""`specstop profile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...policies.errors import InputError, PolicyError
from ...policies.files import uninterrupted
from .. import options
from ..output import flat, next_step, progress_bars, say, table
from .info import describe_profile

if TYPE_CHECKING:
    from ...decode.models.pair import Pair
    from ...policies.contract import StopPolicy
    from ...policies.measurements import Measurements
    from ...policies.profile import Profile

PROMPT_LIMIT, NEW_TOKENS = 32, 96
"""Number of prompts, and new tokens of the texts in which decisions are timed."""


def profile(
    *,
    out: options.ProfileOut = None,
    source: options.PromptSource,
    models: options.Models,
    policy: options.Policies = [],  # noqa: B006
    profile: options.BaseProfile = None,
    depth: options.Depth = 10,
    tree: options.Tree = None,
    verification: options.Verification = "auto",
    batch: options.Batches = None,
    through: options.Through = None,
    temperature: options.Temperature = 0.0,
    sampling: options.Sampling,
    budget: options.Budget = 90.0,
    repeats: options.Repeats = None,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the costs of draft steps, verifications and decisions on this machine, through the decoding loop.

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
    if out is None and profile is None:
        raise InputError("--out: expected a JSON file for the profile")
    if profile is not None and not policy:
        raise InputError("--profile: expected --policy with it, whose decisions are added to the profile")
    existing = None if profile is None else Profile.load(profile)
    rules = [load_policy(spec).limited(depth if existing is None else existing.max_depth) for spec in policy]
    path = profile if out is None else prepare_output_file(out, MARK, overwrite=overwrite)
    assert path is not None
    saved = path.with_name(path.name + ".run.yaml")
    if existing is None:
        prepare_output_file(saved, b"command: profile", overwrite=True)
    prompts = source.read(models, "train", PROMPT_LIMIT)
    with progress_bars(quiet) as progress:
        paths = models.find(progress)
        pair = models.open(paths)
        if existing is not None:
            tokens = source.encode(prompts, pair, 1)[1]
            _add_decisions(existing, pair, paths, rules, tokens).save(path)
        else:
            from ...collect.run import environment_facts
            from ...decode.profile import measure_profile
            from ...decode.profile.measuring import Effort
            from ...decode.settings import Settings

            settings = Settings(temperature, sampling=sampling.params())
            if not quiet:
                options.print_model_defaults(pair, settings)
            if through and (defaults := settings.for_pair(pair).sampling.to_dict()):
                raise InputError(
                    f"--through vllm: expected no sampling defaults of the target, not {', '.join(defaults)}; give "
                    "--sampling model_defaults=false"
                )
            ids = source.encode(prompts, pair, 1)[1]
            shared: dict[str, Any] = {
                "depth": depth, "temperature": temperature, "batch": sizes, "policies": rules,
                "effort": Effort(budget, repetitions=repeats), "facts": environment_facts(pair), "progress": progress,
            }  # fmt: skip
            if through:
                from ...collect.engines.vllm_profile import measure_vllm

                measured = measure_vllm(paths.target, pair.draft_name, ids, **_engine_options(pair), **shared)
            else:
                measured = measure_profile(
                    pair, ids, tree=tree, sampling=settings.sampling, verification=verification, **shared
                )
            with uninterrupted:  # both files are written, or neither
                measured.save(path)
                options.save_config(saved)
            if measured.noise is not None and measured.noise.is_noisy:
                say(f"warning: {measured.noise.text}")
    described = describe_profile(path)
    table(str(path), ("what", "value"), flat(described))
    if existing is None:
        host = ("--for", through) if through else ()
        rule = ("--rule", "gain") if tree else ()
        next_step("train", "--traces", "TRACES", "--profile", path, *host, *rule, "--out", "policy")


def _add_decisions(
    costs: Profile, pair: Pair, paths: options.ModelPaths, rules: Sequence[StopPolicy], tokens: Sequence[list[int]]
) -> Profile:
    """Return a profile with the decisions of policies timed on this machine."""
    from ...decode.verify.conditions import warn_other_profile

    warn_other_profile(costs, "this pair plays", drafter=pair.drafter)
    timed = _time_decisions(costs, pair, paths, rules, tokens)
    untimed = {rule.name for rule in rules if not any(key.of == rule.cost_name for key in timed.series)}
    message = f"--policy: {', '.join(sorted(untimed))} decided nothing in these texts, so no costs are added"
    if len(untimed) == len({rule.name for rule in rules}):
        raise InputError(message)
    if untimed:
        say(f"warning: {message}")
    return costs.with_measured_decisions(timed)


def _time_decisions(
    costs: Profile, pair: Pair, paths: options.ModelPaths, rules: Sequence[StopPolicy], tokens: Sequence[list[int]]
) -> Measurements:
    """Return the times of decisions where the profile was measured: inside vLLM, or in the decoding loop."""
    if str(costs.facts.get("engine", "")).startswith("vllm "):
        from ...collect.engines.vllm_profile import measure_vllm_decisions
        from ...decode.profile.decisions import largest_batch

        return measure_vllm_decisions(
            paths.target, pair.draft_name, tokens, rules, depth=costs.max_depth, temperature=costs.temperature,
            most=largest_batch(costs), **_engine_options(pair),
        )  # fmt: skip
    from ...decode.profile import loop_decisions
    from ...decode.settings import Settings
    from ...decode.topology import chain
    from ...decode.verify.modes import check_mode, find_mode
    from ...decode.verify.sampling import SamplingParams

    verification = costs.verification or "auto"
    try:
        for rule in rules if costs.verification else ():
            check_mode(find_mode(verification, costs.temperature), rule, chain(costs.max_depth))
    except PolicyError:  # a policy does not support the mode of the profile
        verification = "auto"
    settings = Settings(
        costs.temperature, NEW_TOKENS, costs.max_depth, ignore_eos=True, verification=verification,
        sampling=SamplingParams.from_dict(costs.sampling),
    )  # fmt: skip
    return loop_decisions(pair, rules, tokens, settings, costs)


def _engine_options(pair: Pair) -> dict[str, Any]:
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return {"drafter": pair.drafter, "readable": pair.readable, "dtype": dtype}
