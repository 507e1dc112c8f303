"""`specstop decode`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...policies.display import printable
from ...policies.errors import InputError
from .. import options
from ..output import PHASE_NAMES, print_json, print_stderr, progress_bars, results, show_drafters, table

if TYPE_CHECKING:
    from ...collect.prompts import Prompt
    from ...decode.records import Tally


def decode(
    *,
    text: list[str] | None = None,
    source: options.PromptSource,
    models: options.Models,
    policy: str = "fixed:4",
    profile: Path | None = None,
    tree: str | None = None,
    verification: str = "auto",
    drift: str = "warn",
    batch: int = 1,
    sampling: options.Sampling,
    stop: list[str] | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Generate texts with a policy. Under lossless verification the policy does not change their distribution.

    Example: specstop decode "def main():" --target T --draft D --policy policy
    """
    from ...policies.profile import Profile
    from ...policies.registry import load_policy

    # Everything is validated before torch is imported and a model is loaded.
    costs = None if profile is None else Profile.load(profile)
    rule = load_policy(policy)
    prompts = _read(text, source, models)
    from ...decode.drafters.spec import routed_drafters
    from ...decode.records import Tally
    from ...decode.run import decode as run
    from ...decode.settings import Settings, stop_strings
    from ...decode.verify.modes import describe_mode, resolve_mode

    def settings_with(**more: Any) -> Settings:
        return Settings(
            sampling.temperature, max_new_tokens, rule.max_depth, verification=verification, tree=tree, drift=drift, **more
        )  # fmt: skip

    settings_with()
    with progress_bars(quiet or json) as progress:
        pair = models.open(progress)
    params = sampling.params(pair)
    settings = settings_with(sampling=params, stops=stop_strings(pair, stop or ())).for_policy(rule)
    if not quiet:
        options.print_model_defaults(pair, settings)
    shown = {prompt.id: prompt.text for prompt in prompts}  # without the chat template
    prompts, tokens = source.encode(prompts, pair, max_new_tokens, skip_long=False)
    headings = [f"{heading}{shown[prompt.id]}" for heading, prompt in zip(_headings(prompts), prompts, strict=True)]
    streams = batch == 1 and not json  # otherwise texts grow side by side
    write = _writer(headings)
    generations = run(
        pair, tokens, rule, settings=settings, ids=[prompt.stream_name for prompt in prompts], seed=seed, profile=costs,
        batch=batch, on_text=write if streams else None,
    )  # fmt: skip
    tally = Tally(generations)
    drafters = tally.by_drafter(routed_drafters(rule, pair.drafter))
    grammar: Any = next(iter(params.processors), None)
    cut = 0 if grammar is None else sum(not grammar.matches(one.tokens, pair.eos) for one in generations)
    if cut:
        print_stderr(f"{cut} of {len(generations)} texts end before the grammar is complete; raise --max-new-tokens")
    mode = describe_mode(resolve_mode(verification, rule, settings.topology, sampling.temperature))
    if json:
        details: dict[str, Any] = {"verification": mode, "acceptance": tally.acceptance()}
        details |= {} if grammar is None else {"incomplete": cut}
        details |= {"rounds_by_drafter": drafters} if drafters else {}
        print_json({**tally.summary(), **details, "texts": [one.text for one in generations]})
        return
    if streams:
        write(len(headings) - 1, "")  # the headings of texts without a token
    else:
        results().write("\n\n".join(f"{heading}{one.text}" for heading, one in zip(headings, generations, strict=True)))
    results().write("\n")
    if not quiet:
        failed = tally.failure and f"a fixed length instead of {rule.shown_name}, which FAILED ({tally.failure.text})"
        results().write("\n")
        show_tally(tally, f"{failed or rule.shown_name}; {mode}", drafters)


def _read(text: list[str] | None, source: options.PromptSource, models: options.Models) -> list[Prompt]:
    """Return the prompts: arguments, a file, standard input, or one of the shipped pair."""
    if text and source.prompts:
        raise InputError("expected prompts as arguments or --prompts, not both")
    if not text and not source.prompts and (piped := _standard_input()) is not None:
        text = [piped]
    models.check_names()
    if text:
        from ...collect.prompts import Prompt

        return [Prompt(str(number), prompt) for number, prompt in enumerate(text)]
    if source.prompts is None and models.target is not None:
        raise InputError("expected a prompt as an argument, --prompts FILE, or text on standard input")
    return source.read(models, "test", None if source.prompts else 1)


def _standard_input() -> str | None:
    """Return standard input as one prompt without its last newline; None if it is a terminal, closed or empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except OSError:  # closed
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: expected UTF-8 text: {error}") from None
    return text.removesuffix("\n") if text.strip() else None


def _headings(prompts: list[Prompt]) -> list[str]:
    """Return a line with number and name above each text; "" if there is only one."""
    if len(prompts) == 1:
        return [""]
    names = [f"{prompt.id}, sample {prompt.sample}" if prompt.sample else prompt.id for prompt in prompts]
    return [f"[{number} of {len(names)}: {printable(name)}]\n" for number, name in enumerate(names, 1)]


def _writer(headings: list[str]) -> Any:
    """Return a callback that writes texts while they are decoded one after the other, each below its heading."""
    started = 0

    def write(number: int, new: str) -> None:
        nonlocal started
        for at in range(started, number + 1):
            results().write(("\n\n" if at else "") + headings[at])
        started = max(started, number + 1)
        results().write(new)
        results().flush()

    return write


def show_tally(tally: Tally, title: str, drafters: Mapping[str, int]) -> None:
    """Print the speed of a run, its phases, the rounds of each drafter if there are several, and acceptance by depth."""
    figures = tally.summary()
    rows = [
        ("tokens/s", f"{tally.tokens_per_s:.1f}"),
        ("tokens, seconds", f"{figures['tokens']}, {figures['seconds']:.2f}"),
        ("target calls", str(figures["target_calls"])),
        ("mean tokens per target call", f"{tally.block_efficiency:.2f}"),
        ("drafted, verified, wasted", f"{figures['drafted']}, {figures['verified']}, {figures['wasted']}"),
    ]
    rows += [("rounds by drafter", show_drafters(drafters))] if drafters else []
    for phase, seconds in tally.shares().items():
        share = f", {seconds / tally.seconds:.1%}" if tally.seconds else ""
        rows.append((f"time: {PHASE_NAMES.get(phase, phase)}", f"{seconds:.2f} s{share}"))
    table(title, ("what", "value"), rows)
    if depths := [(str(depth), f"{share:.3f}", str(rounds)) for depth, share, rounds in tally.acceptance()]:
        table("acceptance by depth", ("depth", "P(A >= depth)", "rounds"), depths)
