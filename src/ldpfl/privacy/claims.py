"""What the papers say of the same releases, for the line beside the proved ones."""

from __future__ import annotations

from ldpfl.privacy.events import BinaryRelease, PureRelease, Release, UnprotectedRelease
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Scope, TrustModel

_LDP_FL = (
    'LDP-FL, section 4: with shuffling "it is sufficient to protect eps-LDP for each weight"; '
    "shuffling hides who sent a bit, but a client's bits are many, and they add up"
)

_OPTIMAL_LDP_FL = 'Optimal LDP-FL, section 4: the "framework satisfies eps-LDP"; epsilon is spent once a layer and round, and these add up'
_SOURCES = {"duchi": _LDP_FL, "harmony": _OPTIMAL_LDP_FL}


_LADP_FL = (
    "LaDP-FL, Theorem 3 and its comparison: each round is (epsilon, delta)-DP, layers without noise and noise that follows private "
    "weights included; the first are infinitely dear, the second are outside the theorem"
)


def paper_claim(release: Release) -> Guarantee | None:
    """Return what the mechanism's paper claims, or None where it is our own or claims nothing.

    For a whole run, or for one round where it claims no more than that.
    """
    match release:
        case BinaryRelease() | PureRelease() if release.mechanism in _SOURCES:
            return _claim(release.epsilon, 0.0, "shuffled", "run", _SOURCES[release.mechanism])
        case UnprotectedRelease(claimed_epsilon=epsilon, claimed_delta=delta) if epsilon is not None and delta is not None:
            return _claim(epsilon, delta, "local", "round", _LADP_FL)
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
