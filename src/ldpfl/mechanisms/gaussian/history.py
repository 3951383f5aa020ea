"""Schedules that depend on earlier rounds: Sensitive DP and AdapLDP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.gaussian.fixed import SensitivitySchedule
from ldpfl.mechanisms.gaussian.norms import blocks, clip_rows, layer_slices, row_norms
from ldpfl.mechanisms.gaussian.schedule import ClientState, NoiseSchedule, raw_update, same_for_all_layers
from ldpfl.mechanisms.gaussian.sensitivity import LocalSteps, require_positive, require_share, require_usable, usable_sigma
from ldpfl.mechanisms.gaussian.settings import GaussianSettings, SensitivitySettings, local_steps
from ldpfl.mechanisms.settings import Facts
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.util.quantities import Positive

_MIN_SHARE = 1e-3
"""Smallest estimate of the sensitivity, relative to D, so that a model that does not move still gets noise."""

_INITIAL_SCALER, _MIN_SCALER = 1e-3, 1e-12
"""AdapLDP's scaler c_i before the first round, and the smallest c_i that is used in the logarithm."""

_MAX_CORRECTION = 0.02
"""Largest relative change of a weight by AdapLDP's correction."""

_DEGREES_PER_RADIAN = 180 / torch.pi


@dataclass(frozen=True)
class SensitiveDP(SensitivitySchedule):
    """Scale the noise with an estimate Dhat of the sensitivity, from how far models moved: sigma = c Dhat / epsilon.

    Dhat = min(D, kappa (lam |client's change in its last round| + (1 - lam) |change of the broadcast|)), at least D / 1000, where D is
    that of ``sensitivity``. While there is no earlier broadcast, and for ``lam`` > 0 in a client's first round, it is D.

    Guarantee: none, because Dhat is no bound, and depends on private data unless ``lam`` is 0. With ``clip_to_estimate`` and ``lam`` 0, it
    is mu = Dhat / sigma for a client's whole message under replacement of its data, because the update is clipped to Dhat / 2, and Dhat
    depends only on broadcasts. Source: the idea of Xue et al. 2023 (TIFS). No formula of that paper was at hand.

    Attributes:
        lam: weight of the client's own movement, in [0, 1].
        kappa: factor on the estimate.
        clip_to_estimate: whether updates are clipped to Dhat / 2, so that Dhat becomes a bound; needs ``lam`` 0.

    Raises:
        ConfigError: a value out of range.
    """

    name: ClassVar[str] = "sensitive-dp"
    confidence: ClassVar[str] = "low: a surrogate, no formula of the paper was at hand"

    lam: float = 0.5
    kappa: float = 1.0
    clip_to_estimate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("kappa", self.kappa)
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"lam must lie in [0, 1], got {self.lam}")
        if self.clip_to_estimate and self.lam != 0:
            raise ConfigError(f"clip_to_estimate needs lam = 0, got {self.lam}: else private values would decide how much is clipped")
        require_usable(self.full_sigma * _MIN_SHARE)  # the smallest noise

    @property
    def data_dependent(self) -> bool:
        return self.lam != 0  # otherwise the estimate depends on broadcasts alone

    @property
    def foreseeable(self) -> bool:
        return self.clip_to_estimate  # otherwise the guarantee depends on how far models move

    @property
    def proved(self) -> bool:
        return self.clip_to_estimate  # clipping makes the estimate a bound

    def public_sensitivity(self, public: PublicState) -> float:
        """Return the estimate Dhat for ``lam`` 0, which depends on broadcasts alone."""
        if public.previous is None:
            return self.sensitivity.value
        return float(self._clamped_estimate(self.kappa * _broadcast_change(public)))

    def sigma(self, public: PublicState, clients: ClientState) -> Tensor:
        """Return c Dhat / epsilon of each client, the same in all layers, (K, L). The class says what the estimate Dhat is."""
        if not self.data_dependent:
            sigma = self.c * self.public_sensitivity(public) / self.epsilon
            return same_for_all_layers(sigma, public).repeat(clients.samples.shape[0], 1)
        estimates = torch.full((clients.samples.shape[0],), self.sensitivity.value, dtype=torch.float64)
        if public.previous is not None:
            movement = self.lam * clients.memory["moved"] + (1 - self.lam) * _broadcast_change(public)
            # A client's first round keeps the upper bound D, because the client has not moved yet.
            estimates = torch.where(clients.joined > 0, self._clamped_estimate(self.kappa * movement), estimates)
        return (self.c * estimates / self.epsilon)[:, None].repeat(1, len(public.sizes))

    def clipped_updates(self, public: PublicState, clients: ClientState) -> Tensor:
        if self.clip_to_estimate:
            return clip_rows(raw_update(public, clients), public.sizes, self.public_sensitivity(public) / 2)
        return super().clipped_updates(public, clients)

    def clipping_norms(self, public: PublicState) -> Tensor | None:
        if self.clip_to_estimate:
            return torch.tensor([self.public_sensitivity(public) / 2], dtype=torch.float64)
        return super().clipping_norms(public)

    def initial_memory(self, clients: int, dimension: int) -> dict[str, Tensor]:
        """Return the norm of each client's last update, which is 0 before its first. Empty if the estimate does not use these norms."""
        return {"moved": torch.zeros(clients, dtype=torch.float64)} if self.data_dependent else {}

    def remember(self, public: PublicState, clients: ClientState, sent: Tensor) -> dict[str, Tensor]:
        """Return the norm of each client's update, for the next estimate of the sensitivity. Empty if that does not use these norms."""
        return {"moved": row_norms(raw_update(public, clients), public.sizes)} if self.data_dependent else {}

    def mu(self, public: PublicState) -> float | None:
        # Updates are clipped to the estimate that scales the noise, so mu is constant. Without clipping, a round's cost would
        # depend on earlier releases, and the accountants here add up only costs that are fixed beforehand.
        return self.epsilon / self.c if self.clip_to_estimate else None

    def why_unproved(self) -> str:
        if self.data_dependent:
            return "the noise depends on how far the client's own weights moved"
        return "" if self.proved else "how large the noise is follows from what was released before, and no accountant here adds that up"

    def paper_epsilon(self, public: PublicState, sigma: Tensor) -> float:
        """Return ``epsilon`` for each layer, added up or averaged: the noise sigma is c D / epsilon for the estimated sensitivity D."""
        return self._mean_cost(self.epsilon * sigma, sigma)

    def _clamped_estimate(self, estimate: Tensor) -> Tensor:
        """Clamp an ``estimate`` of the sensitivity to between D / 1000 and D, the upper bound."""
        return estimate.clamp(_MIN_SHARE * self.sensitivity.value, self.sensitivity.value)


