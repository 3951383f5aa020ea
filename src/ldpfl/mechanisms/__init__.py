"""Local randomisers: what a client's report is, what the server learns from it, and what it costs."""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl.mechanisms.base import Mechanism as Mechanism
    from ldpfl.mechanisms.base import PublicState as PublicState
    from ldpfl.mechanisms.base import Refused as Refused
    from ldpfl.mechanisms.base import guarantee_of as guarantee_of
    from ldpfl.mechanisms.base import payload_bits as payload_bits
    from ldpfl.mechanisms.base import privatize as privatize
    from ldpfl.mechanisms.base import read_valid as read_valid
    from ldpfl.mechanisms.base import require_finite as require_finite
    from ldpfl.mechanisms.base import total_clients as total_clients
    from ldpfl.mechanisms.comparing import ByComparison as ByComparison
    from ldpfl.mechanisms.comparing import Comparison as Comparison
    from ldpfl.mechanisms.duchi import Duchi as Duchi
    from ldpfl.mechanisms.duchi_vector import DuchiVector as DuchiVector
    from ldpfl.mechanisms.duchi_vector import VectorBitReports as VectorBitReports
    from ldpfl.mechanisms.gaussian import Gaussian as Gaussian
    from ldpfl.mechanisms.harmony import Harmony as Harmony
    from ldpfl.mechanisms.hooks import PerRecord as PerRecord
    from ldpfl.mechanisms.hooks import PerRound as PerRound
    from ldpfl.mechanisms.identity import Identity as Identity
    from ldpfl.mechanisms.noise import ConstantNoise as ConstantNoise
    from ldpfl.mechanisms.noise import Noise as Noise
    from ldpfl.mechanisms.noise import QuadraticNoise as QuadraticNoise
    from ldpfl.mechanisms.privunit import PrivUnitG as PrivUnitG
    from ldpfl.mechanisms.properties import Properties as Properties
    from ldpfl.mechanisms.record_clipping import RecordClip as RecordClip
    from ldpfl.mechanisms.registry import built as built
    from ldpfl.mechanisms.registry import create as create
    from ldpfl.mechanisms.registry import names as names
    from ldpfl.mechanisms.registry import read_settings as read_settings
    from ldpfl.mechanisms.registry import settings_of as settings_of
    from ldpfl.mechanisms.registry import version_of as version_of
    from ldpfl.mechanisms.registry import with_defaults as with_defaults
    from ldpfl.mechanisms.reports.base import Reports as Reports
    from ldpfl.mechanisms.reports.bits import BitReports as BitReports
    from ldpfl.mechanisms.reports.bits import count_ones as count_ones
    from ldpfl.mechanisms.reports.dense import DenseReports as DenseReports
    from ldpfl.mechanisms.reports.indexed import IndexedBitReports as IndexedBitReports
    from ldpfl.mechanisms.reports.sampled import SampledReports as SampledReports
    from ldpfl.mechanisms.reports.units import MixedCoordinates as MixedCoordinates
    from ldpfl.mechanisms.reports.units import Units as Units
    from ldpfl.mechanisms.reports.vectors import VectorReports as VectorReports
    from ldpfl.mechanisms.scalar import Hybrid as Hybrid
    from ldpfl.mechanisms.scalar import Laplace as Laplace
    from ldpfl.mechanisms.scalar import Piecewise as Piecewise
    from ldpfl.mechanisms.settings import EpsilonSettings as EpsilonSettings
    from ldpfl.mechanisms.settings import Facts as Facts
    from ldpfl.mechanisms.settings import MechanismSettings as MechanismSettings
    from ldpfl.mechanisms.settings import Perturbed as Perturbed
    from ldpfl.mechanisms.settings import Training as Training
    from ldpfl.privacy.authors import is_built_in as is_built_in
    from ldpfl.util.randomness import as_source as as_source
    from ldpfl.util.randomness import draw_block as draw_block

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "BitReports": "ldpfl.mechanisms.reports.bits",
        "ByComparison": "ldpfl.mechanisms.comparing",
        "Comparison": "ldpfl.mechanisms.comparing",
        "ConstantNoise": "ldpfl.mechanisms.noise",
        "DenseReports": "ldpfl.mechanisms.reports.dense",
        "Duchi": "ldpfl.mechanisms.duchi",
        "DuchiVector": "ldpfl.mechanisms.duchi_vector",
        "EpsilonSettings": "ldpfl.mechanisms.settings",
        "Facts": "ldpfl.mechanisms.settings",
        "Gaussian": "ldpfl.mechanisms.gaussian",
        "Harmony": "ldpfl.mechanisms.harmony",
        "Hybrid": "ldpfl.mechanisms.scalar",
        "Identity": "ldpfl.mechanisms.identity",
        "IndexedBitReports": "ldpfl.mechanisms.reports.indexed",
        "Laplace": "ldpfl.mechanisms.scalar",
        "Mechanism": "ldpfl.mechanisms.base",
        "MechanismSettings": "ldpfl.mechanisms.settings",
        "MixedCoordinates": "ldpfl.mechanisms.reports.units",
        "Noise": "ldpfl.mechanisms.noise",
        "PerRecord": "ldpfl.mechanisms.hooks",
        "PerRound": "ldpfl.mechanisms.hooks",
        "Perturbed": "ldpfl.mechanisms.settings",
        "Piecewise": "ldpfl.mechanisms.scalar",
        "PrivUnitG": "ldpfl.mechanisms.privunit",
        "Properties": "ldpfl.mechanisms.properties",
        "PublicState": "ldpfl.mechanisms.base",
        "QuadraticNoise": "ldpfl.mechanisms.noise",
        "RecordClip": "ldpfl.mechanisms.record_clipping",
        "Refused": "ldpfl.mechanisms.base",
        "Reports": "ldpfl.mechanisms.reports.base",
        "SampledReports": "ldpfl.mechanisms.reports.sampled",
        "Training": "ldpfl.mechanisms.settings",
        "Units": "ldpfl.mechanisms.reports.units",
        "VectorBitReports": "ldpfl.mechanisms.duchi_vector",
        "VectorReports": "ldpfl.mechanisms.reports.vectors",
        "as_source": "ldpfl.util.randomness",
        "built": "ldpfl.mechanisms.registry",
        "count_ones": "ldpfl.mechanisms.reports.bits",
        "create": "ldpfl.mechanisms.registry",
        "draw_block": "ldpfl.util.randomness",
        "guarantee_of": "ldpfl.mechanisms.base",
        "is_built_in": "ldpfl.privacy.authors",
        "names": "ldpfl.mechanisms.registry",
        "payload_bits": "ldpfl.mechanisms.base",
        "privatize": "ldpfl.mechanisms.base",
        "read_settings": "ldpfl.mechanisms.registry",
        "read_valid": "ldpfl.mechanisms.base",
        "require_finite": "ldpfl.mechanisms.base",
        "settings_of": "ldpfl.mechanisms.registry",
        "total_clients": "ldpfl.mechanisms.base",
        "version_of": "ldpfl.mechanisms.registry",
        "with_defaults": "ldpfl.mechanisms.registry",
    },
)
__all__ = __dir__()
