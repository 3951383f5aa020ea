"""What a person writes of a mechanism: a pydantic model for each, which knows how to build it."""

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
"""What a client puts into the mechanism: its trained weights, their change since the broadcast, or the descent direction there."""


Part = Literal["record", "person"]
"""A part of a client's data: a record, or all records of one person."""


@dataclass(frozen=True)
class Training:
    """What a client's local training consists of: learning rate eta, epochs E, batch size B, gradient norm C if gradients are clipped."""

    learning_rate: float
    epochs: int
    batch_size: int
    clip_norm: float | None = None
    plain: bool = True
    """Whether its steps are the gradients times the learning rate, and nothing else."""


@dataclass(frozen=True)
class Facts:
    """What everybody knows of a federation, as far as mechanisms are built from it.

    Attributes:
        ranges: of the first round.
        rounds: of training.
        smallest: size of the smallest client's data set, which is taken to be public.
        training: of each client; None where nothing is trained, as in planning.
        records: mean size of the clients' data sets, which is taken to be public; in persons, where these are protected.
        summed: whether the server learns nothing but sums over clients.
        clients: most clients whose reports are added up in a round; 0 where nobody said.
        part: what mechanisms that protect a part of a client's data are to protect: single records, or all records of a person.
    """

    ranges: LayerRanges
    rounds: int = 1
    smallest: int = 1
    training: Training | None = None
    records: float = 1.0
    summed: bool = False
    part: Part = "record"
    clients: int = 0


class MechanismSettings(BaseModel):
    """What all mechanisms' settings share. ``name`` says which mechanism they are of, and is a Literal in each."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    perturbed: Perturbed = "update"
    """``weights``: the trained weights, as in LDP-FL. ``update``: their change since the broadcast. ``gradient``: one step's direction
    of steepest descent at the broadcast weights, over all samples of the client (FedSGD): nothing is trained locally."""

    protects: ClassVar[bool] = True
    """Whether it means to protect anything; if not, it is its own noise-free baseline."""

    uses_ranges: ClassVar[bool] = True
    """Whether values are clamped to ranges, rather than clipped by their norm."""

    needs_training: ClassVar[bool] = False
    """Whether it can be built only for a training that is known: such mechanisms are not planned, audited or created by themselves."""

    @abstractmethod
    def build(self, facts: Facts) -> Mechanism:
        """Return the mechanism.

        Raises:
            ConfigError: a setting is out of range, or does not fit the facts.
        """

    def at_strength(self, strength: float) -> MechanismSettings:
        """Return the same mechanism with another amount of noise: what it guarantees weakens as ``strength`` grows.

        Raises:
            ConfigError: it has no parameter for that, or none of this value.
        """
        raise ConfigError(f"mechanism {self.name!r} has no parameter by which a target could be kept")

    def for_measuring(self, factor: float) -> MechanismSettings:
        """Return the mechanism that measures columns before training, with ``factor`` times the noise of a round if that can be set."""
        return self

    @property
    def unsaid(self) -> str:
        """What a simulation can count and a deployment has to be told, in a sentence; empty if there is nothing."""
        return ""

    @property
    def nearly_noise_free(self) -> MechanismSettings | None:
        """The same with next to no noise, where it does more to values than adding noise; None if its baseline is ``none``."""
        return None

    @property
    def budgeted(self) -> tuple[float, str] | None:
        """The epsilon that was asked for, and of what ("unit" or "client"); None where there is none."""
        return None


class EpsilonSettings(MechanismSettings):
    """Settings of mechanisms that spend an epsilon on each unit of a report: a weight, a group, or the whole vector."""

    epsilon: Positive = 1.0
    """Budget of what ``budget`` says, in one round."""
    budget: Literal["unit", "client"] = "unit"
    """``unit``: ``epsilon`` is for one weight, group, or the whole vector, as the mechanism has it. ``client``: it is for all that a
    client sends in one round, divided evenly over its units; so mechanisms of different units can be compared."""

    def at_strength(self, strength: float) -> EpsilonSettings:
        return self.model_copy(update={"epsilon": strength})

    @abstractmethod
    def at(self, epsilon: float) -> Mechanism:
        """Return the mechanism that spends ``epsilon`` on each unit."""

    def build(self, facts: Facts) -> Mechanism:
        try:
            mechanism = self.at(self.epsilon)
        except ConfigError as error:
            raise ConfigError(f"mechanism {self.name!r}, {error}") from None
        if self.budget == "unit":
            return mechanism
        units = mechanism.release(facts.ranges).units
        try:
            return self.at(self.epsilon / units)
        except ConfigError as error:
            raise ConfigError(f"mechanism.epsilon {self.epsilon:g} a client, divided over {units:,} units: {error}") from None

    @property
    def budgeted(self) -> tuple[float, str]:
        return self.epsilon, self.budget


def as_none(value: Any, word: str) -> Any:
    """Return None where a setting has the ``word`` that stands for it in a config, which knows no None."""
    return None if value == word else value
