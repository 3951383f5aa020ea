"""Facts about a mechanism that hold in every round, for planning, running and reporting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Properties:
    """Facts about a mechanism. Each has a default that suits most mechanisms.

    Attributes:
        adds_up: whether ``aggregate`` needs only the number of reports and the sum of their ``addends``. A server then adds each report
            when it arrives, and discards it. Such reports are :class:`BitReports` or :class:`DenseReports`.
        caveats: warnings for users of these parameters, one line each.
        source: publication with the proof of the guarantee, if it is not stated with the release.
        assumptions: conditions outside the mechanism that the guarantee needs.
        delta: failure probability at which the guarantee is stated if there is no pure one.
        deployable: whether a client on Flower can run the mechanism: it needs only its own values and public information of a round.
        foreseeable: whether the release follows from public settings, so that it is known before a run.
    """

    adds_up: bool = False
    caveats: tuple[str, ...] = ()
    source: str = ""
    assumptions: tuple[str, ...] = ("ranges are public", "random bits are uniform and secret")
    delta: float = 0.0
    deployable: bool = True
    foreseeable: bool = True
