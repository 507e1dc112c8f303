"""The options that choose prompts, and reading what they ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...policies.errors import InputError
from .shared import Limit

if TYPE_CHECKING:
    from ...collect.prompts.read import Choice, Columns, Prompt

Long = Annotated[
    str,
    typer.Option(
        help="Prompts longer than the pair reads (less --max-new-tokens and --depth): skip, left and right (leave out tokens "
        "on that side), refuse."
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Write prompts through the tokenizer's chat template.")]


@dataclass(frozen=True)
class Asked:
    """Which prompts, and what of them; the fields are the options."""

    prompts: Annotated[
        str | None,
        typer.Option(help="JSON Lines, a .txt file of a prompt a line, a data set folder, or hf:org/name[:config]."),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(help="Layout and source: demo, gsm8k, humaneval, mt-bench, spec-bench (with --prompts)."),
    ] = None
    split: Annotated[str | None, typer.Option(help="Split of a data set; default: train, or the preset's.")] = None
    column: Annotated[str | None, typer.Option(help="Column of the prompt: text, turns, or chat messages.")] = None
    group: Annotated[str | None, typer.Option(help="Column of the group that results are reported by.")] = None
    side: Annotated[str | None, typer.Option(help="Only one side of the split by prompt: train or test.")] = None
    test_share: Annotated[float, typer.Option(help="Share of the prompts on the test side.")] = 0.2
    split_seed: Annotated[int, typer.Option(help="Seed of the split by prompt.")] = 0
    shuffle_seed: Annotated[
        int | None, typer.Option(help="Shuffle the prompts with this seed; default: as they come.")
    ] = None
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Drop prompts that repeat an earlier text; samples are kept.")
    ] = False
    limit: Limit = None
    chat: Chat = False
    completions: Annotated[
        str | None,
        typer.Option(
            help="Dense collector: column of texts, or lists of token ids, to label in the place of the target's own. "
            "Above temperature 0 they must be samples of the target, drawn as the options say."
        ),
    ] = None

    def read(self, demo: Path | None) -> list[Prompt]:
        """Read the prompts; `demo` is the folder of the shipped pair where that is used.

        Raises:
            InputError: a source is missing or contradicts another, or a record is not what is expected.
        """
        from ...collect.prompts.presets import DEMO, find_preset
        from ...collect.prompts.read import Choice, Columns, read_prompts

        choice = Choice(self.deduplicate, self.side, self.test_share, self.split_seed, self.shuffle_seed, self.limit)
        columns = Columns(self.column, self.group, self.completions)
        if self.preset == DEMO or (self.prompts is None and self.preset is None):
            return self._demo(demo, columns, choice)
        split = self.split
        source = self.prompts
        if self.preset is not None:
            layout = find_preset(self.preset)
            if source is None and not layout.hub:
                raise InputError(f"--prompts: expected a file for --preset {self.preset} ({layout.known})")
            source = source or layout.hub
            # A preset's split is one of its own data set; what is read in its place need not have it.
            if split is None and source == layout.hub:
                split = layout.split
        return read_prompts(str(source), preset=self.preset, split=split, columns=columns, choice=choice)

    def _demo(self, demo: Path | None, columns: Columns, choice: Choice) -> list[Prompt]:
        """Read the shipped pair's prompts, whose sides are two files of different documents."""
        from ...collect.prompts.read import read_prompts

        if self.prompts is not None:
            raise InputError("--preset demo: brings its own prompts; leave --prompts out, or name another preset")
        if demo is None:
            from ...train.demo.pair import shipped_pair

            if self.preset is None:
                raise InputError(
                    "--prompts: expected a JSON Lines file, .txt, .csv, .parquet, a data set folder, or hf:org/name; only "
                    "the shipped pair brings prompts of its own"
                )
            demo = shipped_pair()
        path = demo / f"prompts-{self.side or 'train'}.jsonl"
        return read_prompts(path, columns=columns, choice=replace(choice, side=None))

    def described(self) -> str:
        """Return one line for the data card: where the prompts are from, and which of them; of a path, its name only."""
        source = self.prompts or ""
        name = source if source.startswith("hf:") else Path(source).name
        parts = [name, f"preset {self.preset}" if self.preset else ""]
        if not any(parts):
            parts = ["preset demo"]
        parts += [f"split {self.split}" if self.split else "", f"column {self.column}" if self.column else ""]
        parts += [f"{self.side} side (share {self.test_share:g}, seed {self.split_seed})" if self.side else ""]
        parts += ["deduplicated" if self.deduplicate else "", f"limit {self.limit}" if self.limit else ""]
        parts += [f"shuffled by seed {self.shuffle_seed}" if self.shuffle_seed is not None else ""]
        parts += ["chat template" if self.chat else ""]
        return ", ".join(part for part in parts if part)
