"""Settings of mechanisms in a config: a pydantic model for each mechanism, which can build it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.base import Mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.util.quantities import Positive

Perturbed = Literal["weights", "update", "gradient"]
"""What a client randomises: its trained weights, their difference from the server's weights, or a gradient at the server's weights."""


Part = Literal["record", "person"]
"""A part of a client's data: a record, or all records of one person."""


@dataclass(frozen=True)
class Training:
    """A client's local training: learning rate eta, epochs E, batch size B, and clipping norm C if gradients are clipped."""

    learning_rate: float
    epochs: int
    batch_size: int
    clip_norm: float | None = None
    plain: bool = True
    """Whether training is plain SGD: each step is the gradient times the learning rate."""


@dataclass(frozen=True)
class Facts:
    """Public facts about a federation that mechanisms are built from.

    Attributes:
        ranges: clipping ranges of the first round.
        rounds: number of training rounds.
        smallest: size of the smallest client's data set, which is assumed to be public.
        training: local training of each client; None if nothing is trained, as in planning.
        records: mean size of the clients' data sets, which is assumed to be public. In persons, if persons are protected.
        summed: whether the server learns only sums over clients.
        clients: largest number of clients whose reports are added up in a round; 0 if unknown.
        part: the unit that mechanisms for a part of a client's data protect: single records, or all records of a person.
        adaptive: whether the clipping norm follows a quantile of the norms.
    """

    ranges: LayerRanges
    rounds: int = 1
    smallest: int = 1
    training: Training | None = None
    records: float = 1.0
    summed: bool = False
    part: Part = "record"
    clients: int = 0
    adaptive: bool = False


class MechanismSettings(BaseModel):
    """Base class of all mechanisms' settings. ``name`` is the mechanism's name, a Literal in each subclass."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    perturbed: Perturbed = "update"
    """``weights``: the trained weights, as in LDP-FL. ``update``: their change since the broadcast. ``gradient``: one step's direction
    of steepest descent at the broadcast weights, over all samples of the client (FedSGD): nothing is trained locally."""

    protects: ClassVar[bool] = True
    """Whether the mechanism is meant to protect anything. If not, it is itself a noise-free baseline."""

    uses_ranges: ClassVar[bool] = True
    """Whether values are clipped to ranges, rather than by their norm."""

    needs_training: ClassVar[bool] = False
    """Whether the mechanism can be built only for a known training. Such mechanisms are not planned, audited or created on their own."""

    sends_bits: ClassVar[bool] = False
    """Whether a report consists of randomised bits, whose cost behind a shuffler accountants can add to that of other bits."""

    @abstractmethod
    def build(self, facts: Facts) -> Mechanism:
        """Return the mechanism.

        Raises:
            ConfigError: a setting is out of range, or does not fit the facts.
        """

    def at_strength(self, strength: float) -> MechanismSettings:
        """Return these settings with another amount of noise. A larger ``strength`` means less noise and a weaker guarantee.

        Raises:
            ConfigError: the mechanism has no parameter for its noise, or the value is out of range.
        """
        raise ConfigError(f"mechanism {self.name!r} has no noise setting that privacy.target_epsilon could set: leave the target out")

    def for_measuring(self, factor: float) -> MechanismSettings:
        """Return the settings for measuring a table's columns before training: ``factor`` times the noise, if the noise can be set."""
        return self

    @property
    def missing_setting_message(self) -> str:
        """Error message about a missing setting that a simulation computes and a deployment cannot; empty if none is missing."""
        return ""

    @property
    def nearly_noise_free(self) -> MechanismSettings | None:
        """These settings with negligible noise, as the baseline of a mechanism that transforms values. None: its baseline is ``none``."""
        return None

    @property
    def epsilon_and_budget(self) -> tuple[float, str] | None:
        """The configured epsilon, and whether it is for each "unit" of a report or for the "client"; None if there is no epsilon."""
        return None


class EpsilonSettings(MechanismSettings):
    """Settings of mechanisms that spend an epsilon on each unit of a report: a weight, a group, or the whole vector."""

    epsilon: Positive = 1.0
    """Epsilon of one round, for each unit of a report or for the client, as ``budget`` says."""
    budget: Literal["unit", "client"] = "unit"
    """``unit``: ``epsilon`` is for each weight, each group or the whole vector, depending on the mechanism. ``client``: ``epsilon`` is for
    all that a client sends in one round, and is divided evenly over its units. So mechanisms of different units can be compared."""

    def at_strength(self, strength: float) -> EpsilonSettings:
        return self.model_copy(update={"epsilon": strength})  # a larger strength means less noise

    @abstractmethod
    def at(self, epsilon: float) -> Mechanism:
        """Return the mechanism that spends ``epsilon`` on each unit."""

    def build(self, facts: Facts) -> Mechanism:
        """Return the mechanism. If ``budget`` is ``client``, divide ``epsilon`` evenly over the units of a report."""
        try:
            mechanism = self.at(self.epsilon)  # the result for ``unit``; for ``client`` it only tells the number of units
        except ConfigError as error:
            raise ConfigError(f"mechanism {self.name!r}, {error}") from None
        if self.budget == "unit":
            return mechanism
        units = mechanism.release(facts.ranges).units
        try:
            return self.at(self.epsilon / units)
        except ConfigError as error:
            raise ConfigError(f"mechanism.epsilon is {self.epsilon:g} for each client, divided over {units:,} units: {error}") from None

    @property
    def epsilon_and_budget(self) -> tuple[float, str]:
        return self.epsilon, self.budget


def none_if_word(value: Any, word: str) -> Any:
    """Return None if ``value`` is the ``word`` that stands for None in a config (TOML has no None), else ``value``."""
    return None if value == word else value
