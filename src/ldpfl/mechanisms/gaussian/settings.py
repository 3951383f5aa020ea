"""Settings that Gaussian mechanisms share. Each schedule's module adds the settings of that schedule."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.gaussian.mechanism import Gaussian
from ldpfl.mechanisms.gaussian.schedule import NoiseSchedule
from ldpfl.mechanisms.gaussian.sensitivity import Constant, LocalSteps, Sensitivity, SensitivityMode
from ldpfl.mechanisms.settings import Facts, MechanismSettings, none_if_word
from ldpfl.util.quantities import Positive, Repeats, Share

Variant = Literal["equal_budget", "paper"]
"""``equal_budget``: (epsilon, delta) is for all rounds together, and the rounds' costs compose exactly to it.
``paper``: the first round's noise is that of Full DP at (epsilon, delta), so later rounds cost more."""


class GaussianSettings(MechanismSettings):
    """Settings of all mechanisms that add Gaussian noise to a client's update by a schedule."""

    perturbed: Literal["update"] = "update"
    """Noise is added to the change since the broadcast."""
    epsilon: Positive = 1.0
    """Budget of a client's round, at ``delta``."""
    budget: Literal["unit", "client"] = "unit"
    """``unit`` and ``client`` mean the same here, because all that a client sends is one unit."""
    delta: Share = 1e-5
    """Delta of a client's round, for ``epsilon``."""
    layers_separately: bool = False
    """Whether the paper's accounting adds up the costs of a client's layers, rather than averages them. It does not change the noise."""

    uses_ranges: ClassVar[bool] = False

    @abstractmethod
    def schedule(self, facts: Facts) -> NoiseSchedule:
        """Return the schedule, which decides the noise of each round, client and layer. Raises a ConfigError as :meth:`build` does."""

    def at_strength(self, strength: float) -> GaussianSettings:
        return self.model_copy(update={"epsilon": strength})  # a larger strength means less noise

    def build(self, facts: Facts) -> Gaussian:
        return Gaussian(self.schedule(facts))

    @property
    def epsilon_and_budget(self) -> tuple[float, str]:
        return self.epsilon, self.budget


class SensitivitySettings(GaussianSettings):
    """Settings of schedules that have one sensitivity of the whole update."""

    norm: Positive = 1.0
    """Clipping norm for ``sensitivity = "update_clip"``: a longer update is shortened to it."""
    sensitivity: SensitivityMode = "update_clip"
    """How far an update is assumed to move with the data. Only ``update_clip`` is proved, because it clips updates to ``norm``."""
    constant: Literal["auto"] | Constant = "auto"
    """How much noise an epsilon takes. ``auto`` is ``exact`` if the sensitivity is proved, else ``theorem3`` of LaDP-FL."""

    def shared(self, facts: Facts) -> dict[str, Any]:
        """Return the arguments that all these schedules have in common, by name."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "sensitivity": self._sensitivity(facts),
            "constant": none_if_word(self.constant, "auto"),
            "layers_separately": self.layers_separately,
        }

    def _sensitivity(self, facts: Facts) -> Sensitivity:
        """Return the sensitivity: from ``norm`` if updates are clipped, else from the local training in ``facts``."""
        if self.sensitivity == "update_clip":
            return Sensitivity(self.sensitivity, norm=self.norm)
        return Sensitivity(self.sensitivity, local_steps(self.name, facts), samples=facts.smallest)


class GeometricSettings(SensitivitySettings):
    """Settings of schedules whose noise changes by a factor a round."""

    variant: Variant = "equal_budget"
    """``equal_budget``: epsilon is for all rounds together. ``paper``: epsilon is for the first round."""
    participations: Repeats | Literal["all"] = "all"
    """Largest number of rounds that one client joins, for ``equal_budget``."""

    needs_training: ClassVar[bool] = True

    def shared(self, facts: Facts) -> dict[str, Any]:
        rounds = {"rounds": facts.rounds, "participations": none_if_word(self.participations, "all"), "variant": self.variant}
        return {**super().shared(facts), **rounds}


def local_steps(name: str, facts: Facts) -> LocalSteps:
    """Return the local training from which the sensitivity of mechanism ``name`` is computed.

    Raises:
        ConfigError: the training is unknown, is not plain SGD, or does not clip gradients.
    """
    training = facts.training
    if training is None:
        raise ConfigError(f"mechanism {name!r} computes its sensitivity from local training: use it in a run's config")
    if training.clip_norm is None:
        raise ConfigError(f"mechanism {name!r} computes its sensitivity from clipped gradients: set training.clip_norm")
    if not training.plain:
        raise ConfigError(f"mechanism {name!r} computes its sensitivity from plain SGD: leave out other client optimisers and schedules")
    return LocalSteps(training.learning_rate, training.epochs, training.batch_size, training.clip_norm)
