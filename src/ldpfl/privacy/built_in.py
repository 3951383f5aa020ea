"""Which mechanisms are this project's own: a line each. Nothing here imports them, so that policies know their names too."""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "duchi": "ldpfl.mechanisms.duchi:DuchiSettings",
    "harmony": "ldpfl.mechanisms.harmony:HarmonySettings",
    "laplace": "ldpfl.mechanisms.scalar:LaplaceSettings",
    "piecewise": "ldpfl.mechanisms.scalar:PiecewiseSettings",
    "hybrid": "ldpfl.mechanisms.scalar:HybridSettings",
    "duchi-vector": "ldpfl.mechanisms.duchi_vector:DuchiVectorSettings",
    "privunit-g": "ldpfl.mechanisms.privunit:PrivUnitGSettings",
    "full-dp": "ldpfl.mechanisms.gaussian.fixed:FullDPSettings",
    "nbafl": "ldpfl.mechanisms.gaussian.fixed:NbAFLSettings",
    "time-varying": "ldpfl.mechanisms.gaussian.fixed:TimeVaryingSettings",
    "sensitive-dp": "ldpfl.mechanisms.gaussian.history:SensitiveDPSettings",
    "dpa": "ldpfl.mechanisms.gaussian.fixed:DpaSettings",
    "adapldp": "ldpfl.mechanisms.gaussian.history:AdapLDPSettings",
    "ladp": "ldpfl.mechanisms.gaussian.ladp:LadpSettings",
    "ladp-sound": "ldpfl.mechanisms.gaussian.ladp:LadpSoundSettings",
    "rotated-sign": "ldpfl.mechanisms.rotated_sign:RotatedSignSettings",
    "dp-sgd": "ldpfl.mechanisms.dp_sgd:DpSgdSettings",
    "dp-fedavg": "ldpfl.mechanisms.dp_fedavg:DpFedAvgSettings",
    "none": "ldpfl.mechanisms.identity:IdentitySettings",
}
"""By name, where its settings are."""


def is_built_in(name: str) -> bool:
    """Whether the mechanism called ``name`` is one of ours; others come with packages, whose code runs when they are looked up."""
    return name in BUILT_IN


_RELEASES: Mapping[str, tuple[str, ...]] = {
    "duchi": ("binary",),
    "harmony": ("binary",),
    "rotated-sign": ("binary",),
    "laplace": ("pure",),
    "piecewise": ("pure",),
    "hybrid": ("pure",),
    "duchi-vector": ("pure",),
    "privunit-g": ("pure",),
    "full-dp": ("gaussian", "unprotected"),
    "nbafl": ("gaussian",),
    "time-varying": ("gaussian", "unprotected"),
    "sensitive-dp": ("gaussian", "unprotected"),
    "dpa": ("gaussian", "unprotected"),
    "adapldp": ("unprotected",),
    "ladp": ("unprotected",),
    "ladp-sound": ("gaussian",),
    "dp-sgd": ("gaussian",),
    "dp-fedavg": ("gaussian",),
    "none": ("unprotected",),
}
"""By name, the kinds of releases that it makes, as a ledger names them."""


def may_release(name: str, kind: str) -> bool:
    """Whether the mechanism called ``name`` is one of ours, and makes releases of this kind."""
    return kind in _RELEASES.get(name, ())
