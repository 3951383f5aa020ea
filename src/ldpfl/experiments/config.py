"""The config of a run: what a person writes in TOML or gives with ``--set``, checked before anything starts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from ldpfl.data.partition import Isolation, Scheme
from ldpfl.errors import ConfigError
from ldpfl.mechanisms.gaussian.divergence import Normaliser
from ldpfl.mechanisms.gaussian.fixed import Variant
from ldpfl.mechanisms.gaussian.ladp import ShareRule
from ldpfl.mechanisms.gaussian.sensitivity import SensitivityMode
from ldpfl.privacy.events import Channel
from ldpfl.server import Perturbed
from ldpfl.suggestions import did_you_mean

Positive = Annotated[FiniteFloat, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Repeats = Annotated[int, Field(ge=1, le=10**6)]
"""What is gone through one by one."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(_Section):
    """Which images, and how they are divided over the clients."""

    name: str = "mnist"
    partition: Scheme = "iid"
    alpha: Positive = 0.5
    labels_per_client: Count = 2
    private_label: Annotated[int, Field(ge=0)] | Literal["none"] = "none"
    """Label of which client 0, honest but curious, holds no sample, as in LaDP-FL; works with every ``partition``."""
    private_alpha: Positive = 0.5
    """``dirichlet`` with a private label: ``alpha`` of that label's division over the other clients."""
    evaluate_on: Literal["test", "holdout"] = "test"
    """``holdout`` sets a tenth of the training images aside and measures on them: use it to choose hyper-parameters."""

    @property
    def isolated(self) -> Isolation | None:
        """What is kept from client 0, if anything."""
        return None if self.private_label == "none" else Isolation(self.private_label, self.private_alpha)


class ModelConfig(_Section):
    """The model: a name, or ``package.module:Class`` with its ``options``."""

    name: str = "two-layer-cnn"
    options: dict[str, bool | int | float | str] = {}


class ClientsConfig(_Section):
    """How many clients there are (n), and which part of them takes part in a round (f_r)."""

    count: Count = 100
    fraction: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    self_sampling: Literal["off", "restrictive", "plain"] = "off"
    """Each client decides for itself, with probability q ~ U(0.5, 1) or U(0, 1) a round; then ``fraction`` must be 1."""


LOWEST_PROBABILITY = {"off": None, "restrictive": 0.5, "plain": 0.0}


class TrainingConfig(_Section):
    """Rounds on the server, epochs of SGD on the client."""

    rounds: Repeats = 10
    epochs: Annotated[int, Field(ge=1, le=10**5)] = 5
    batch_size: Count = 10
    learning_rate: Positive = 0.03
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    clip_norm: Positive | Literal["off"] = "off"
    """Longest gradient of a mini-batch, flat over all weights; a longer one is shortened to it, as in LaDP-FL."""
    server_learning_rate: Positive = 1.0
    """Scales the mean update; for ``mechanism.perturbed = "update"`` only."""


class MechanismConfig(_Section):
    """What clients do to their values before they leave."""

    name: Literal[
        "duchi",
        "harmony",
        "laplace",
        "piecewise",
        "hybrid",
        "duchi-vector",
        "privunit-g",
        "full-dp",
        "nbafl",
        "time-varying",
        "sensitive-dp",
        "dpa",
        "adapldp",
        "ladp",
        "ladp-sound",
        "none",
    ] = "duchi"
    """From ``full-dp`` on Gaussian noise, with the settings of ``[noise]``; ``ladp`` as published, ``ladp-sound`` as it holds."""
    epsilon: Positive = 1.0
    """Budget of what ``budget`` says, in one round."""
    budget: Literal["unit", "client"] = "unit"
    """``unit``: ``epsilon`` is for one weight, group, or the whole vector, as the mechanism has it. ``client``: it is for all that a
    client sends in one round, divided evenly over its units; so mechanisms of different units can be compared."""
    group: Count | Literal["layer"] = "layer"
    """``harmony``: weights of which one is sent; ``layer`` as in Optimal LDP-FL."""
    coordinates: Count | Literal["all", "auto"] = "all"
    """``laplace``, ``piecewise``, ``hybrid``: weights sent, at the whole budget together; ``all`` sends each at ``epsilon``."""
    norm: Positive = 1.0
    """``privunit-g`` and Gaussian noise: longest vector, a longer one is shortened to it; ``nbafl``: of the weights."""
    magnitude_share: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.5
    """``privunit-g``: part of ``epsilon`` that buys the vector's length."""
    perturbed: Perturbed = "weights"
    """``weights``: the trained weights, as in LDP-FL. ``update``: their change since the broadcast."""