class SensitiveDPSettings(SensitivitySettings):
    """Settings of ``sensitive-dp``."""

    name: Literal["sensitive-dp"] = "sensitive-dp"
    own_share: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.5
    """Weight of the client's own history in the estimate."""
    kappa: Positive = 1.0
    """Factor on the estimate."""
    clip_to_estimate: bool = False
    """Whether updates are clipped to the estimate."""

    needs_training: ClassVar[bool] = True

    def schedule(self, facts: Facts) -> SensitiveDP:
        return SensitiveDP(**self.shared(facts), lam=self.own_share, kappa=self.kappa, clip_to_estimate=self.clip_to_estimate)


def _broadcast_change(public: PublicState) -> Tensor:
    """Return the L2 norm of the change between the last two broadcasts, float64; zero in round 1."""
    if public.previous is None:
        return torch.zeros((), dtype=torch.float64)
    return row_norms((public.weights - public.previous)[None], public.sizes)[0]


@dataclass(frozen=True)
class AdapLDP(NoiseSchedule):
    """Noise that rescales delta by how far a client's weights moved, and a correction of the direction afterwards.

    sigma = sqrt(2 ln(1.25 / (delta c_i))) 2 lr_i C / (|D_i| epsilon) for client i, its learning rate lr_i and data set D_i. c_i starts at
    0.001. From round 2 on, participants take 0.6 |c_i| + 0.4 |w_i - w| / lr_i, where w_i are the client's trained weights and w the
    broadcast. After each round the c_i of all clients are replaced by their z-scores (whose mean, which the formula subtracts, is zero).
    lr_i has decayed at each of the client's optimiser steps so far, this round's included. For the logarithm, c_i is clamped to
    [1e-12, 1 / delta], beyond which it means nothing. As the rate decays, c_i does get there.

    From a client's second round on, it sends v (1 + I) instead of its noised weights v. Let u be the product of the client's and the
    broadcast's last changes, coordinate by coordinate, over the product of their norms in the layer + 1e-4. The paper means I = 0.02 u.
    ``degrees_bug`` keeps what the authors' program computes. It takes the degrees of arccos(u) for radians, so I is 0.02 times the
    cosine of a wrong angle: about -0.00896 for almost every weight.

    Guarantee: none; c_i is private, and the sensitivity is not a bound. Source: Yue et al. 2025 (IEEE TMC 24(6)) and the authors'
    program. Clients' memory holds d weights each.

    Attributes:
        epsilon: budget of one round: that of the paper, divided by the fraction of clients in a round and the number of epochs.
        delta: not split over rounds, as in the paper.
        steps: local training; ``clip_norm`` is C.
        decay: factor on the learning rate at each step, in (0, 1].
        degrees_bug: whether the correction is as in the authors' program, see above.

    Raises:
        ConfigError: a value out of range.
        PrivacyError: the decayed learning rate leaves no usable noise.
    """

    name: ClassVar[str] = "adapldp"
    confidence: ClassVar[str] = "high: read in the authors' program; which steps have decayed the rate at the time is medium"

    steps: LocalSteps
    decay: float = 0.995
    degrees_bug: bool = True

    def __post_init__(self) -> None:
        gaussian_mu(self.epsilon, self.delta)  # raises if epsilon or delta is out of range
        require_share("decay", self.decay, one_allowed=True)

    def sigma(self, public: PublicState, clients: ClientState) -> Tensor:
        """Return sqrt(2 ln(1.25 / (delta c_i))) 2 lr_i C / (|D_i| epsilon) of each client i, the same for all layers, (K, L).

        c_i is the client's scaler, lr_i its learning rate, |D_i| its data set size, and C the clipping norm of gradients. This is the
        classical Gaussian noise for a sensitivity of 2 lr_i C / |D_i|, at a delta that the scaler enlarges or reduces.
        """
        scalers = self._scalers(public, clients).clamp(_MIN_SCALER, 1 / self.delta)  # then 1.25 / (delta c_i) > 1, and its logarithm > 0
        constants = (2 * (1.25 / (self.delta * scalers)).log()).sqrt()
        sensitivities = 2 * self._learning_rates(clients) * self.steps.clip_norm / clients.samples
        sigma = constants * sensitivities / self.epsilon
        if not usable_sigma(float(sigma.min())) or not usable_sigma(float(sigma.max())):
            raise PrivacyError(
                "AdapLDP's learning rate has decayed until its noise is too small; nothing was sent (set mechanism.rate_decay closer to 1)"
            )
        return sigma[:, None].repeat(1, len(public.sizes))

    def initial_memory(self, clients: int, dimension: int) -> dict[str, Tensor]:
        """Return for each client its scaler c_i, and the weights that it sent last."""
        return {"scaler": torch.full((clients,), _INITIAL_SCALER, dtype=torch.float64), "sent": torch.zeros(clients, dimension)}

    def remember(self, public: PublicState, clients: ClientState, sent: Tensor) -> dict[str, Tensor]:
        """Return each client's scaler c_i, and the weights that it sent, for its next round."""
        return {"scaler": self._scalers(public, clients), "sent": public.weights + sent}

    def memory_after_round(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace the scalers c_i of all clients by their z-scores."""
        scalers = memory["scaler"]
        deviation = scalers.std(correction=0)
        z_scores = (scalers - scalers.mean()) / deviation if deviation > 0 else torch.zeros_like(scalers)
        return {**memory, "scaler": z_scores}

    def correct(self, public: PublicState, clients: ClientState, sent: Tensor) -> Tensor:
        """Return the updates (K, d) to the weights v (1 + I), where v are a client's noised weights and I is from :meth:`_influence`.

        ``sent`` (K, d) are the noised updates. In a client's first round its noised update is returned unchanged.
        """
        if public.previous is None:  # round 1
            return sent
        joined_before = clients.joined > 0
        broadcast_change = (public.weights - public.previous).double()
        corrected = sent.clone()
        for layer, part in enumerate(layer_slices(public.sizes)):
            for block in blocks(sent.shape[0], public.sizes[layer]):
                weights = (public.weights[part] + sent[block, part]).double()
                client_change = weights - clients.memory["sent"][block, part]  # since the client's last round
                norm_products = client_change.norm(dim=1, keepdim=True) * broadcast_change[part].norm() + 1e-4  # as the paper; never 0
                weights *= 1 + self._influence(client_change * broadcast_change[part] / norm_products)
                update = (weights - public.weights[part]).float()
                corrected[block, part] = torch.where(joined_before[block, None], update, sent[block, part])
        return corrected

    def mu(self, public: PublicState) -> float | None:
        return None  # for the reason in ``why_unproved``

    def why_unproved(self) -> str:
        return "the noise depends on how far the client's own weights moved, and the sensitivity is not proved"

    def paper_epsilon(self, public: PublicState, sigma: Tensor) -> float:
        """Return ``epsilon`` for each layer, added up or averaged: the paper charges all of epsilon, whatever c_i is."""
        return self._mean_cost(self.epsilon * sigma, sigma)

    def _influence(self, u: Tensor) -> Tensor:
        """Return I, the relative change of each weight, from the product ``u`` of both changes, relative to their norms."""
        if not self.degrees_bug:
            return u * _MAX_CORRECTION
        return (u.clamp(-1.0, 1.0).arccos() * _DEGREES_PER_RADIAN).cos() * _MAX_CORRECTION  # the bug: ``cos`` takes radians

    def _learning_rates(self, clients: ClientState) -> Tensor:
        """Return each client's learning rate lr_i at the end of this round, (K,)."""
        batches = (clients.samples + self.steps.batch_size - 1) // self.steps.batch_size  # of an epoch, the last one maybe smaller
        steps_taken = (clients.joined + 1) * self.steps.epochs * batches
        return self.steps.learning_rate * torch.pow(torch.tensor(self.decay, dtype=torch.float64), steps_taken)

    def _scalers(self, public: PublicState, clients: ClientState) -> Tensor:
        """Return each client's scaler c_i in this round, (K,). From round 2 on, it is 0.6 |c_i| + 0.4 |w_i - w| / lr_i.

        |w_i - w| is the norm of the client's update, and lr_i its learning rate.
        """
        if public.round == 1:
            return clients.memory["scaler"]
        moved = row_norms(raw_update(public, clients), public.sizes)
        return 0.6 * clients.memory["scaler"].abs() + 0.4 * moved / self._learning_rates(clients)


class AdapLDPSettings(GaussianSettings):
    """Settings of ``adapldp``."""

    name: Literal["adapldp"] = "adapldp"
    rate_decay: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.995
    """Factor on a client's learning rate at each optimiser step, from which AdapLDP computes its noise."""
    degrees_bug: bool = True
    """Whether AdapLDP's correction takes degrees for radians, as the authors' program does."""

    needs_training: ClassVar[bool] = True

    def schedule(self, facts: Facts) -> AdapLDP:
        steps = local_steps(self.name, facts)
        return AdapLDP(self.epsilon, self.delta, steps, self.rate_decay, self.degrees_bug, layers_separately=self.layers_separately)
