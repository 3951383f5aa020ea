"""Hand a run's figures, settings, guarantee and files to trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ldpfl.api.callbacks import Callback
from ldpfl.errors import ConfigError, LdpflError, first_line
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.public_figures import public_round, public_settings, without_private_figures
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.privacy import guarantee_rows
from ldpfl.report.trackers import TRACKERS, Tracker, round_figures
from ldpfl.server import RoundMetrics
from ldpfl.util.suggestions import did_you_mean

if TYPE_CHECKING:
    from ldpfl.api.results import RunResult
    from ldpfl.privacy.guarantee import Statement


class TrackerCallback(Callback):
    """Callback that hands a run to one tracker. A tracker gets only public figures, unless all its files stay in the run's folder.

    If the tracker fails after the start, the run continues: a warning is printed, and the tracker gets no further figures.
    """

    def __init__(self, name: str, tracker: Tracker, folder: Path, warn: Callable[[str], None]) -> None:
        self._name, self._tracker, self._folder, self._warn = name, tracker, folder, warn
        self._config, self._metric, self._is_lost = RunConfig(), "", False

    def on_run_start(self, config: RunConfig, metric: str, history: Sequence[RoundMetrics]) -> None:
        """Begin the tracker's run. If that fails, the training does not begin."""
        self._config, self._metric = config, metric
        try:
            self._tracker.begin(config.name, public_settings(config))
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(
                f"{self._name} cannot track the run: {reason}. Correct {self._name}'s settings, and resume the run with or without --track"
            ) from error
        for metrics in history:  # rounds that a resumed run made before
            self.on_round_end(metrics)

    def on_round_end(self, metrics: RoundMetrics) -> None:
        """Hand over the figures of a round, unless they are private."""
        allowed = metrics if self._tracker.is_local else public_round(self._config, metrics)
        if allowed is not None:
            self._call_or_warn(lambda: self._tracker.log(round_figures(self._config, self._metric, allowed), metrics.round))

    def on_run_end(self, result: RunResult) -> None:
        """Hand over the final figures, the guarantee, and the files that may be handed on."""
        figures, rounds = result.to_dict(), len(result.history)
        allowed = figures if self._tracker.is_local else without_private_figures(self._config, figures)
        epsilons = {f"epsilon/{name}": value for name, value in _epsilons(result.privacy).items()}
        numbers = {allowed["metric"]: allowed["score"], **allowed["scores"]} | epsilons
        finite = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float) and isfinite(value)}
        with TemporaryDirectory() as temporary:
            files = None if self._tracker.is_local else self._write_files(Path(temporary) / "run")
            self._call_or_warn(lambda: self._tracker.conclude(finite, _texts(result.privacy), rounds, files))

    def close(self, *, failed: bool) -> None:
        """End the tracker's own run, as failed if an error ended the training or if figures are missing because a call failed."""
        try:
            self._tracker.close(failed=failed or self._is_lost)
        except Exception as error:
            self._warn(
                f"{self._name} may still show the run as running, as ending it there failed: {type(error).__name__}: {first_line(error)}"
            )

    def _write_files(self, target: Path) -> Path | None:
        """Write the files that may be handed on to the folder ``target``: the export and the public page.

        Return the folder; warn and return None if the run may not be exported.
        """
        from ldpfl.api.exporting import export
        from ldpfl.api.paging import page

        try:
            export(self._folder, target, on_note=self._warn)
            page([self._folder], target / "report-public.html", public=True)
        except LdpflError as error:
            self._warn(f"the run's files were not handed to {self._name}: {error}")
            return None
        return target

    def _call_or_warn(self, call: Callable[[], object]) -> None:
        """Make a ``call`` to the tracker. If it fails, warn and make no further calls."""
        if self._is_lost:
            return
        try:
            call()
        except Exception as error:  # a service that is away for a while must not end the training
            self._is_lost = True
            next_step = (
                f"when the run is finished, hand it over with: ldpfl run --resume --out {quote(str(self._folder))} --track {self._name}"
            )
            self._warn(f"{self._name} gets no further figures of this run ({type(error).__name__}: {first_line(error)}); {next_step}")


def _epsilons(privacy: Statement) -> dict[str, Any]:
    """Return the epsilons of the guarantee by name."""
    return {name: value for name, value in privacy.figures().items() if name != "delta"}


def _texts(privacy: Statement) -> dict[str, str]:
    """Return two texts: the verdict, and the table of guarantees and the paper's claims in Markdown."""
    rows = guarantee_rows(privacy.to_dict())
    heads = ("protected", "trusted", f"epsilon (delta {privacy.delta:g})", "status")
    table = "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))
    return {"verdict": privacy.verdict or "Nothing is protected: values leave as they are.", "guarantee": table}


@contextmanager
def tracker_callbacks(names: Sequence[str], folder: Path | None, warn: Callable[[str], None]) -> Iterator[list[TrackerCallback]]:
    """Yield a callback for each tracker in ``names``. When the block ends, end the trackers' runs.

    Raises:
        ConfigError: there is no such tracker, its client is not installed, the run has no ``folder``, or a
            tracker sends data elsewhere and the run is a trial of a tuning, whose files must stay here.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(f"unknown tracker {unknown[0]!r}: {did_you_mean(unknown[0], TRACKERS)}")
    if names and folder is None:
        raise ConfigError("track needs the argument folder, which is not given: give a folder, from which the tracker gets files")
    if folder is not None and not all(TRACKERS[name].is_local for name in names):
        RunFolder(folder).check_may_be_handed_on()
    callbacks = []
    if folder is not None:  # without a folder there are no names
        callbacks = [TrackerCallback(name, TRACKERS[name](folder), folder, warn) for name in dict.fromkeys(names)]
    failed = True  # until the block has ended without an error
    try:
        yield callbacks
        failed = False
    finally:
        for callback in callbacks:
            callback.close(failed=failed)