class NoiseConfig(_Section):
    """Gaussian noise by a schedule over rounds and layers: LaDP-FL, and what it is compared with."""

    delta: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 1e-5
    """Of one client's round, as ``mechanism.epsilon``."""
    sensitivity: SensitivityMode = "update_clip"
    """How far an update is assumed to move with the data; only ``update_clip`` is proved: updates are clipped to ``mechanism.norm``."""
    constant: Literal["auto", "theorem3", "classical", "exact"] = "auto"
    """How much noise an epsilon takes; ``auto``: ``exact`` where the sensitivity is proved, else LaDP-FL's Theorem 3."""
    layers_separately: bool = False
    """Whether the paper's accounting adds up a client's layers or averages them; changes no noise."""
    selection: Literal["abs_l2", "rms", "top_fraction"] = "top_fraction"
    """``ladp``: which layers get noise, those above ``threshold``, by L2 norm, norm / sqrt(size), or rank."""
    threshold: Annotated[FiniteFloat, Field(ge=0)] = 1.0
    p_max: Positive = 1e-5
    p_min: Positive = 1e-9
    """``ladp``: bounds of the privacy estimate of a layer."""
    normaliser: Normaliser = "softmax"
    share_rule: ShareRule = "kl"
    """``ladp-sound``: how the budget is shared over layers."""
    smallest_share: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 1e-3
    variant: Variant = "equal_budget"
    """``time-varying``, ``dpa``: epsilon for all rounds together, or (``paper``) for the first."""
    participations: Repeats | Literal["all"] = "all"
    """``time-varying``, ``dpa`` at equal budget: rounds that one client joins at most."""
    ratio: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.99789
    """``time-varying``: of the noise of two successive rounds."""
    contraction: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 0.9956
    """``dpa``: a."""
    own_share: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.5
    kappa: Positive = 1.0
    clip_to_estimate: bool = False
    """``sensitive-dp``: weight of the client's own history, factor, and whether updates are clipped to the estimate."""
    rate_decay: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.995
    degrees_bug: bool = True
    """``adapldp``: decay of its learning rate at each step, and whether its correction is as in the authors' program."""
    exposures: Count = 1
    """``nbafl``: L."""


class RangesConfig(_Section):
    """The range (center, radius) that each layer's values are clamped to."""

    rule: Literal["fixed", "noisy-minmax", "denoised"] = "fixed"
    center: FiniteFloat | dict[str, FiniteFloat] = 0.0
    """One value, or one for each layer by its name."""
    radius: Positive | dict[str, Positive] | Literal["initial"] = 0.075
    """One value, one for each layer, or ``initial``: cover each layer of the (public) initial model."""
    margin: Positive = 1.5
    """Factor on the initial model's spread, for ``radius = "initial"``."""
    floor: Positive = 0.005
    """Smallest radius that an adaptive rule may choose."""


class ShufflingConfig(_Section):
    """What stands between clients and server in the deployment that is simulated."""

    channel: Channel = "ideal-shuffler"
    """Accuracy does not depend on it, the ledger does: a random delay is no shuffler."""


class PrivacyConfig(_Section):
    """How the guarantee is stated; nothing that is sent depends on it."""

    delta: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 1e-5
    """Failure probability of the figures that are not pure; it should be below 1 / n."""


class RunConfig(_Section):
    """A complete run. Two runs of equal configs on the same machine end in the same model, bit by bit."""

    name: str = "run"
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**128)] = 0
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    clients: ClientsConfig = ClientsConfig()
    training: TrainingConfig = TrainingConfig()
    mechanism: MechanismConfig = MechanismConfig()
    noise: NoiseConfig = NoiseConfig()
    ranges: RangesConfig = RangesConfig()
    shuffling: ShufflingConfig = ShufflingConfig()
    privacy: PrivacyConfig = PrivacyConfig()

    def to_toml(self) -> str:
        """Return the whole config, defaults included, as TOML."""
        return tomli_w.dumps(self.model_dump())

    def differences(self, other: RunConfig) -> list[str]:
        """Return a line ``key: ours -> theirs`` for each setting in which ``other`` differs."""
        ours, theirs = _flat(self.model_dump()), _flat(other.model_dump())
        return [f"{key}: {ours.get(key)!r} -> {theirs.get(key)!r}" for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]


def read_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a TOML file and apply ``key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value does not fit; one line, naming the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    return parse_config(text, overrides, origin=str(path))


def parse_config(text: str, overrides: Iterable[str], *, origin: str) -> RunConfig:
    """Turn TOML ``text`` and ``key=value`` overrides into a config; ``origin`` is named in errors."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"--set {override!r} is not of the form key=value")
    parts = key.split(".")
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {part!r} is a value, not a section")
        node = child
    node[parts[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    """Read ``text`` as a TOML value, and as a plain string where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError, origin: str) -> str:
    errors = error.errors()
    first = errors[0]
    key = ".".join(str(part) for part in first["loc"] if str(part) in _known_parts())
    if first["type"] == "extra_forbidden":
        key = ".".join(str(part) for part in first["loc"])
        return f"unknown setting {key!r} in {origin}: {_suggest(key)}"
    # A setting of several kinds, a number or a word, gives an error for each kind.
    expected = [other["msg"] for other in errors if other["loc"][: len(key.split("."))] == first["loc"][: len(key.split("."))]]
    message = expected[0] + "".join(f" or {text.removeprefix('Input should be ')}" for text in expected[1:])
    return f"setting {key!r} in {origin}: {message[0].lower()}{message[1:]}, got {first['input']!r}"


def _suggest(key: str) -> str:
    """Look among the settings of the same section first, then everywhere, sections included."""
    section = key.rpartition(".")[0]
    siblings = [name for name in known_keys() if section and name.startswith(f"{section}.")]
    everywhere = sorted({*known_keys(), *RunConfig.model_fields})
    return did_you_mean(key, siblings) if siblings else did_you_mean(key, everywhere)


def known_keys() -> tuple[str, ...]:
    """All settings in dotted form."""
    return tuple(_flat(RunConfig().model_dump()))


def _known_parts() -> set[str]:
    return {part for key in known_keys() for part in key.split(".")}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
