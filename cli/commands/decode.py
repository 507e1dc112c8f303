"""`specstop decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.display import printable
from ...policies.errors import InputError
from ..common import PHASES, find_prompts, fitting, percent, piped_prompt, say_defaults
from ..console.output import print_json, progress_bars, table
from ..console.streams import results, say
from ..options.models import Models
from ..options.prompts import Chat, Long
from ..options.sampling import Filters, Structure
from ..options.shared import (
    Batch,
    Json,
    Limit,
    LiveProfile,
    MaxNewTokens,
    MostDrafted,
    Prompts,
    Seed,
    Temperature,
    Tree,
    Verification,
)

if TYPE_CHECKING:
    from ...decode.records import Tally


def decode(
    *,
    text: Annotated[list[str] | None, typer.Argument(help="Prompts; default: standard input, or --prompts.")] = None,
    prompts: Prompts = None,
    chat: Chat = False,
    long: Long = "refuse",
    models: Models,
    policy: Annotated[
        str, typer.Option(help="fixed:4, confidence:0.4, a policy folder, or plugin?key=value.")
    ] = "fixed:4",
    profile: LiveProfile = None,
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 128,
    depth: MostDrafted = None,
    verification: Verification = "auto",
    tree: Tree = None,
    filters: Filters,
    structure: Structure,
    stop: Annotated[list[str], typer.Option(help="End the text after this string; repeatable.")] = [],  # noqa: B006
    drift: Annotated[
        str,
        typer.Option(
            help="warn once a learned policy's live acceptance leaves the band its calibration predicts; fallback: draft the "
            "best fixed length then; off."
        ),
    ] = "warn",
    batch: Batch = 1,
    seed: Seed = 0,
    limit: Limit = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write the texts alone: no progress, no tables.")] = False,
) -> None:
    """Generate with a policy. Under every lossless verification the text is the target's own, whatever the policy."""
    from ...policies.profile import Profile

    costs = None if profile is None else Profile.load(profile)  # report an invalid profile before torch is imported
    from ...collect.prompts.read import Prompt
    from ...decode.records import Tally
    from ...decode.run import decode as run
    from ...decode.settings import Settings, stop_strings
    from ...decode.verify.modes import describe, resolve_mode
    from ...policies.registry import load_policy

    if text and prompts:
        raise InputError("expected prompts as arguments or --prompts, not both")
    rule = load_policy(policy)
    with progress_bars(quiet or json) as progress:
        found = models.find(progress)
    piped = None if text or prompts else piped_prompt()
    if text or piped is not None:
        chosen = [Prompt(str(i), t) for i, t in enumerate(text or [str(piped)])]
    elif prompts is None and found.demo is None:
        raise InputError("expected a prompt as an argument, --prompts FILE, or text on standard input")
    else:
        chosen = find_prompts(prompts, found.demo, "test", limit or (None if prompts else 1))
    pair = models.open(found)
    grammar = structure.read(pair)
    settings = Settings(
        temperature,
        max_new_tokens,
        rule.max_depth if depth is None else depth,
        verification=verification,
        tree=tree,
        shaping=filters.shaping(grammar),
        stops=stop_strings(pair, stop),
        drift=drift,
    ).for_policy(rule)
    if not quiet:
        say_defaults(pair, settings)
    given = {p.id: p.text for p in chosen}  # they are shown as they were given
    kept, tokens = fitting(chosen, pair, max_new_tokens, chat, long)
    mode = resolve_mode(verification, rule, settings.topology, temperature)
    names = [f"{p.id}, sample {p.sample}" if p.sample else p.id for p in kept]
    shown = _Shown(names, [given[p.id] for p in kept])
    generations = run(
        pair,
        tokens,
        rule,
        settings=settings,
        ids=[p.stream_name for p in kept],
        seed=seed,
        profile=costs,
        batch=batch,
        on_text=None if json else shown.add,
        on_end=None if json else shown.end,
    )
    tally = Tally(generations)
    cut = 0 if grammar is None else sum(not grammar.matches(g.tokens, pair.eos) for g in generations)
    if cut:
        say(f"{cut} of {len(generations)} texts end before the grammar is complete; raise --max-new-tokens")
    if json:
        details: dict[str, Any] = {"verification": describe(mode), "acceptance": tally.acceptance()}
        details |= {} if grammar is None else {"incomplete": cut}
        print_json({**tally.summary(), **details, "texts": [g.text for g in generations]})
        return
    results().write("\n" if kept else "")
    if not quiet:
        results().write("\n")
        if tally.failure is None:
            show_tally(tally, f"{rule.shown_name}, {describe(mode)}")
        else:
            instead = f"a fixed length instead of {rule.shown_name}"
            show_tally(tally, f"{instead}, which FAILED ({tally.failure.text}); {describe(mode)}")


class _Shown:
    """Writes texts as they come, one after the other: what comes of a later one waits until those before it have ended.

    Args:
        names: of the prompts.
        prompts: which their texts follow.
    """

    def __init__(self, names: list[str], prompts: list[str]) -> None:
        titles = [
            f"[{at + 1} of {len(names)}: {printable(name)}]\n" if len(names) > 1 else ""
            for at, name in enumerate(names)
        ]
        self._waiting = [title + prompt for title, prompt in zip(titles, prompts, strict=True)]
        self._ended = [False] * len(names)
        self._now = 0

    def add(self, number: int, new: str) -> None:
        """Take what has come of a text."""
        self._waiting[number] += new
        self._write()

    def end(self, number: int) -> None:
        """Go on to the next text when this one has ended and been written."""
        self._ended[number] = True
        self._write()

    def _write(self) -> None:
        while self._now < len(self._ended):
            results().write(self._waiting[self._now])
            self._waiting[self._now] = ""
            if not self._ended[self._now]:
                break
            self._now += 1
            results().write("\n\n" if self._now < len(self._ended) else "")
        results().flush()


def show_tally(tally: Tally, title: str) -> None:
    """Print what a run took, and acceptance by depth."""
    facts, phases = tally.summary(), tally.shares()
    rows = [
        ("tokens/s", f"{tally.tokens_per_s:.1f}"),
        ("tokens, seconds", f"{facts['tokens']}, {facts['seconds']:.2f}"),
        ("target calls", str(facts["target_calls"])),
        ("mean tokens of a text per target call", f"{tally.block_efficiency:.2f}"),
        ("drafted, verified, wasted", f"{facts['drafted']}, {facts['verified']}, {facts['wasted']}"),
        *(
            (f"time: {PHASES.get(phase, phase)}", f"{seconds:.2f} s, {percent(seconds, tally.seconds)}")
            for phase, seconds in phases.items()
        ),
    ]
    table(title, ("what", "value"), rows)
    depths = [(str(k), f"{p:.3f}", str(n)) for k, p, n in tally.acceptance()]
    if depths:
        table(
            "acceptance by depth",
            ("depth", "P(A >= depth)", "rounds"),
            depths,
        )
