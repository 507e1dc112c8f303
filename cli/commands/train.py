"""`specstop train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.errors import InputError
from ..options import Json, Out, Overwrite, ProfileFile, Quiet, Seed, config_saved
from ..output import flat, next_step, output, print_json, progress_bars, say, table
from ..training import Training

if TYPE_CHECKING:
    from ...policies.display import Progress
    from ...train.fit.trained import Trained

HEADS = "logistic,tokens,mlp,xgboost"
DIAGNOSTICS = ("accept_", "next_", "survival_", "fit_", "select_", "held_out_rounds")
"""What the names of metrics begin with that tell how a policy came about, not how good it is."""


def train(
    *,
    traces: Annotated[
        list[Path],
        typer.Option(help="Trace folder of `specstop collect`; repeatable, such as for several temperatures."),
    ],
    profile: ProfileFile,
    out: Out,
    head: Annotated[
        str,
        typer.Option(
            help="Head to fit: logistic, tokens, mlp, xgboost, ...; with --tune several, separated by commas."
        ),
    ] = "",
    rule: Annotated[
        str,
        typer.Option(
            help="derived (from costs), survival, step, any, continuation, batch, or gain for trees; default: the head's own."
        ),
    ] = "",
    threshold: Annotated[
        float | None,
        typer.Option(help="Threshold of the rules survival, step and any; default: the one that replays fastest."),
    ] = None,
    feature: Annotated[list[str], typer.Option(help="Feature that the head reads; repeatable. Default: a few.")] = [],  # noqa: B006
    hidden: Annotated[list[str], typer.Option(help="Hidden state that the head reads; repeatable.")] = [],  # noqa: B006
    mixed: Annotated[
        Path | None,
        typer.Option(help="Trace of `collect --mix` that the head is fitted on in the place of the others."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--for", help="vllm: a policy that reads only what that engine hands to a drafter."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the policy; default: the head's.")] = None,
    param: Annotated[list[str], typer.Option(help="Hyper-parameter of the head as key=value; repeatable.")] = [],  # noqa: B006
    folds: Annotated[
        int | None,
        typer.Option(
            help="Parts that the training prompts are split into; the saved head is fitted on all but the first.",
            show_default="4",
        ),
    ] = None,
    report_share: Annotated[
        float,
        typer.Option(
            help="Share of the prompts that is kept out of fitting and selection, for the held-out figures; 0 = none, if "
            "other traces are evaluated."
        ),
    ] = 0.2,
    passes: Annotated[
        int | None,
        typer.Option(
            help="How often heads are fitted; from the second time on, on the rounds that their own policy visits.",
            show_default="the head's",
        ),
    ] = None,
    cross_fit: Annotated[
        bool,
        typer.Option(help="Select on all training prompts, by a head for each part; else on the first part alone."),
    ] = True,
    nodes: Annotated[
        str,
        typer.Option(help="With --rule gain: sizes of smaller trees to try, such as 63,24,8; the fastest one is kept."),
    ] = "",
    tune: Annotated[
        int | None, typer.Option(help="Try that many heads, hyper-parameters and rules by replay, and train the best.")
    ] = None,
    policy: Annotated[
        list[str],
        typer.Option(help="With --tune: a policy to try too; ranges as name?x=0.1..0.9 or x=1|2|4; repeatable."),
    ] = [],  # noqa: B006
    tune_folds: Annotated[int, typer.Option(help="Parts of the prompts that --tune leaves out in turn.")] = 3,
    training: Training,
    device: Annotated[str, typer.Option(help="Where XGBoost trains: cpu or cuda.")] = "cpu",
    out_of_core: Annotated[
        bool | None, typer.Option(help="XGBoost reads its rows in pieces from disk; default: where they are many.")
    ] = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Also print how well the head tells tokens apart, and how it is calibrated."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a stop head on traces and save it as a policy folder.

    Example: specstop train --traces traces --profile profile.json --out policy
    """
    from ...policies.profile import Profile

    costs = Profile.load(profile)  # report an invalid profile before torch is imported
    fit = training.fit_options(device=device, out_of_core=out_of_core, params=_params(param))
    if tune is None and policy:
        raise InputError("--policy: policies are compared with --tune N; to compare two as they are, use `evaluate`")
    from ...train.replay.traces.checking import load_traces

    common: dict[str, Any] = {
        "out": out, "features": feature or None, "name": name, "seed": seed, "fit": fit, "overwrite": overwrite,
        "report_share": report_share,
    }  # fmt: skip
    with progress_bars(quiet or json) as progress, config_saved(out):
        opened = [load_traces(path) for path in traces]
        if tune is not None:
            single = [threshold, *hidden, mixed, host, nodes or None, passes, folds]
            if any(value is not None for value in single) or not cross_fit:
                raise InputError(
                    "--tune: leave out --threshold, --hidden, --mixed, --for, --nodes, --passes, --folds (--tune-folds) and "
                    "--no-cross-fit; it finds thresholds by itself"
                )
            trained = _tuned(opened, costs, (tune, head, rule, policy, tune_folds), common, progress)
        else:
            from ...train.fit.run import train as run

            common |= {} if folds is None else {"folds": folds}
            trained = run(
                opened, costs, head=head or "logistic", rule=rule or None, threshold=threshold, hidden=hidden or None,
                passes=passes, cross_fit=cross_fit, mixed=load_traces(mixed) if mixed else None,
                host=host, nodes=_whole_numbers(nodes), progress=progress, **common,
            )  # fmt: skip
    if json:
        print_json(trained.metrics)
    else:
        show_trained(trained, out, verbose)
        next_step("evaluate", "--traces", "HELD_OUT", "--train-traces", traces[0], "--profile", profile, "--policy", out,
                  "--out", "report")  # fmt: skip


