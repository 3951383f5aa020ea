"""Local randomisers: what a client's report is, what the server learns from it, and what it costs."""

from collections.abc import Callable
from typing import Any

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.base import Mechanism, Refused, read_valid
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.mechanisms.duchi_vector import DuchiVector, VectorBitReports
from ldpfl.mechanisms.gaussian import FullDP, Gaussian, Sensitivity
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.identity import Identity
from ldpfl.mechanisms.indexed_reports import IndexedBitReports
from ldpfl.mechanisms.privunit import PrivUnitG
from ldpfl.mechanisms.reports import BitReports, DenseReports, Reports
from ldpfl.mechanisms.sampled import Hybrid, Laplace, Piecewise
from ldpfl.mechanisms.sampled_reports import SampledReports
from ldpfl.mechanisms.vector_reports import VectorReports
from ldpfl.suggestions import did_you_mean


def full_dp(epsilon: float, delta: float = 1e-5, norm: float = 1.0) -> Gaussian:
    """Return the Gaussian mechanism: updates clipped to ``norm``, exact noise for (``epsilon``, ``delta``) a client and round."""
    return Gaussian(FullDP(epsilon, delta, Sensitivity("update_clip", norm=norm)))


_REGISTRY: dict[str, Callable[..., Mechanism]] = {
    "duchi": Duchi,
    "harmony": Harmony,
    "laplace": Laplace,
    "piecewise": Piecewise,
    "hybrid": Hybrid,
    "duchi-vector": DuchiVector,
    "privunit-g": PrivUnitG,
    "full-dp": full_dp,
    "none": Identity,
}


def names() -> tuple[str, ...]:
    """Names that :func:`create` knows."""
    return tuple(_REGISTRY)


def create(name: str, **parameters: Any) -> Mechanism:
    """Build the mechanism called ``name`` from its parameters, for instance ``create("duchi", epsilon=1.0)``.

    Raises:
        ConfigError: the name is unknown, a parameter is unknown or missing, or a value is out of range.
    """
    if name not in _REGISTRY:
        raise ConfigError(f"unknown mechanism {name!r}: {did_you_mean(name, _REGISTRY)}")
    try:
        return _REGISTRY[name](**parameters)
    except TypeError as error:
        raise ConfigError(f"mechanism {name!r} does not take these parameters: {error}") from None


def with_defaults(name: str, epsilon: float) -> Mechanism:
    """Build the mechanism called ``name`` at ``epsilon``, all else as a config has it by default: to plan and to audit.

    Raises:
        ConfigError: as :func:`create`.
    """
    extra: dict[str, dict[str, Any]] = {"privunit-g": {"norm": 1.0, "magnitude_share": 0.5}}
    return create(name, **({} if name == "none" else {"epsilon": epsilon, **extra.get(name, {})}))


__all__ = [
    "BitReports",
    "DenseReports",
    "Duchi",
    "DuchiVector",
    "Gaussian",
    "Harmony",
    "Hybrid",
    "Identity",
    "IndexedBitReports",
    "Laplace",
    "Mechanism",
    "Piecewise",
    "PrivUnitG",
    "Refused",
    "Reports",
    "SampledReports",
    "VectorBitReports",
    "VectorReports",
    "create",
    "names",
    "read_valid",
    "with_defaults",
]
