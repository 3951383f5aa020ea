"""What the papers say of the same releases, for the line beside the proved ones."""

from __future__ import annotations

from ldpfl.privacy.events import BinaryRelease, PureRelease, Release, UnprotectedRelease
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Scope, TrustModel


def paper_claim(release: Release) -> Guarantee | None:
    """Return what the mechanism's paper claims, or None where it is our own or claims nothing.

    For a whole run, or for one round where it claims no more than that.
    """
    match release:
        case BinaryRelease() | PureRelease() if release.claim:
            return _claim(release.epsilon, 0.0, "shuffled", "run", release.claim)
        case UnprotectedRelease(claimed_epsilon=epsilon, claimed_delta=delta) if epsilon is not None and delta is not None:
            return _claim(epsilon, delta, "local", "round", release.claim)
    return None


def _claim(epsilon: float, delta: float, trust_model: TrustModel, scope: Scope, source: str) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit="client",
        units_per_round=1,
        adjacency=REPLACE_ONE,
        trust_model=trust_model,
        status="claimed",
        scope=scope,
        source=source,
    )
