"""Find the smallest noise with which a whole run keeps a target epsilon, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import floor, inf, log10

from ldpfl.errors import ConfigError
from ldpfl.experiments.build import measuring_mechanism, mechanism_of, model_of, with_torch_defaults
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.dataset import NO_CALLER_OBJECTS, CallerObjects, describe_data
from ldpfl.experiments.planned_ledger import initial_weights_and_ranges, planned_ledger
from ldpfl.experiments.planning.search import MAX_STRENGTH, MIN_STRENGTH, STRENGTH_TOLERANCE, reachable_range, smallest_argument
from ldpfl.experiments.table_rules import clip_norm_for
from ldpfl.mechanisms.base import PublicState, in_round
from ldpfl.privacy import Ledger
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.privacy.authors import released
from ldpfl.util.user_code import GIVEN

_DIGITS = 4
"""Number of digits of a strength in a config."""


def resolve_settings(config: RunConfig, caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> RunConfig:
    """Return ``config`` with values for the settings that depend on its data and its target.

    - ``clients.count`` becomes the number of clients that the data name. If they name none, it is unchanged.
    - A clipping norm of "auto" becomes a number.
    - The mechanism's noise becomes the least noise with which the run keeps ``privacy.target_epsilon``. Without a target, it is unchanged.
      The noise parameter has four digits, rounded toward more noise.

    The mechanism and the channel of the config decide what is protected, and against whom. The best guarantee in the statement counts, as
    in the verdict of a run.

    Args:
        caller_objects: data or a model that a caller passes from Python.

    Raises:
        ConfigError: the mechanism's noise cannot be set, or no noise reaches the target.
    """
    if config.data.brought and (clients := describe_data(config, caller_objects).clients) is not None:
        config = config.model_copy(update={"clients": config.clients.model_copy(update={"count": clients})})
    if getattr(config.mechanism, "clip_norm", None) == "auto":
        # Noise is a multiple of the clipping norm, so epsilon does not depend on the norm. The multiple is found first, with norm 1.
        return _with_automatic_clip_norm(resolve_settings(_with_clip_norm(config, 1.0), caller_objects), caller_objects)
    if config.privacy.target_epsilon == "off":
        return config
    # The seed decides who takes part in which round. It has no effect if all clients do, or each takes part once.
    seed_matters = config.clients.fraction != 1 or config.clients.self_sampling != "off"
    # Settings without effect get one value, so that configs that differ only in them share a cached strength (of the mechanism).
    common_config = config.model_copy(update={"name": "", "description": "", "seed": config.seed if seed_matters else 0})
    cacheable = not config.data.brought and config.model.name != GIVEN  # a config does not identify a user's rows or a passed model
    strength = _cached_strength(common_config.to_toml()) if cacheable else _find_strength(common_config, caller_objects)
    return config.model_copy(update={"mechanism": config.mechanism.at_strength(strength)})


def _with_automatic_clip_norm(config: RunConfig, caller_objects: CallerObjects) -> RunConfig:
    """Return ``config`` with the clipping norm that suits its model and data."""
    data = describe_data(config, caller_objects)
    with with_torch_defaults():
        return _with_clip_norm(config, clip_norm_for(config, data, model_of(config, data, caller_objects.module)))


def _with_clip_norm(config: RunConfig, norm: float) -> RunConfig:
    return config.model_copy(update={"mechanism": config.mechanism.model_copy(update={"clip_norm": norm})})


@lru_cache(maxsize=256)
def _cached_strength(toml: str) -> float:
    """Return the strength for the config in ``toml``. TOML is the cache's key, since a config cannot be hashed."""
    return _find_strength(parse_config(toml, origin="calibration"), NO_CALLER_OBJECTS)


def _find_strength(config: RunConfig, caller_objects: CallerObjects) -> float:
    """Return the largest strength of the mechanism, rounded down, with which a run of ``config`` keeps its target epsilon.

    A larger strength means less noise. The search varies 1 / strength, because it needs a decreasing function.
    """
    target = config.privacy.target_epsilon
    assert target != "off"  # noqa: S101  # for mypy
    epsilon_of = _epsilon_by_strength(config, caller_objects)
    try:
        guess = _guess_strength(epsilon_of, target, config.privacy.delta)
        inverse = smallest_argument(lambda x: epsilon_of(1 / x), 1 / guess, target, 1 / MAX_STRENGTH, 1 / MIN_STRENGTH, STRENGTH_TOLERANCE)
    except _OutOfRange as error:
        raise ConfigError(_unreachable_message(config, epsilon_of, str(error))) from error
    if inverse is None:
        raise ConfigError(_unreachable_message(config, epsilon_of, ""))
    return _rounded_down(1 / inverse)


