"""The options that say which models run, and where; finding and loading them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...policies import kernels
from ...policies.display import Progress, silent
from ...policies.errors import InputError
from .shared import Device, DeviceMap, Draft, Drafter, Dtype, Engine, Target

if TYPE_CHECKING:
    from ...decode.models.pair import Pair


class Found(NamedTuple):
    """Names of target and draft (None if another drafter proposes), and the shipped pair's folder if it is used."""

    target: str
    draft: str | None
    demo: Path | None


@dataclass(frozen=True)
class Models:
    """The options that say which models run, and where; the fields are the options."""

    target: Target = None
    draft: Draft = None
    drafter: Drafter = "model"
    device: Device = "cpu"
    device_map: DeviceMap = None
    dtype: Dtype = "float32"
    engine: Engine = "auto"

    def find(self, progress: Progress = silent) -> Found:
        """Return the models, by default those of the shipped pair.

        Raises:
            InputError: a target without a draft, or the other way round; or there is no such drafter.
        """
        from ...decode.drafters.spec import check_drafter, needs_draft

        check_drafter(self.drafter)
        alone = self.target is not None and not needs_draft(self.drafter)
        if not alone and (self.target is None) != (self.draft is None):
            if self.drafter != "model" and self.draft is None:
                raise InputError(f"--draft: expected a draft model, which the drafter {self.drafter} reads")
            raise InputError(
                "expected both --target and --draft, or neither for the shipped pair; some drafters need no --draft "
                "(--drafter suffix, medusa:PATH, ...)"
            )
        if alone and self.draft is not None:
            raise InputError(f"--draft: the drafter {self.drafter} takes no draft model; leave --draft out")
        # Compiled here, where it shows, and not within anything that is timed.
        kernels.load(progress)
        if self.target is not None:
            return Found(self.target, self.draft, None)
        from ...train.demo.pair import shipped_pair

        folder = shipped_pair()
        return Found(str(folder / "target"), str(folder / "draft"), folder)

    def open(self, found: Found) -> Pair:
        """Load both models, or the target and a drafter in the place of the draft, without the libraries' own output."""
        from ...decode.drafters.spec import needs_draft, with_drafter
        from ...decode.models.pair import load_pair

        quiet_libraries()
        small = found.draft if needs_draft(self.drafter) else None
        where, kind, engine = self.device, self.dtype, self.engine
        pair = load_pair(found.target, small, device=where, dtype=kind, engine=engine, device_map=self.device_map)
        return with_drafter(pair, self.drafter)


def quiet_libraries() -> None:
    """Keep loading bars and advice of transformers and datasets off the console."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
