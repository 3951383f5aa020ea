"""From a config's ``[mechanism]`` and ``[noise]`` to a noise schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.mechanisms.gaussian import (
    AdapLDP,
    Dpa,
    FullDP,
    LadpPaper,
    LadpSound,
    LayerSelection,
    LocalSteps,
    NbAFL,
    NoiseSchedule,
    SensitiveDP,
    Sensitivity,
    TimeVarying,
)


def is_scheduled(name: str) -> bool:
    """Tell whether the mechanism called ``name`` is Gaussian noise by a schedule."""
    return name in _BUILDERS


def schedule_of(config: RunConfig, smallest: int) -> NoiseSchedule:
    """Return the schedule that ``config`` names; ``smallest`` is the size of the smallest client's data set, taken to be public.

    Raises:
        ConfigError: a value is out of range, or settings that the schedule needs are missing or contradict it.
    """
    if config.mechanism.perturbed != "update":
        raise ConfigError(f'mechanism {config.mechanism.name!r} adds noise to updates: set mechanism.perturbed = "update"')
    if config.ranges.center != 0 or config.ranges.rule != "fixed":
        raise ConfigError(f"mechanism {config.mechanism.name!r} clips by norm and uses no ranges: leave ranges.center and ranges.rule out")
    return _BUILDERS[config.mechanism.name](config, smallest)


def _sensitivity(config: RunConfig, smallest: int) -> Sensitivity:
    mode = config.noise.sensitivity
    if mode == "update_clip":
        return Sensitivity(mode, norm=config.mechanism.norm)
    return Sensitivity(mode, _steps(config), samples=smallest)


def _steps(config: RunConfig) -> LocalSteps:
    training = config.training
    if training.clip_norm == "off":
        raise ConfigError(f"mechanism {config.mechanism.name!r} takes its sensitivity from clipped gradients: set training.clip_norm")
    return LocalSteps(training.learning_rate, training.epochs, training.batch_size, training.clip_norm)


def _full_dp(config: RunConfig, smallest: int) -> NoiseSchedule:
    return FullDP(**_shared(config, smallest))


def _nbafl(config: RunConfig, smallest: int) -> NoiseSchedule:
    noise = config.noise
    return NbAFL(
        config.mechanism.epsilon,
        noise.delta,
        config.mechanism.norm,
        smallest,
        noise.exposures,
        layers_separately=noise.layers_separately,
    )


def _time_varying(config: RunConfig, smallest: int) -> NoiseSchedule:
    return TimeVarying(**_shared(config, smallest), **_geometric(config), ratio=config.noise.ratio)


def _dpa(config: RunConfig, smallest: int) -> NoiseSchedule:
    return Dpa(**_shared(config, smallest), **_geometric(config), contraction=config.noise.contraction)


def _sensitive(config: RunConfig, smallest: int) -> NoiseSchedule:
    noise = config.noise
    return SensitiveDP(**_shared(config, smallest), lam=noise.own_share, kappa=noise.kappa, clip_to_estimate=noise.clip_to_estimate)


def _adapldp(config: RunConfig, smallest: int) -> NoiseSchedule:
    noise = config.noise
    return AdapLDP(
        config.mechanism.epsilon,
        noise.delta,
        _steps(config),
        noise.rate_decay,
        noise.degrees_bug,
        layers_separately=noise.layers_separately,
    )


def _ladp(config: RunConfig, smallest: int) -> NoiseSchedule:
    noise = config.noise
    selection = LayerSelection(noise.selection, noise.threshold)
    return LadpPaper(**_shared(config, smallest), selection=selection, p_max=noise.p_max, p_min=noise.p_min, normaliser=noise.normaliser)


def _ladp_sound(config: RunConfig, smallest: int) -> NoiseSchedule:
    noise = config.noise
    return LadpSound(
        config.mechanism.epsilon,
        noise.delta,
        config.mechanism.norm,
        noise.share_rule,
        noise.smallest_share,
        noise.p_min,
        noise.p_max,
        noise.normaliser,
        layers_separately=noise.layers_separately,
    )


def _shared(config: RunConfig, smallest: int) -> dict[str, Any]:
    """Return the settings of all schedules that have one sensitivity of the whole update."""
    return {
        "epsilon": config.mechanism.epsilon,
        "delta": config.noise.delta,
        "sensitivity": _sensitivity(config, smallest),
        "constant": None if config.noise.constant == "auto" else config.noise.constant,
        "layers_separately": config.noise.layers_separately,
    }


def _geometric(config: RunConfig) -> dict[str, Any]:
    noise = config.noise
    participations = None if noise.participations == "all" else noise.participations
    return {"rounds": config.training.rounds, "participations": participations, "variant": noise.variant}


_BUILDERS: Mapping[str, Callable[[RunConfig, int], NoiseSchedule]] = {
    "full-dp": _full_dp,
    "nbafl": _nbafl,
    "time-varying": _time_varying,
    "sensitive-dp": _sensitive,
    "dpa": _dpa,
    "adapldp": _adapldp,
    "ladp": _ladp,
    "ladp-sound": _ladp_sound,
}
