"""Local randomisers: what a client's report is, what the server learns from it, and what it costs."""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl.mechanisms.base import (
        Mechanism as Mechanism,
        PerRecord as PerRecord,
        PerRound as PerRound,
        PublicState as PublicState,
        Reports as Reports,
        guarantee_of as guarantee_of,
        payload_bits as payload_bits,
        privatize as privatize,
        read_valid as read_valid,
        require_finite as require_finite,
        total_clients as total_clients,
    )
    from ldpfl.mechanisms.duchi import Duchi as Duchi
    from ldpfl.mechanisms.duchi_vector import DuchiVector as DuchiVector
    from ldpfl.mechanisms.gaussian import Gaussian as Gaussian
    from ldpfl.mechanisms.harmony import Harmony as Harmony
    from ldpfl.mechanisms.identity import Identity as Identity
    from ldpfl.mechanisms.noise import ConstantNoise as ConstantNoise, Noise as Noise, QuadraticNoise as QuadraticNoise
    from ldpfl.mechanisms.privunit import PrivUnitG as PrivUnitG
    from ldpfl.mechanisms.properties import Properties as Properties
    from ldpfl.mechanisms.registry import (
        built as built,
        create as create,
        names as names,
        read_settings as read_settings,
        settings_of as settings_of,
        version_of as version_of,
        with_defaults as with_defaults,
    )
    from ldpfl.mechanisms.reports.bits import BitReports as BitReports, count_ones as count_ones
    from ldpfl.mechanisms.reports.dense import DenseReports as DenseReports
    from ldpfl.mechanisms.reports.sampled import SampledReports as SampledReports
    from ldpfl.mechanisms.reports.units import Units as Units
    from ldpfl.mechanisms.reports.vectors import VectorReports as VectorReports
    from ldpfl.mechanisms.scalar import Hybrid as Hybrid, Laplace as Laplace, Piecewise as Piecewise
    from ldpfl.mechanisms.settings import (
        EpsilonSettings as EpsilonSettings,
        Facts as Facts,
        MechanismSettings as MechanismSettings,
        Perturbed as Perturbed,
        Training as Training,
    )
    from ldpfl.privacy.authors import is_built_in as is_built_in
    from ldpfl.util.randomness import as_source as as_source, draw_block as draw_block

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "ldpfl.mechanisms.base": (
            "Mechanism",
            "PerRecord",
            "PerRound",
            "PublicState",
            "Reports",
            "guarantee_of",
            "payload_bits",
            "privatize",
            "read_valid",
            "require_finite",
            "total_clients",
        ),
        "ldpfl.mechanisms.duchi": ("Duchi",),
        "ldpfl.mechanisms.duchi_vector": ("DuchiVector",),
        "ldpfl.mechanisms.gaussian": ("Gaussian",),
        "ldpfl.mechanisms.harmony": ("Harmony",),
        "ldpfl.mechanisms.identity": ("Identity",),
        "ldpfl.mechanisms.noise": ("ConstantNoise", "Noise", "QuadraticNoise"),
        "ldpfl.mechanisms.privunit": ("PrivUnitG",),
        "ldpfl.mechanisms.properties": ("Properties",),
        "ldpfl.mechanisms.registry": ("built", "create", "names", "read_settings", "settings_of", "version_of", "with_defaults"),
        "ldpfl.mechanisms.reports.bits": ("BitReports", "count_ones"),
        "ldpfl.mechanisms.reports.dense": ("DenseReports",),
        "ldpfl.mechanisms.reports.sampled": ("SampledReports",),
        "ldpfl.mechanisms.reports.units": ("Units",),
        "ldpfl.mechanisms.reports.vectors": ("VectorReports",),
        "ldpfl.mechanisms.scalar": ("Hybrid", "Laplace", "Piecewise"),
        "ldpfl.mechanisms.settings": ("EpsilonSettings", "Facts", "MechanismSettings", "Perturbed", "Training"),
        "ldpfl.privacy.authors": ("is_built_in",),
        "ldpfl.util.randomness": ("as_source", "draw_block"),
    },
)
__all__ = __dir__()
