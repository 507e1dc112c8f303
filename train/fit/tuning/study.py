"""A search as an optuna study: what is drawn next, when a trial is given up, the file it resumes from, its pictures."""

from __future__ import annotations

import functools
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from ....policies.errors import InputError
from .trials import HeadSpace, SpecSpace, Trial

Space = HeadSpace | SpecSpace
Measure = Callable[[Trial, Callable[[float], bool]], Trial]
"""Returns a trial with what came of it; it asks whether to end after the first fold, by the rate there."""
JOURNAL = "tune.journal"
STARTUP = 4
"""Trials before the first one that may be given up after its first fold."""

LINE = b'{"op_code":'
"""How the lines of the file begin."""

HELD_S = 2.0
"""A lock is held while a line is written; optuna itself would wait half a minute for one that nobody holds."""


class _NotRunError(Exception):
    """A trial that could not be run; its record says why."""


class Study:
    """Trials of one space.

    Heads are drawn by TPE (Bergstra and others 2011), those with a head's own hyper-parameters first; a spec's values are
    all different ones, in random order.

    Args:
        name: tells it from other searches in the same file.
        space: what is drawn from.
        seed: of the draws.
        folder: where the file is kept; None keeps the search in memory.
        resume: go on from the trials there.

    Raises:
        InputError: the file cannot be read.
    """

    def __init__(self, name: str, space: Space, seed: int, folder: Path | None, resume: bool) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.folder, storage = space, folder, _storage(folder)
        if storage is not None and not resume and name in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name=name, storage=storage)
        self._study = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
        if isinstance(space, SpecSpace):
            self._study.sampler = optuna.samplers.GridSampler(space.choices, seed)
            # All values are tried, each on all folds.
            self._study.pruner = optuna.pruners.NopPruner()
            return
        self._study.sampler = optuna.samplers.TPESampler(seed=seed + self.ended)  # a resumed search draws others
        self._study.pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP)
        tried = [(trial.rule, trial.name) for trial in self.trials() if not trial.params]
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        drawn = [one.system_attrs["fixed_params"] for one in waiting]
        for first in space.first()[: space.count]:  # a search that was killed comes back to the one it was at
            if (first["rule"], first["head"]) not in tried and first not in drawn:
                self._study.enqueue_trial(first)

    @property
    def ended(self) -> int:
        """How many trials have ended."""
        return len(self.trials())

    def run(self, measure: Measure, count: int, told: Callable[[int], None] = lambda ended: None) -> None:
        """Draw and measure trials until `count` have ended; `told` is called with how many have."""
        missing = count - self.ended
        if missing > 0:
            self._study.optimize(
                functools.partial(self._value, measure), n_trials=missing, catch=(_NotRunError,),
                callbacks=[lambda study, drawn: told(self.ended)],
            )  # fmt: skip

    def _value(self, measure: Measure, drawn: optuna.Trial) -> float:
        given_up = False

        def behind(rate: float) -> bool:
            nonlocal given_up
            drawn.report(rate, 0)
            given_up = drawn.should_prune()
            return given_up

        trial = measure(self.space.draw(drawn), behind)
        trial.record(drawn)
        if trial.error:
            raise _NotRunError
        if given_up:
            raise optuna.TrialPruned
        return trial.rate

    def trials(self) -> list[Trial]:
        """Return the trials that have ended; one that was interrupted has no record."""
        ended = [one for one in self._study.get_trials(deepcopy=False) if one.state.is_finished()]
        return [trial for trial in map(Trial.recorded, ended) if trial is not None]

    def draw(self) -> None:
        """Draw what the trials came to, and which hyper-parameters mattered, beside the file."""
        if (
            self.folder is None
            or not isinstance(self.space, HeadSpace)
            or not self._study.get_trials(states=(TrialState.COMPLETE,))
        ):
            return
        from matplotlib import pyplot
        from optuna.visualization import matplotlib as plots

        pictures: dict[str, Any] = {
            "history": plots.plot_optimization_history,
            "importances": plots.plot_param_importances,
        }
        for name, plot in pictures.items():
            # optuna sets its style for the whole process: pictures drawn afterwards would be grey.
            with warnings.catch_warnings(), pyplot.ioff(), pyplot.rc_context():
                warnings.simplefilter("ignore")  # "experimental" of optuna's matplotlib pictures
                figure = plot(self._study, target_name="tokens/s").figure
                figure.savefig(self.folder / f"tune_{name}.svg", bbox_inches="tight")
                pyplot.close(figure)


def _storage(folder: Path | None) -> optuna.storages.JournalStorage | None:
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JOURNAL
    try:
        _mend(path)
        return optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, KeyError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: not the file of a search ({said}); give another --checkpoints") from None


def _mend(path: Path) -> None:
    """Take away what a process leaves that is killed as it writes: a lock, and half a line that the next would go on in."""
    # optuna's lock is a symbolic link beside the file: `lstat` asks for the link's own age.
    lock = path.with_name(f"{path.name}.lock")
    if lock.is_symlink() and time.time() - lock.lstat().st_mtime > HELD_S:
        lock.unlink()
    if not path.exists():
        return
    *lines, half = path.read_bytes().split(b"\n")  # `half` is empty after a whole line
    # Only a file that is a search's for sure may be cut off: any other one is the user's.
    if not all(line.startswith(LINE) and json.loads(line) for line in lines) or not half.startswith(LINE[: len(half)]):
        raise ValueError("some line of it is none of a search")
    os.truncate(path, path.stat().st_size - len(half))
