"""What the papers say of the same releases, for the line beside the proved ones."""

from __future__ import annotations

from ldpfl.privacy.events import BinaryRelease, PureRelease, Release
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee

_LDP_FL = (
    'LDP-FL, section 4: with shuffling "it is sufficient to protect eps-LDP for each weight"; '
    "shuffling hides who sent a bit, but a client's bits are many, and they add up"
)

_OPTIMAL_LDP_FL = 'Optimal LDP-FL, section 4: the "framework satisfies eps-LDP"; epsilon is spent once a layer and round, and these add up'
_SOURCES = {"duchi": _LDP_FL, "harmony": _OPTIMAL_LDP_FL}


def paper_claim(release: Release) -> Guarantee | None:
    """Return what the mechanism's paper claims for a whole run, or None where it is our own or claims nothing."""
    if release.mechanism not in _SOURCES or not isinstance(release, BinaryRelease | PureRelease):
        return None
    return Guarantee(
        epsilon=release.epsilon,
        delta=0.0,
        unit="client",
        units_per_round=1,
        adjacency=REPLACE_ONE,
        trust_model="shuffled",
        status="claimed",
        scope="run",
        source=_SOURCES[release.mechanism],
    )
