"""The options that say from what distribution tokens are drawn, beside the temperature: the same ones in every command."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...policies.errors import InputError

if TYPE_CHECKING:
    from ...decode.models.pair import Pair
    from ...decode.verify.grammar import Grammar
    from ...decode.verify.sampling import SamplingParams


@dataclass(frozen=True)
class Filters:
    """Options by the names of the fields of `decode.SamplingParams`."""

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

    def shaping(self, grammar: Grammar | None = None) -> SamplingParams:
        """Return what they make of a distribution, under a grammar if there is one."""
        from ...decode.verify.sampling import SamplingParams

        return SamplingParams(**asdict(self), processors=() if grammar is None else (grammar,))


@dataclass(frozen=True)
class Structure:
    """Options for structured output."""

    json_schema: Annotated[
        Path | None,
        typer.Option(help="Let every text be JSON that obeys the schema in this file; needs specstop[grammar]."),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(help="Let every text obey the grammar in this file: EBNF as of llama.cpp, or Lark."),
    ] = None

    def read(self, pair: Pair) -> Grammar | None:
        """Return the grammar that texts obey, if any.

        Raises:
            InputError: both options, a file that cannot be read or compiled, or a pair without a tokenizer.
        """
        path = self.json_schema or self.grammar
        if path is None:
            return None
        if self.json_schema and self.grammar:
            raise InputError("--grammar: expected one of --json-schema and --grammar, not both")
        option = f"--{'json-schema' if self.json_schema else 'grammar'} {path}"
        if pair.tokenizer is None:
            raise InputError(f"{option}: expected a pair with a tokenizer; put the tokenizer's files beside the target")
        from ...decode.verify.grammar import Grammar

        try:
            text = path.read_text(encoding="utf-8")
            make = Grammar.from_json_schema if self.json_schema else Grammar.from_text
            return make(text, pair.tokenizer)
        except OSError as error:
            raise InputError(f"{option}: expected a file that can be read; {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"{option}: expected text in UTF-8") from None
        except InputError as error:
            message = error.command_line.removeprefix("json-schema: ").removeprefix("grammar: ")
            raise InputError(f"{option}: {message}") from None