def _tuned(
    traces: Sequence[Any], costs: Any, asked: tuple[int, str, str, list[str], int], common: dict[str, Any],
    progress: Progress,
) -> Trained:  # fmt: skip
    from ...train.fit.tuning.search import RULE_CHOICES, SearchOptions, train_best
    from ...train.fit.tuning.trials import spec_of

    trials, heads, rules, specs, folds = asked
    options = SearchOptions(
        trials, tuple((heads or HEADS).split(",")), tuple(rules.split(",")) if rules else RULE_CHOICES, tuple(specs), folds
    )  # fmt: skip
    trained, found = train_best(traces, costs, options, progress=progress, **common)
    if not found.best.rule:
        say(f"the fastest of all trials is the policy {spec_of(found.best)}; the best head is saved")
    return trained


def show_trained(trained: Trained, out: Path, verbose: bool = False) -> None:
    """Print what was trained: how fast it replays, the trials of a search; `verbose`: how well it is calibrated as well."""
    metrics = trained.metrics
    plain = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    figures = plain if verbose else {name: value for name, value in plain.items() if not name.startswith(DIAGNOSTICS)}
    table(f"{out}: {trained.policy.name}", ("what", "value"), flat(figures))
    for key, title in (
        ("reliability", "Survival by depth, on report prompts"),
        ("trials", "Trials, replayed on prompts left out, the best first"),
    ):
        rows = metrics.get(key)
        if rows and (verbose or key != "reliability"):
            names = list(rows[0])
            shown = [name for name in names if any(row.get(name) is not None for row in rows)]
            table(
                title,
                [name.replace("_", " ") for name in shown],
                [[_cell(row.get(n)) for n in shown] for row in rows],
                wide=True,
            )
    ratio = metrics.get("held_out_ratio_to_best_fixed", 1.0)
    if ratio < 1.0:
        say(f"slower than the best fixed length: {ratio:.3f} of it on held-out prompts; see what `specstop evaluate` says "
            "before you use it, and try another --head or more prompts")  # fmt: skip
    more = "these tables" if verbose else "these tables, and how it is calibrated (--verbose)"
    output().print(f"the policy is in {out}; its README.md has {more}")


def _whole_numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas between."""
    try:
        return [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise InputError(f"--nodes: expected numbers such as 63,24,8, not {text!r}") from None


def _cell(value: Any) -> str:
    return "all" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _params(texts: Sequence[str]) -> dict[str, Any]:
    """Return hyper-parameters from key=value: whole numbers, numbers, or words."""
    params: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"--param: expected key=value, not {text!r}")
        for kind in (int, float, str):
            try:
                params[key] = kind(value)
                break
            except ValueError:
                continue
    return params
