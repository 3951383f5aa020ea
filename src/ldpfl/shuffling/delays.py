"""Random delays: the paper's way to hide which reports come from one client, without a relay between client and server.

All clients agree on T, the median of what they propose, and on T_S, the response time of the slowest. A client that is done waits
T_W = T_S - t_LC - t_C, and then sends each report after a delay of its own, uniform on (0, T) (LDP-FL, section 3, "Parameter
Shuffling", and Algorithm 3). All times are in seconds.

What that does not do: it hides no sender's address, and it is exact only if T_S, clocks and predicted times are. A client that is
slower than T_S cannot wait less than nothing, so its reports come later than all others: whoever sees arrival times can link
them. A single client that announces a long time makes everyone wait, for T_S is a maximum and no median. ``ldpfl.attacks.linkage``
measures what an observer still learns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from ldpfl.errors import ConfigError
from ldpfl.randomness import RandomSource, uniform


@dataclass(frozen=True)
class ResponseTime:
    """How long one client takes in a round, predicted or measured, in seconds.

    Attributes:
        computing: local training, t_LC.
        communicating: from client to server, t_C.

    Raises:
        ConfigError: a time is negative or not finite.
    """

    computing: float
    communicating: float

    def __post_init__(self) -> None:
        for name, value in (("computing", self.computing), ("communicating", self.communicating)):
            _check_time(value, f"the time for {name}")

    @property
    def total(self) -> float:
        """t_LC + t_C."""
        return self.computing + self.communicating


def agreed_delay(proposals: Sequence[float]) -> float:
    """Return T, the median of what the clients propose; while fewer than half of them lie, it stays among honest proposals.

    Raises:
        ConfigError: there is no proposal, or one is not a positive finite number of seconds.
    """
    if not proposals:
        raise ConfigError("nobody proposed a longest delay: at least one client must, before the first round")
    for proposal in proposals:
        _check_delay(proposal, "a proposed longest delay")
    return float(statistics.median(proposals))


def slowest_response(predictions: Sequence[ResponseTime]) -> float:
    """Return T_S, the largest t_LC + t_C that the clients predict for the round.

    Raises:
        ConfigError: there is no prediction.
    """
    if not predictions:
        raise ConfigError("nobody predicted a response time: at least one client must, at the beginning of the round")
    return max(prediction.total for prediction in predictions)


def wait(own: ResponseTime, slowest: float) -> float:
    """Return T_W = T_S - t_LC - t_C, how long a client waits between training and its random delays.

    0 for a client that is slower than T_S. Its reports come later than those of all others, which gives them away: a client
    that cares more for its privacy than for the round should send nothing then.

    Raises:
        ConfigError: ``slowest`` is negative or not finite.
    """
    _check_time(slowest, "the slowest client's response time")
    return max(0.0, slowest - own.total)


def is_late(own: ResponseTime, slowest: float) -> bool:
    """Return whether a client is slower than T_S, so that no wait can hide it among the others."""
    return own.total > slowest


def random_delays(longest: float, reports: int, source: RandomSource, row: int = 0) -> Tensor:
    """Draw a delay for each report of one client, (reports,) float64, independent and uniform on (0, T).

    Draw anew in every round: delays that came again would mark a client by the order of its parameter ids.

    Args:
        longest: T.
        source: a deployed client passes :class:`ldpfl.randomness.SecureSource`; whoever knows the delays knows the sender.
        row: the client's row in ``source``.

    Raises:
        ConfigError: T is not a positive finite number, or ``reports`` is below 1.
        PrivacyError: the source gave other bits than were asked for.

    Source: LDP-FL, Algorithm 3, line 4.
    """
    _check_delay(longest, "the longest delay")
    if reports < 1:
        raise ConfigError(f"the number of reports must be 1 or more, got {reports}")
    return uniform(source, row, reports) * longest


def departures(own: ResponseTime, slowest: float, longest: float, reports: int, source: RandomSource, row: int = 0) -> Tensor:
    """Draw when each report of one client leaves, (reports,) float64: seconds after its training ended, T_W plus a delay each.

    Then the reports of a client that is in time reach the server between T_S and T_S + T, counted from the beginning of the round.

    Raises:
        ConfigError, PrivacyError: as :func:`wait` and :func:`random_delays`.
    """
    return wait(own, slowest) + random_delays(longest, reports, source, row)


def _check_time(value: float, what: str) -> None:
    # Without the value: how long a client trains may tell how much data it has.
    if not (isfinite(value) and value >= 0):
        raise ConfigError(f"{what} must be a finite number of seconds, 0 or more: check the client's clock")


def _check_delay(value: float, what: str) -> None:
    if not (isfinite(value) and value > 0):
        raise ConfigError(f"{what} must be a finite number of seconds above 0, got {value}")
