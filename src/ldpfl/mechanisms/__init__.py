"""Local randomisers: what a client's report is, what the server learns from it, and what it costs."""

from ldpfl.mechanisms.base import Mechanism, PublicState, Refused, read_valid, require_finite, total_clients
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.mechanisms.duchi_vector import DuchiVector, VectorBitReports
from ldpfl.mechanisms.gaussian import Gaussian
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.identity import Identity
from ldpfl.mechanisms.privunit import PrivUnitG
from ldpfl.mechanisms.registry import built, create, names, read_settings, settings_of, version_of, with_defaults
from ldpfl.mechanisms.reports.base import Reports
from ldpfl.mechanisms.reports.bits import BitReports, count_ones
from ldpfl.mechanisms.reports.dense import DenseReports
from ldpfl.mechanisms.reports.indexed import IndexedBitReports
from ldpfl.mechanisms.reports.sampled import SampledReports
from ldpfl.mechanisms.reports.units import Units
from ldpfl.mechanisms.reports.vectors import VectorReports
from ldpfl.mechanisms.scalar import Hybrid, Laplace, Piecewise
from ldpfl.mechanisms.settings import EpsilonSettings, Facts, MechanismSettings, Perturbed, Training
from ldpfl.privacy.built_in import is_built_in
from ldpfl.randomness import as_source, draw

__all__ = [
    "BitReports",
    "DenseReports",
    "Duchi",
    "DuchiVector",
    "EpsilonSettings",
    "Facts",
    "Gaussian",
    "Harmony",
    "Hybrid",
    "Identity",
    "IndexedBitReports",
    "Laplace",
    "Mechanism",
    "MechanismSettings",
    "Perturbed",
    "Piecewise",
    "PrivUnitG",
    "PublicState",
    "Refused",
    "Reports",
    "SampledReports",
    "Training",
    "Units",
    "VectorBitReports",
    "VectorReports",
    "as_source",
    "built",
    "count_ones",
    "create",
    "draw",
    "is_built_in",
    "names",
    "read_settings",
    "read_valid",
    "require_finite",
    "settings_of",
    "total_clients",
    "version_of",
    "with_defaults",
]
