"""`specstop decode`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.display import printable
from ...policies.errors import InputError
from .. import options
from ..output import PHASE_NAMES, print_json, progress_bars, results, say, table

if TYPE_CHECKING:
    from ...collect.prompts import Prompt
    from ...decode.records import Tally


def decode(
    *,
    text: Annotated[list[str] | None, typer.Argument(help="Prompts. Default: standard input, or --prompts.")] = None,
    source: options.PromptSource,
    models: options.Models,
    policy: options.Policy = "fixed:4",
    profile: options.LiveProfile = None,
    tree: options.Tree = None,
    verification: options.Verification = "auto",
    drift: options.Drift = "warn",
    batch: options.Batch = 1,
    temperature: options.Temperature = 0.0,
    sampling: options.Sampling,
    stop: options.Stop = [],  # noqa: B006
    max_new_tokens: options.MaxNewTokens = 128,
    seed: options.Seed = 0,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Generate texts with a policy. Under every lossless verification they are the target's own, whatever the policy.

    Example: specstop decode "def main():" --target T --draft D --policy policy
    """
    from ...policies.profile import Profile
    from ...policies.registry import load_policy

    # Everything is validated before torch is imported and a model is loaded.
    costs = None if profile is None else Profile.load(profile)
    rule = load_policy(policy)
    prompts = _read(text, source, models)
    from ...decode.records import Tally
    from ...decode.run import decode as run
    from ...decode.settings import Settings, stop_strings
    from ...decode.verify.modes import describe, resolve_mode

    def settings_with(**more: Any) -> Settings:
        return Settings(
            temperature, max_new_tokens, rule.max_depth, verification=verification, tree=tree, drift=drift, **more
        )

    settings_with()
    with progress_bars(quiet or json) as progress:
        paths = models.find(progress)
    pair = models.open(paths)
    structure = sampling.grammar(pair)
    settings = settings_with(sampling=sampling.params(structure), stops=stop_strings(pair, stop)).for_policy(rule)
    if not quiet:
        options.print_model_defaults(pair, settings)
    shown_prompts = {prompt.id: prompt.text for prompt in prompts}  # without the chat template
    prompts, tokens = source.encode(prompts, pair, max_new_tokens, long="refuse")
    names = [f"{prompt.id}, sample {prompt.sample}" if prompt.sample else prompt.id for prompt in prompts]
    writer = _TextWriter(names, [shown_prompts[prompt.id] for prompt in prompts])
    generations = run(
        pair, tokens, rule, settings=settings, ids=[prompt.stream_name for prompt in prompts], seed=seed, profile=costs,
        batch=batch, on_text=None if json else writer.add, on_end=None if json else writer.end,
    )  # fmt: skip
    tally = Tally(generations)
    cut = 0 if structure is None else sum(not structure.matches(one.tokens, pair.eos) for one in generations)
    if cut:
        say(f"{cut} of {len(generations)} texts end before the grammar is complete; raise --max-new-tokens")
    mode = describe(resolve_mode(verification, rule, settings.topology, temperature))
    if json:
        details: dict[str, Any] = {"verification": mode, "acceptance": tally.acceptance()}
        details |= {} if structure is None else {"incomplete": cut}
        print_json({**tally.summary(), **details, "texts": [one.text for one in generations]})
        return
    results().write("\n")
    if not quiet:
        failed = tally.failure and f"a fixed length instead of {rule.shown_name}, which FAILED ({tally.failure.text})"
        results().write("\n")
        show_tally(tally, f"{failed or rule.shown_name}; {mode}")


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


class _TextWriter:
    """Writes texts to standard output while they are decoded. Later texts wait until the earlier ones have ended.

    Args:
        names: of the prompts.
        prompts: written before their texts.
    """

    def __init__(self, names: list[str], prompts: list[str]) -> None:
        self._waiting = [
            (f"[{number} of {len(names)}: {printable(name)}]\n" if len(names) > 1 else "") + prompt
            for number, (name, prompt) in enumerate(zip(names, prompts, strict=True), 1)
        ]
        self._ended = [False] * len(names)
        self._current = 0

    def add(self, number: int, new: str) -> None:
        """Add new text of a prompt."""
        self._waiting[number] += new
        self._write()

    def end(self, number: int) -> None:
        """Mark a text as complete."""
        self._ended[number] = True
        self._write()

    def _write(self) -> None:
        while self._current < len(self._ended):
            results().write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._ended[self._current]:
                break
            self._current += 1
            results().write("\n\n" if self._current < len(self._ended) else "")
        results().flush()


def show_tally(tally: Tally, title: str) -> None:
    """Print the speed of a run, its phases, and acceptance by depth."""
    facts = tally.summary()
    rows = [
        ("tokens/s", f"{tally.tokens_per_s:.1f}"),
        ("tokens, seconds", f"{facts['tokens']}, {facts['seconds']:.2f}"),
        ("target calls", str(facts["target_calls"])),
        ("mean tokens per target call", f"{tally.block_efficiency:.2f}"),
        ("drafted, verified, wasted", f"{facts['drafted']}, {facts['verified']}, {facts['wasted']}"),
    ]
    for phase, seconds in tally.shares().items():
        share = f", {seconds / tally.seconds:.1%}" if tally.seconds else ""
        rows.append((f"time: {PHASE_NAMES.get(phase, phase)}", f"{seconds:.2f} s{share}"))
    table(title, ("what", "value"), rows)
    if depths := [(str(depth), f"{share:.3f}", str(rounds)) for depth, share, rounds in tally.acceptance()]:
        table("acceptance by depth", ("depth", "P(A >= depth)", "rounds"), depths)
