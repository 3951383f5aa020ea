"""Callbacks of a run: user code, or a tracker, that is called as the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.report.progress import ProgressDisplay
from ldpfl.server import RoundMetrics

if TYPE_CHECKING:
    from ldpfl.api.results import RunResult

OnRound = Callable[[RoundMetrics], None]


@runtime_checkable
class Callback(Protocol):
    """Receiver of a run's events. Inherit from this class and write the methods that you need. An exception in a method ends the run.

    A callback gets everything that the run's owner may see, and not only public figures. On your own data, the score of each round is an
    exact figure of test rows, which the guarantee does not cover. The noise-free baseline is trained without callbacks.
    """

    def on_run_start(self, config: RunConfig, metric: str, history: Sequence[RoundMetrics]) -> None:
        """Take the config of a run that begins. ``metric`` names the score; ``history`` has the rounds that a resumed run made before."""
        return

    def on_round_end(self, metrics: RoundMetrics) -> None:
        """Take the metrics of a round. Its checkpoint is already in the run's folder."""
        return

    def on_run_end(self, result: RunResult) -> None:
        """Take the result of the finished run. The run's folder is complete."""
        return


class Announcer:
    """Observer of a run. It passes all events to a display, and those of the private training to callbacks."""

    def __init__(self, display: ProgressDisplay, config: RunConfig, callbacks: Sequence[Callback], on_round: OnRound | None) -> None:
        """Raise a ConfigError if one of ``callbacks`` is none. The function ``on_round`` is called after each round, before them."""
        for place, callback in enumerate(callbacks):
            if isinstance(callback, type) or not isinstance(callback, Callback):
                raise ConfigError(f"callbacks[{place}] is not a callback: give an instance of a class that inherits from ldpfl.Callback")
        self._display, self._config, self._callbacks, self._on_round = display, config, callbacks, on_round
        self._phases = 0  # number of trainings that were announced
        # Events that only the display gets.
        self.clients_done, self.warn, self.preparing = display.clients_done, display.warn, display.preparing

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        """Announce a training. The private training comes first and is announced to callbacks; the baseline comes second."""
        self._phases += 1
        self._display.started(label, rounds, done, metric)
        if self._phases == 1:
            self._tell_start(metric, done)

    def round_done(self, metrics: RoundMetrics) -> None:
        """Pass a finished round to the display and, if it is of the private training, to the callbacks."""
        self._display.round_done(metrics)
        if self._phases > 1:  # the round is of the noise-free baseline
            return
        if self._on_round is not None:
            self._on_round(metrics)
        for callback in self._callbacks:
            callback.on_round_end(metrics)

    def finished(self, result: RunResult) -> None:
        """Tell all callbacks that the run is finished. If it was finished before this call, tell them first that it began."""
        if self._phases == 0:
            self._tell_start(result.metric, result.history)
        for callback in self._callbacks:
            callback.on_run_end(result)

    def _tell_start(self, metric: str, history: Sequence[RoundMetrics]) -> None:
        """Tell all callbacks that the run begins."""
        for callback in self._callbacks:
            callback.on_run_start(self._config, metric, history)
