"""What holds of a mechanism in every round: facts for those who plan, run and report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Properties:
    """Facts about a mechanism. Each has a default that suits most mechanisms.

    Attributes:
        adds_up: whether ``aggregate`` needs nothing but the number of reports and the sum of their ``addends``. A server then adds up each
            report when it comes, and forgets it. Such reports are :class:`BitReports` or :class:`DenseReports`.
        caveats: what a user of these parameters should be told, a line each.
        source: where the guarantee is proved, if not with the release.
        assumptions: what has to be true for the guarantee, outside the mechanism.
        delta: failure probability at which the guarantee is stated, where there is no pure one.
        deployable: whether a client on Flower can run it: it needs nothing but its own values and what is public in a round.
        foreseeable: whether what it releases follows from public settings, so that it is known before a run.
    """

    adds_up: bool = False
    caveats: tuple[str, ...] = ()
    source: str = ""
    assumptions: tuple[str, ...] = ("ranges are public", "random bits are uniform and secret")
    delta: float = 0.0
    deployable: bool = True
    foreseeable: bool = True
