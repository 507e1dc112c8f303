"""The options that say from what distribution tokens are drawn, beside the temperature: the same ones in every command."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ...decode.verify.sampling import Shaping


@dataclass(frozen=True)
class Filters:
    """Options by the names of the fields of `decode.Shaping`."""

    top_k: Annotated[int | None, typer.Option(help="Sample among this many most likely tokens; 0 = all.")] = None
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the most likely tokens that add up to this probability.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens less likely than this share of the most likely one.")
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens that the text already has become less likely.")
    ] = None
    no_repeat_ngram: Annotated[
        int | None, typer.Option(help="Let no n-gram of this length come twice; 0 = allow all.")
    ] = None
    min_new_tokens: Annotated[int | None, typer.Option(help="Do not end a text before this many new tokens.")] = None
    model_defaults: Annotated[
        bool,
        typer.Option(
            "--model-defaults/--no-model-defaults",
            rich_help_panel="The target's defaults",  # so that its length takes no room from other names
            help="Apply what the target's generation_config.json sets of these and other such fields.",
        ),
    ] = True

    def shaping(self) -> Shaping:
        """Return what they make of a distribution."""
        from ...decode.verify.sampling import Shaping

        return Shaping(**asdict(self))