class _OutOfRange(ConfigError):
    """The mechanism does not accept this much, or this little, noise."""


def _unreachable_message(config: RunConfig, epsilon_of: Callable[[float], float], reason: str) -> str:
    """Return the message that no noise keeps the target, with the range of epsilon that can be reached.

    ``epsilon_of`` is the run's epsilon as a function of the mechanism's strength. ``reason`` is the mechanism's own error; "" without one.
    """
    target, mechanism = config.privacy.target_epsilon, config.mechanism.name
    reachable = reachable_range(epsilon_of)
    limits = f": {mechanism} reaches about {reachable} here" if reachable else ""
    advice = "set another target_epsilon; more clients or fewer rounds lower the epsilon that is reached"
    return f"target_epsilon = {target:g} is out of reach{limits}{f' ({reason})' if reason else ''}; {advice}"


def _epsilon_by_strength(config: RunConfig, caller_objects: CallerObjects) -> Callable[[float], float]:
    """Return a function from the mechanism's strength (a larger one means less noise) to the run's epsilon.

    Planning a ledger takes long, so it is planned once. The function replaces the mechanism in each event of the ledger.
    """
    ledger, (weights, ranges) = planned_ledger(config, caller_objects), initial_weights_and_ranges(config, caller_objects)

    def epsilon_of(strength: float) -> float:
        """Return the epsilon of the run if its mechanism has this ``strength``; raise :class:`_OutOfRange` if it does not accept it."""
        changed_config = config.model_copy(update={"mechanism": config.mechanism.at_strength(strength)})
        try:
            mechanism = mechanism_of(changed_config, ranges)
        except ConfigError as error:
            raise _OutOfRange(str(error)) from error
        histogram = released(measuring_mechanism(changed_config, mechanism), ranges)
        changed_ledger, histograms_so_far = Ledger(), 0  # training rounds and histograms are numbered together in a ledger
        for event in ledger.events:
            if event.histograms:
                histograms_so_far += 1
                # The first ``ledger.measured`` events are histograms that measure columns. Later ones are evaluations at clients, whose
                # noise is set by ``evaluation.epsilon`` and stays as it is.
                release = event.release if event.round > ledger.measured else histogram
            else:
                training_round = event.round - histograms_so_far
                release = released(in_round(mechanism, PublicState(training_round, weights, None, ranges.sizes)), ranges, mechanism)
            # The author is the one whose code a release rests on, which the amount of noise does not change.
            changed_ledger = changed_ledger.charge(replace(event, release=replace(release, author=event.release.author)))
        return run_epsilon(changed_ledger, config.privacy.delta)

    return epsilon_of


def _guess_strength(epsilon_of: Callable[[float], float], target: float, delta: float) -> float:
    """Return a first guess of the strength at which the run's epsilon is ``target``, within the range of the search.

    A larger strength is less noise, so a larger mu, the parameter of Gaussian differential privacy. The guess takes mu to be proportional
    to the strength. That is true only roughly, so the guess is corrected once.
    """
    strength = 0.1  # any start will do, since the guess is corrected
    for _ in range(2):
        reached = epsilon_of(strength)
        if 0 < reached < inf:
            strength *= gaussian_mu(target, delta) / gaussian_mu(reached, delta)
    return min(max(strength, MIN_STRENGTH), MAX_STRENGTH)


def _rounded_down(value: float) -> float:
    """Return ``value`` rounded down to ``_DIGITS`` digits.

    A value of at most ``_DIGITS`` digits must stay as it is, although ``value / step`` may come out a little too small: hence the 1e-9. It
    also rounds up a value that lies less than 1e-9 steps below, by less than 1e-12 of the value.
    """
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    return float(f"{floor(value / step + 1e-9) * step:.{_DIGITS}g}")  # the format removes the product's rounding error
