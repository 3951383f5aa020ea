"""Find the noise with which a whole run keeps a target, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import floor, inf, log10

from ldpfl.errors import ConfigError
from ldpfl.experiments.build import as_usual, measuring_mechanism, mechanism_of, model_of
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.dataset import NOTHING, Given, described
from ldpfl.experiments.planned_ledger import planned_ledger, start_of
from ldpfl.experiments.planning.search import smallest
from ldpfl.experiments.table_rules import clip_norm_for
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.hooks import in_round
from ldpfl.privacy import Ledger
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.privacy.authors import released
from ldpfl.privacy.statement import run_epsilon
from ldpfl.util.number_format import number
from ldpfl.util.user_code import GIVEN

_WEAKEST, _STRONGEST = 1e-6, 1e4
_DIGITS = 4
_PRECISE = 1e-3


def settled(config: RunConfig, given: Given = NOTHING) -> RunConfig:
    """Return ``config`` with as many clients as its data name, and as little noise as keeps its ``privacy.target_epsilon``.

    Without such data, or without a target, that part is as it is; ``given`` is what a caller handed over.

    What is protected, and against whom, is what the config says: its mechanism and channel; the best line of the ledger counts, as in
    the verdict of a run. The parameter that is set has four digits, rounded to the side of more noise.

    Raises:
        ConfigError: the mechanism has no parameter to set, or none reaches the target.
    """
    if config.data.brought and (clients := described(config, given).clients) is not None:
        config = config.model_copy(update={"clients": config.clients.model_copy(update={"count": clients})})
    if getattr(config.mechanism, "clip_norm", None) == "auto":
        return _with_norm(settled(_clipped_to(config, 1.0), given), given)  # noise is a multiple of the norm, and so is known before it
    if config.privacy.target_epsilon == "off":
        return config
    # Who takes part in which round follows from the seed; where all do, or each once, that changes nothing.
    plain = config.clients.fraction == 1 and config.clients.self_sampling == "off"
    alike = config.model_copy(update={"name": "", "description": "", **({"seed": 0} if plain else {})})
    strength = _searched(alike, given) if config.data.brought or config.model.name == GIVEN else _strength(alike.to_toml())
    return config.model_copy(update={"mechanism": config.mechanism.at_strength(strength)})


def _with_norm(config: RunConfig, given: Given) -> RunConfig:
    data = described(config, given)
    with as_usual():
        return _clipped_to(config, clip_norm_for(config, data, model_of(config, data, given.module)))


def _clipped_to(config: RunConfig, norm: float) -> RunConfig:
    return config.model_copy(update={"mechanism": config.mechanism.model_copy(update={"clip_norm": norm})})


@lru_cache(maxsize=256)
def _strength(text: str) -> float:
    return _searched(parse_config(text, origin="calibration"), NOTHING)


def _searched(config: RunConfig, given: Given) -> float:
    target = config.privacy.target_epsilon
    assert target != "off"  # noqa: S101  # for mypy
    guaranteed = _guaranteed(config, given)
    try:
        guess = _guess(guaranteed, target, config.privacy.delta)
        inverse = smallest(lambda x: guaranteed(1 / x), 1 / guess, target, 1 / _STRONGEST, 1 / _WEAKEST, _PRECISE)
    except _OutOfRange as error:
        raise ConfigError(_out_of_reach(config, guaranteed, str(error))) from error
    if inverse is None:
        raise ConfigError(_out_of_reach(config, guaranteed, ""))
    return _rounded_down(1 / inverse)


class _OutOfRange(ConfigError):
    """A mechanism takes no such noise."""


def _out_of_reach(config: RunConfig, guaranteed: Callable[[float], float], why: str) -> str:
    """Return the message that no noise keeps the target, with what some does; ``why`` is what the mechanism says of more noise or less."""
    target, mechanism = config.privacy.target_epsilon, config.mechanism.name
    reachable = {strength: found for strength in _ends(guaranteed) if (found := guaranteed(strength)) < inf}
    limits = f": {mechanism} reaches about {number(min(reachable.values()))} to {number(max(reachable.values()))} here" if reachable else ""
    advice = "set another target_epsilon; more clients or fewer rounds lower what is reached"
    return f"target_epsilon = {target:g} is out of reach{limits}{f' ({why})' if why else ''}; {advice}"


def _ends(guaranteed: Callable[[float], float]) -> list[float]:
    """Return the weakest and the strongest power of ten that the mechanism takes."""
    powers = [10.0**power for power in range(round(log10(_WEAKEST)), round(log10(_STRONGEST)) + 1)]
    taken = []
    for order in (powers, powers[::-1]):
        for strength in order:
            with suppress(_OutOfRange):
                guaranteed(strength)
                taken.append(strength)
                break
    return taken


def _guaranteed(config: RunConfig, given: Given) -> Callable[[float], float]:
    """Return what says which epsilon holds for the run when the mechanism has a given strength."""
    ledger, (weights, ranges) = planned_ledger(config, given), start_of(config, given)

    def guaranteed(strength: float) -> float:
        changed_config = config.model_copy(update={"mechanism": config.mechanism.at_strength(strength)})
        try:
            mechanism = mechanism_of(changed_config, ranges)
        except ConfigError as error:
            raise _OutOfRange(str(error)) from error
        histogram = released(measuring_mechanism(changed_config, mechanism), ranges)
        changed = Ledger()
        for event in ledger.events:
            bound = in_round(mechanism, PublicState(event.round, weights, None, ranges.sizes))
            release = histogram if event.histograms else released(bound, ranges, mechanism)
            if event.round > ledger.measured and event.histograms:  # of what clients measure, whose noise has an epsilon of its own
                release = event.release
            changed = changed.charge(replace(event, release=release))
        return run_epsilon(changed, config.privacy.delta)

    return guaranteed


def _guess(guaranteed: Callable[[float], float], target: float, delta: float) -> float:
    """Return about the right strength: where noise is normal, and little is told by each report, mu is proportional to it."""
    strength = 0.1
    for _ in range(2):
        reached = guaranteed(strength)
        if 0 < reached < inf:
            strength *= gaussian_mu(target, delta) / gaussian_mu(reached, delta)
    return min(max(strength, _WEAKEST), _STRONGEST)


def _rounded_down(value: float) -> float:
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    return float(f"{floor(value / step + 1e-9) * step:.{_DIGITS}g}")
