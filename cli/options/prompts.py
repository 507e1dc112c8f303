"""The options that choose prompts, and reading what they ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...policies.errors import InputError

if TYPE_CHECKING:
    from ...collect.prompts.read import Choice, Columns, Prompt

Source = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        help="JSON Lines, a .txt file of a prompt a line, a data set folder, or hf:org/name[:config].",
    ),
]
Preset = Annotated[
    str | None, typer.Option(help="Layout and source: demo, gsm8k, humaneval, mt-bench, spec-bench (with --prompts).")
]
Split = Annotated[str | None, typer.Option(help="Split of a data set; default: train, or the preset's.")]
Column = Annotated[str | None, typer.Option(help="Column of the prompt: text, turns, or chat messages.")]
Group = Annotated[str | None, typer.Option(help="Column of the group that results are reported by.")]
Side = Annotated[str | None, typer.Option(help="Only one side of the split by prompt: train or test.")]
TestShare = Annotated[float, typer.Option(help="Share of the prompts on the test side.")]
SplitSeed = Annotated[int, typer.Option(help="Seed of the split by prompt.")]
ShuffleSeed = Annotated[int | None, typer.Option(help="Shuffle the prompts with this seed; default: as they come.")]
Deduplicate = Annotated[bool, typer.Option("--deduplicate", help="Drop prompts whose text has come before.")]
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
    """What the prompt options say; the fields are the options."""

    source: str | None
    preset: str | None
    split: str | None
    column: str | None
    group: str | None
    side: str | None
    test_share: float
    split_seed: int
    shuffle_seed: int | None
    deduplicate: bool
    limit: int | None
    chat: bool
    completion: str | None = None

    def read(self, demo: Path | None) -> list[Prompt]:
        """Read the prompts; `demo` is the folder of the embedded pair where that is used.

        Raises:
            InputError: a source is missing or contradicts another, or a record is not what is expected.
        """
        from ...collect.prompts.presets import DEMO, find_preset
        from ...collect.prompts.read import Choice, Columns, read_prompts

        choice = Choice(self.deduplicate, self.side, self.test_share, self.split_seed, self.shuffle_seed, self.limit)
        columns = Columns(self.column, self.group, self.completion)
        if self.preset == DEMO or (self.source is None and self.preset is None):
            return self._demo(demo, columns, choice)
        split = self.split
        source = self.source
        if self.preset is not None:
            layout = find_preset(self.preset)
            if source is None and not layout.hub:
                raise InputError(f"--prompts: expected a file for --preset {self.preset} ({layout.known})")
            source = source or layout.hub
            if split is None and source == layout.hub:
                split = layout.split
        return read_prompts(str(source), preset=self.preset, split=split, columns=columns, choice=choice)

    def _demo(self, demo: Path | None, columns: Columns, choice: Choice) -> list[Prompt]:
        """Read the embedded pair's prompts, whose sides are two files of different documents."""
        from ...collect.prompts.read import read_prompts

        if self.source is not None:
            raise InputError("--preset demo: brings its own prompts; leave --prompts out, or name another preset")
        if demo is None:
            from ...train.demo.pair import demo_pair

            if self.preset is None:
                raise InputError(
                    "--prompts: expected a JSON Lines file, .txt, .csv, .parquet, a data set folder, or hf:org/name; only "
                    "the demo pair brings prompts of its own"
                )
            demo = demo_pair()
        path = demo / f"prompts-{self.side or 'train'}.jsonl"
        return read_prompts(path, columns=columns, choice=replace(choice, side=None))

    def described(self) -> str:
        """Return one line for the data card: where the prompts are from, and which of them; of a path, its name only."""
        source = self.source or ""
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
