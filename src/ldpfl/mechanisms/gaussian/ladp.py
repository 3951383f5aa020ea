"""LaDP-FL: noise by layer, scaled with how far a layer's weights moved; as in the paper, and in a form that holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.gaussian.divergence import Normaliser, layer_divergence
from ldpfl.mechanisms.gaussian.fixed import SensitivitySchedule
from ldpfl.mechanisms.gaussian.norms import clip_layers, layer_norms
from ldpfl.mechanisms.gaussian.schedule import ClientState, PublicSchedule, raw_update
from ldpfl.mechanisms.gaussian.sensitivity import require_positive, require_share, require_usable
from ldpfl.mechanisms.gaussian.settings import GaussianSettings, SensitivitySettings
from ldpfl.mechanisms.settings import Facts
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.util.quantities import Positive, Share

ShareRule = Literal["kl", "size"]
"""How the budget is shared over layers l with d_l weights and clipping norm S_l. ``kl``: in proportion to (S_l P_l)^2, so that sigma_l is
in proportion to 1 / P_l as in LaDP-FL, where P_l is the divergence of the last two broadcasts. ``size``: in proportion to S_l sqrt(d_l),
which minimises the expected square of the noise's norm."""


Selection = Literal["abs_l2", "rms", "top_fraction"]


