"""The interface of noise schedules: how much Gaussian noise is added to each layer of each client's update, round by round.

The schedules are in ``fixed``, ``history`` and ``ladp``; ``mechanism`` draws the noise and adds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms.base import PublicState, require_finite_block


@dataclass(frozen=True, eq=False)
class ClientState:
    """PRIVATE state of K clients after local training, before noise is added.

    Attributes:
        trained: (K, d) float32 trained weights.
        samples: (K,) int64 data set sizes.
        joined: (K,) int64 numbers of rounds joined before this one.
        memory: tensors (K, ...) by name, which ``remember`` last returned for these clients. Before their first round, these are their
            rows of ``initial_memory``.

    Raises:
        PrivacyError: wrong dtype or shape.
    """

    trained: Tensor
    samples: Tensor
    joined: Tensor
    memory: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if self.trained.dtype != torch.float32 or self.trained.dim() != 2:
            found = f"{self.trained.dtype} {tuple(self.trained.shape)}"
            raise PrivacyError(f"trained weights are {found}, expected float32 (clients, weights); nothing was sent")
        for name, rows in {"samples": self.samples, "joined": self.joined, **self.memory}.items():
            if rows.shape[:1] != self.trained.shape[:1]:
                raise PrivacyError(f"{name} has shape {tuple(rows.shape)}, expected one row a client; nothing was sent")


@dataclass(frozen=True)
class NoiseSchedule(ABC):
    """The amount of noise for each layer, the clipping of updates, and the guarantee that follows.

    Attributes:
        epsilon, delta: budget of one client's round, unless the schedule says otherwise.
        layers_separately: whether the paper's accounting adds up the costs of a client's layers, rather than takes their mean. Its slope
            of 3.6 a round suggests that the paper adds them up. It does not change the noise.
    """

    name: ClassVar[str]
    confidence: ClassVar[str]
    """How certain it is that the formula is that of the paper, and what was reconstructed."""
    assumptions: ClassVar[tuple[str, ...]] = ("broadcasts are public",)
    """Assumptions of the guarantee, apart from secret random bits."""

    deployable: ClassVar[bool] = False
    """Whether a client on Flower can use it: it needs only the client's update, no memory and no data set sizes of others."""

    epsilon: float
    delta: float
    layers_separately: bool = field(default=False, kw_only=True)

    @property
    def foreseeable(self) -> bool:
        """Whether the guarantee follows from public settings, rather than from the data or from how training goes."""
        return True

    @property
    def data_dependent(self) -> bool:
        """Whether sigma depends on private data, in which case no guarantee is known."""
        return True

    @abstractmethod
    def sigma(self, public: PublicState, clients: ClientState) -> Tensor:
        """Return the standard deviation (K, L) float64 of the noise, by client and layer; 0 where none is added.

        Raises:
            PrivacyError: weights that are NaN or infinite.
        """

    def clipped_updates(self, public: PublicState, clients: ClientState) -> Tensor:
        """Return the clients' updates (K, d) float32, to which noise will be added. An update is the change since the broadcast.

        Here nothing is clipped. A schedule whose guarantee needs clipping overrides this, and clips to :meth:`clipping_norms`.

        Raises:
            PrivacyError: weights that are NaN or infinite.
        """
        return require_finite_block(raw_update(public, clients))

    def clipping_norms(self, public: PublicState) -> Tensor | None:
        """Return the norm (1,), or each layer's norm (L,), float64, to which updates are clipped. None if they are not clipped."""
        return None

    def initial_memory(self, clients: int, dimension: int) -> dict[str, Tensor]:
        """Return the memory of ``clients`` clients before their first round, tensors (clients, ...) by name."""
        return {}

    def remember(self, public: PublicState, clients: ClientState, sent: Tensor) -> dict[str, Tensor]:
        """Return the new memory rows of these clients, which sent the noised update ``sent`` (K, d). Private."""
        return dict(clients.memory)

    def memory_after_round(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the memory of all clients after a round, from ``memory``, which has rows also for clients that did not take part."""
        return dict(memory)

    def correct(self, public: PublicState, clients: ClientState, sent: Tensor) -> Tensor:
        """Return the updates (K, d) that are sent, computed from the noised updates ``sent``.

        A schedule with a guarantee uses nothing private here, so the guarantee holds as it is (post-processing).
        """
        return sent

    @abstractmethod
    def mu(self, public: PublicState) -> float | None:
        """Return the exact Gaussian-DP parameter of a client's whole message when its data are replaced; None if none is known."""

    @abstractmethod
    def why_unproved(self) -> str:
        """Return in a few words why no guarantee is proved and :meth:`mu` is None. Empty if ``mu`` is a number."""

    def claimed_epsilon(self) -> float | None:
        """Return the epsilon that the paper claims for one round at ``delta``; None if the paper does not cover these settings."""
        return self.epsilon

    @abstractmethod
    def paper_epsilon(self, public: PublicState, sigma: Tensor) -> float:
        """Return the epsilon that the paper's accounting charges a client for a round with noise ``sigma`` (K, L), averaged over clients.

        A layer costs c D / sigma, with the constant c and the sensitivity D of its noise. A layer without noise costs nothing in the paper,
        although its true epsilon is infinite. The factor q = B / |D_k| of equation (18) is left out. Source: LaDP-FL, equations (17)-(19).
        Confidence: medium; low for which c is meant, and for what is counted separately.
        """

    def _mean_cost(self, numerator: float | Tensor, sigma: Tensor) -> float:
        """Return the mean over clients of a round's cost. A layer costs ``numerator`` / ``sigma``, or 0 if it gets no noise.

        The costs of a client's layers are added up if ``layers_separately``, else averaged.
        """
        costs = torch.where(sigma > 0, numerator / sigma, 0.0)
        return float((costs.sum(dim=1) if self.layers_separately else costs.mean(dim=1)).mean())


@dataclass(frozen=True)
class PublicSchedule(NoiseSchedule):
    """A schedule whose noise depends on public information only, because :meth:`public_sigma` is given nothing else."""

    @property
    @final
    def data_dependent(self) -> bool:
        return False

    @abstractmethod
    def public_sigma(self, public: PublicState) -> Tensor:
        """Return the standard deviation (L,) float64 of every client's noise."""

    @final
    def sigma(self, public: PublicState, clients: ClientState) -> Tensor:
        return self.public_sigma(public).repeat(clients.samples.shape[0], 1)


def raw_update(public: PublicState, clients: ClientState) -> Tensor:
    """Return the clients' updates (K, d): trained weights less the broadcast, neither clipped nor noised.

    Raises:
        PrivacyError: trained weights and broadcast have different dimensions.
    """
    if clients.trained.shape[1:] != public.weights.shape:
        shape, expected = tuple(clients.trained.shape), len(public.weights)
        raise PrivacyError(f"trained weights have shape {shape}, expected (clients, {expected}) as broadcast; nothing was sent")
    return clients.trained - public.weights


def same_for_all_layers(sigma: float, public: PublicState) -> Tensor:
    """Return ``sigma`` for each layer, (L,) float64."""
    return torch.full((len(public.sizes),), sigma, dtype=torch.float64)
