"""What the papers say of the same releases, for the line beside the proved ones."""

from __future__ import annotations

from ldpfl.privacy.events import Release
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee


def paper_claim(release: Release) -> Guarantee | None:
    """Return what the mechanism's paper claims, or None where it is our own or claims nothing."""
    claim = release.claimed
    if claim is None:
        return None
    return Guarantee(**claim._asdict(), unit="client", units_per_round=1, adjacency=REPLACE_ONE, status="claimed")