@dataclass(frozen=True)
class LayerSelection:
    """Which layers of a client get noise; the others are sent without noise.

    Attributes:
        rule: which layers get noise. ``abs_l2``: those with an L2 norm above ``value``, as in the paper. ``rms``: those with
            norm / sqrt(number of weights) above ``value``. ``top_fraction``: the part ``value`` of the layers, rounded up, with the largest
            norms. With ``abs_l2`` the number of weights alone decides for most layers.
        value: tau >= 0, or a fraction in (0, 1].

    A threshold above all norms selects nothing: all layers are then sent without noise. Source: LaDP-FL, Algorithm 2. Confidence high for a
    threshold on a norm, low for which norm.

    Raises:
        ConfigError: an unknown rule, or a value out of range.
    """

    rule: Selection
    value: float

    def __post_init__(self) -> None:
        if self.rule == "top_fraction":
            require_share("top_fraction", self.value, one_allowed=True)
        elif self.rule not in ("abs_l2", "rms"):
            raise ConfigError(f"unknown layer selection {self.rule!r}: expected abs_l2, rms or top_fraction")
        elif not self.value >= 0:
            raise ConfigError(f"the threshold of {self.rule} must not be negative, got {self.value}")

    def chosen(self, norms: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return which layers get noise, (K, L) bool, from their L2 norms (K, L)."""
        if self.rule == "abs_l2":
            return norms > self.value
        if self.rule == "rms":
            return norms / torch.tensor(sizes).double().sqrt() > self.value
        ranks = norms.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # 0 for a client's largest norm
        return ranks < ceil(self.value * len(sizes) - 1e-9)  # less 1e-9, since 0.1 x 30 rounds to above 3, which would give 4 layers


@dataclass(frozen=True)
class LadpPaper(SensitivitySchedule):
    """LaDP-FL as published: noise on selected layers only, the more the less their weights moved.

    sigma_l = c D / (epsilon P_l) with c = p_max c0 (Theorem 3) and P_l = KL(local layer, broadcast layer), clamped to [p_min, p_max]. That
    is (c0 D / epsilon) max(1, p_max / KL): never less than Full DP on a layer that gets noise. A layer that has the same distribution as
    before, a constant one for instance, has KL 0 and therefore P_l = p_min.

    Guarantee: none. Unselected layers are sent without noise. Which layers these are, and how much noise the others get, depends on private
    weights, which Theorem 3 assumes to be constants. Source: LaDP-FL, equations (8)-(11), Algorithms 2 and 3.

    Attributes:
        selection: which layers get noise.
        p_max: largest P_l. A good value is about half of an update's mean square, 1e-7 to 1e-5. At 1 nothing can be trained.
        p_min: smallest P_l. It bounds the noise by p_max / p_min times that of Full DP; the paper has no bound.
        normaliser: how weights become a distribution.

    Raises:
        ConfigError: a value out of range.
    """

    name: ClassVar[str] = "ladp"
    confidence: ClassVar[str] = "high for the form of sigma; medium for softmax; low for the threshold's norm; p_min is ours"

    selection: LayerSelection = field(kw_only=True)
    p_max: float = field(default=1e-5, kw_only=True)
    p_min: float = field(default=1e-9, kw_only=True)
    normaliser: Normaliser = field(default="softmax", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_estimate_settings(self.p_min, self.p_max, self.normaliser)
        require_usable(self.full_sigma * (self.p_max / self.p_min))

    def sigma(self, public: PublicState, clients: ClientState) -> Tensor:
        """Return full_sigma p_max / P_l for the selected layers of each client, and 0 for the others, (K, L).

        P_l is the divergence of the client's layer from the broadcast layer, clamped to [p_min, p_max].
        """
        selected = self.selection.chosen(layer_norms(clients.trained, public.sizes), public.sizes)
        estimates = layer_divergence(clients.trained, public.weights, public.sizes, self.normaliser).clamp(self.p_min, self.p_max)
        return torch.where(selected, self.full_sigma * (self.p_max / estimates), 0.0)

    def mu(self, public: PublicState) -> float | None:
        return None  # for the reason in ``why_unproved``

    def why_unproved(self) -> str:
        return "layers that are not selected leave without noise, and the noise of the others depends on the client's weights"


class LadpSettings(SensitivitySettings):
    """Settings of ``ladp``, LaDP-FL as published."""

    name: Literal["ladp"] = "ladp"
    selection: Selection = "top_fraction"
    """Which layers get noise: those with an L2 norm (``abs_l2``) or norm / sqrt(size) (``rms``) above ``threshold``, or the part
    ``threshold`` of the layers with the largest norms (``top_fraction``)."""
    threshold: Annotated[FiniteFloat, Field(ge=0)] = 1.0
    """Limit of a layer's norm, or with ``top_fraction`` a part of the layers, up to 1."""
    p_max: Positive = 1e-5
    p_min: Positive = 1e-9
    """Bounds of the privacy estimate of a layer."""
    normaliser: Normaliser = "softmax"
    """How weights become a distribution."""

    needs_training: ClassVar[bool] = True

    def schedule(self, facts: Facts) -> LadpPaper:
        selection = LayerSelection(self.selection, self.threshold)
        return LadpPaper(**self.shared(facts), selection=selection, p_max=self.p_max, p_min=self.p_min, normaliser=self.normaliser)


@dataclass(frozen=True)
class LadpSound(PublicSchedule):
    """LaDP-FL's idea in a form that holds: each layer's update is clipped, every layer gets noise, and only public weights steer it.

    sigma_l = 2 S_l / (mu sqrt(a_l)), where S_l is the clipping norm of layer l. The shares a_l >= smallest_share add up to 1, so that
    sum (2 S_l / sigma_l)^2 = mu^2. In round 1, where there is no earlier broadcast, the shares are those of the rule ``size``.

    Guarantee: mu-GDP with mu from (epsilon, delta), for a client's whole message of one round under replacement of its data. Over rounds
    the mu add up in squares, although the shares follow earlier broadcasts. Assumes that broadcasts are computed from noised updates only.

    Attributes:
        epsilon, delta: budget of one client's round.
        clip: clipping norm S of the whole update, or a tuple of the layers' norms S_l. From S, a layer of d_l of all d weights gets
            S_l = S sqrt(d_l / d).
        share_rule: see :data:`ShareRule`.
        smallest_share: the share that each of the L layers gets before the rest is divided. It must be below 1 / L.
        p_min, p_max, normaliser: of the estimates P_l, as in :class:`LadpPaper`.

    Raises:
        ConfigError: a value out of range; or, in a round, another number of layers than ``clip`` or the shares allow.
    """

    name: ClassVar[str] = "ladp-sound"
    confidence: ClassVar[str] = "not in the paper: derived, exact accounting"

    clip: float | tuple[float, ...]
    share_rule: ShareRule = "kl"
    smallest_share: float = 1e-3
    p_min: float = 1e-9
    p_max: float = 1e-5
    normaliser: Normaliser = "softmax"

    def __post_init__(self) -> None:
        for norm in self.clip if isinstance(self.clip, tuple) else (self.clip,):
            require_usable(2 * require_positive("clip", norm) / self._mu)
        if self.share_rule not in ("kl", "size"):
            raise ConfigError(f"unknown share rule {self.share_rule!r}: expected kl or size")
        require_share("smallest_share", self.smallest_share, one_allowed=False)
        _check_estimate_settings(self.p_min, self.p_max, self.normaliser)

    @property
    def _mu(self) -> float:
        """Gaussian-DP parameter mu that is equivalent to (epsilon, delta)."""
        return gaussian_mu(self.epsilon, self.delta)

    def layer_clipping_norms(self, sizes: tuple[int, ...]) -> Tensor:
        """Return the clipping norm S_l of each layer, (L,) float64.

        Raises:
            ConfigError: ``clip`` names another number of layers.
        """
        if not isinstance(self.clip, tuple):
            return self.clip * (torch.tensor(sizes).double() / sum(sizes)).sqrt()
        if len(self.clip) != len(sizes):
            raise ConfigError(f"clip has {len(self.clip)} entries, but the model has {len(sizes)} layers: give one entry for each layer")
        return torch.tensor(self.clip, dtype=torch.float64)

    def shares(self, public: PublicState) -> Tensor:
        """Return the part of mu^2 that each layer spends, (L,) float64.

        Raises:
            ConfigError: ``smallest_share`` times the number of layers is not below 1.
        """
        layers = len(public.sizes)
        reserved = self.smallest_share * layers  # what all layers get before the rest is divided
        if reserved >= 1:
            raise ConfigError(f"smallest_share is {self.smallest_share}, but must be below 1/{layers}: the model has {layers} layers")
        proportions = self._proportions(public)
        return self.smallest_share + (1 - reserved) * proportions / proportions.sum()

    def _proportions(self, public: PublicState) -> Tensor:
        """Return the numbers (L,) to which shares are proportional, by ``share_rule``: S_l sqrt(d_l) or (S_l P_l / p_max)^2.

        Layer l has d_l weights and the clipping norm S_l. P_l is the divergence of the last two broadcasts.
        """
        clips = self.layer_clipping_norms(public.sizes)
        if self.share_rule == "size" or public.previous is None:
            return clips * torch.tensor(public.sizes).double().sqrt()
        divergence = layer_divergence(public.weights[None], public.previous, public.sizes, self.normaliser)[0]
        return (clips * divergence.clamp(self.p_min, self.p_max) / self.p_max).square()

    def public_sigma(self, public: PublicState) -> Tensor:
        """Return sigma_l = 2 S_l / (mu sqrt(a_l)) of each layer, (L,), for its clipping norm S_l and its share a_l of mu^2."""
        return 2 * self.layer_clipping_norms(public.sizes) / (self._mu * self.shares(public).sqrt())

    def clipped_updates(self, public: PublicState, clients: ClientState) -> Tensor:
        return clip_layers(raw_update(public, clients), public.sizes, self.layer_clipping_norms(public.sizes))

    def clipping_norms(self, public: PublicState) -> Tensor:
        return self.layer_clipping_norms(public.sizes)

    def mu(self, public: PublicState) -> float | None:
        return self._mu

    def why_unproved(self) -> str:
        return ""  # mu is always known

    def paper_epsilon(self, public: PublicState, sigma: Tensor) -> float:
        """Return c D / sigma of the layers, added up or averaged. A layer's D is 2 S_l, and c = epsilon / mu."""
        return self._mean_cost(2 * self.layer_clipping_norms(public.sizes) * (self.epsilon / self._mu), sigma)


class LadpSoundSettings(GaussianSettings):
    """Settings of ``ladp-sound``, LaDP-FL as it holds."""

    name: Literal["ladp-sound"] = "ladp-sound"
    norm: Positive = 1.0
    """Clipping norm: a longer update is shortened to it."""
    share_rule: ShareRule = "kl"
    """How the budget is shared over layers."""
    smallest_share: Share = 1e-3
    p_max: Positive = 1e-5
    p_min: Positive = 1e-9
    """Bounds of the privacy estimate of a layer."""
    normaliser: Normaliser = "softmax"
    """How weights become a distribution."""

    needs_training: ClassVar[bool] = True

    def schedule(self, facts: Facts) -> LadpSound:
        return LadpSound(
            self.epsilon,
            self.delta,
            self.norm,
            self.share_rule,
            self.smallest_share,
            self.p_min,
            self.p_max,
            self.normaliser,
            layers_separately=self.layers_separately,
        )


def _check_estimate_settings(p_min: float, p_max: float, normaliser: str) -> None:
    """Raise a ConfigError unless the settings of the privacy estimates P_l are valid."""
    require_positive("p_max", p_max)
    require_positive("p_min", p_min)
    if p_min > p_max:
        raise ConfigError(f"p_min is {p_min}, more than p_max, {p_max}: lower p_min or raise p_max")
    if normaliser not in ("softmax", "l1"):
        raise ConfigError(f"unknown normaliser {normaliser!r}: expected softmax or l1")
