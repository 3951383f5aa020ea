"""The config of a run, read from TOML and from ``key=value`` overrides, and checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializeAsAny,
    ValidationError,
    model_validator,
)
from torch import Tensor

from ldpfl.data.settings import DataConfig
from ldpfl.errors import ConfigError, is_text, printable, shown
from ldpfl.experiments.config_errors import validation_message
from ldpfl.mechanisms import MechanismSettings, read_settings, settings_of
from ldpfl.mechanisms.duchi import DuchiSettings
from ldpfl.models.adapters import Adapter, Kind
from ldpfl.privacy.events import Channel
from ldpfl.server.round_aggregation import Rule, Schedule, ServerOptimiser
from ldpfl.simulation.local_steps import Kind as LocalKind, LocalOptimiser
from ldpfl.util.files import from_toml, read_text
from ldpfl.util.quantities import MAX_ROUNDS, Count, NotNegative, Positive, Repeats, Share
from ldpfl.util.user_code import GIVEN, is_code, public_name


def _refuse_control_characters(text: str) -> str:
    """Return ``text`` unchanged, or raise a ``ValueError`` if it has characters that are not printable."""
    if printable(text) != text:
        raise ValueError("has characters that are not printable, such as line breaks: remove them")
    return text


Printable = Annotated[str, AfterValidator(_refuse_control_characters)]
"""Text without control characters. A folder may be untrusted, and its texts must not control the terminal that shows them."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TaskConfig(_Section):
    """What the model learns to predict."""

    name: str = "classification"
    """``classification``, ``multilabel``, ``regression``, ``poisson`` (counts), ``ordinal`` (ordered classes), ``survival`` (two columns,
    of times and events) or ``language-model``; or ``package.module:function``, which is called with the number of outputs and returns an
    ``ldpfl.tasks.Task``."""
    threshold: Annotated[FiniteFloat, Field(gt=0, lt=1)] | Literal["off"] = "off"
    """For two classes, the predicted risk from which a row counts as flagged. Sensitivity, specificity and positive predictive value are
    reported at it, in addition to 0.5 and the base rate. It does not change the model."""
    class_weights: list[Positive] | Literal["off", "balanced"] = "off"
    """For ``classification``, a public factor on the loss of each class, in the order of the classes. ``balanced`` divides by the class'
    share, as stated by ``data.class_shares`` or measured, and gives the rarest class the factor 1. Predicted probabilities are no longer
    those of the data."""
    focusing: Annotated[FiniteFloat, Field(ge=0, le=100)] = 0.0
    """For ``classification``, gamma of the focal loss: samples that the model predicts well count less. 2 is usual."""


class ModelConfig(_Section):
    """The model: a name, or ``package.module:Class`` with its ``options``."""

    name: str = "two-layer-cnn"
    """A built-in model, or ``package.module:Class`` or ``file.py:Class``, which is called with the options, and with those of ``inputs``,
    ``outputs``, ``shape`` and ``vocabulary`` that it requires: the sizes of the data. Or ``hf:FOLDER`` or ``hf:NAME``, a pretrained model
    of ``transformers`` in a folder or on the hub."""
    options: dict[str, bool | int | float | str] = {}
    """Arguments that the model is created with."""
    mend: bool = False
    """Replace layers that prevent private training, such as batch normalisation; ``ldpfl check`` lists them. The dropout of a
    pretrained model is set to 0 in any case."""
    personal: list[str] = []
    """Layers that stay at each client, as names of layers or beginnings of them (``fc2``, or ``["norm1", "norm2"]``). Each client trains
    them on its own data and goes on from its own last values. They are never randomised or sent. For mechanisms that protect clients, in
    simulations; it needs ``data.evaluate_on = "clients"``."""
    adapter: Kind = "none"
    """Which part of a pretrained model is trained: ``none`` trains all of it, ``head`` only its output layers; ``lora``, ``ia3`` and
    ``prompt`` (prompt tuning) add an adapter of ``peft``, and train it and the head."""
    adapter_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of the products that ``lora`` adds to layers."""
    adapter_alpha: Positive = 16.0
    """Factor on these products, divided by their rank."""
    adapter_modules: list[str] = []
    """Layers that ``lora`` or ``ia3`` changes, by the ends of their names. By default ``peft`` chooses them by the kind of model."""
    adapter_tokens: Annotated[int, Field(ge=1, le=4096)] = 8
    """Tokens that ``prompt`` trains."""
    licence: str = ""
    """Licence of the pretrained weights, if neither a file beside them nor their model card states it; ``own`` for your own."""
    base: str = ""
    """SHA-256 of the frozen weights of a pretrained model, as a finished run states it. If set, other weights are refused."""

    @property
    def adapter_settings(self) -> Adapter:
        """Adapter settings of a pretrained model."""
        return Adapter(self.adapter, self.adapter_rank, self.adapter_alpha, tuple(self.adapter_modules), self.adapter_tokens)


class ClientsConfig(_Section):
    """The number of clients (n), and the fraction of them in a round (f_r)."""

    count: Count = 100
    """Number of clients. If ``data.client`` is set, it must be the number of clients in that column."""
    fraction: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Fraction of clients that the server samples for each round."""
    self_sampling: Literal["off", "restrictive", "plain"] = "off"
    """Each client decides for itself, with probability q ~ U(0.5, 1) or U(0, 1) a round; then ``fraction`` must be 1."""
    full_weight: Count | Literal["off"] = "off"
    """Number of records from which a client gets full weight. The update of a smaller client is scaled down in proportion, before noise
    is added. So it costs no privacy, reveals no sizes, and leaves the noise unchanged. Not for ``dp-sgd``, which weighs by records."""
    once: bool = False
    """Each client takes part in one round of the whole run, in a secret random order; then ``fraction`` must be 1."""


LOWEST_PROBABILITY = {"off": None, "restrictive": 0.5, "plain": 0.0}
"""Lowest probability with which a client joins a round, for each value of ``clients.self_sampling``; None if the server decides."""


Method = Literal["gradient", "least-squares"]

DEFAULT_SHARE = 0.1
"""Default share of held-back records if only ``evaluation.epsilon`` is set."""


def _refuse_float16(precision: Any) -> Any:
    """Raise if ``precision`` is float16, with the reason why it is left out; else return it unchanged."""
    if precision in ("fp16", "fp16-mixed", "float16"):
        raise ValueError(
            "float16 is not supported: its gradients overflow or vanish without a loss scale, and CPUs without float16 units multiply it "
            "more slowly than float32. Set it to 'bf16', which has the range of float32 and needs no scale"
        )
    return precision


class TrainingConfig(_Section):
    """Rounds on the server, epochs of SGD on the client."""

    method: Method = "gradient"
    """``gradient`` trains by steps, as the mechanism says. ``least-squares`` sums the products of each record's features and solves for a
    linear head, in one round: for ``dp-sgd``, and the models ``linear`` and ``logistic-regression``. No other setting of this section has
    an effect then; see the section ``least_squares``."""
    rounds: Repeats = 10
    """Number of rounds. ``least-squares`` takes 1. More local training in a round (``epochs``) costs no more privacy."""
    epochs: Annotated[int, Field(ge=1, le=10**5)] = 5
    """Number of passes over its samples that a client makes in each round."""
    batch_size: Count = 10
    """Number of samples in each of a client's steps."""
    learning_rate: Positive = 0.03
    """Learning rate of the client."""
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Momentum of the client's SGD."""
    optimiser: LocalKind = "sgd"
    """Optimiser of the client: ``sgd``, or ``adam``, whose moments are reset in each round."""
    weight_decay: NotNegative = 0.0
    """Factor on the weights that each of the client's steps adds to the gradient."""
    proximal: NotNegative = 0.0
    """Factor on the distance from the broadcast weights that each of the client's steps adds to the gradient (FedProx)."""
    schedule: Schedule = "constant"
    """Schedule of the client's learning rate over the rounds: ``linear`` and ``cosine`` let it fall to 0."""
    clip_norm: Positive | Literal["off"] = "off"
    """Clipping norm of a mini-batch's gradient, flat over all weights, as in LaDP-FL."""
    patience: Annotated[int, Field(ge=0, le=MAX_ROUNDS)] = 0
    """Number of rounds without a lower loss on ``data.validation`` after which training stops. The result is then the model of the best
    round. 0 trains in all rounds. The guarantee counts all rounds, since the decision to stop depends on released values."""
    extended: Annotated[int, Field(ge=0, le=MAX_ROUNDS)] = 0
    """Number of rounds that were added after the run had finished. ``ldpfl run --more-rounds`` counts them."""
    server_optimiser: Rule = "sgd"
    """Optimiser of the server, which costs no privacy: ``sgd`` (FedAvg, with ``server_momentum`` FedAvgM), ``adam`` or ``yogi``."""
    server_learning_rate: Positive | Literal["auto"] = 1.0
    """Factor on the mean update or gradient. It has no effect if ``mechanism.perturbed`` is ``weights``. ``auto`` chooses it for a table by
    the noise and the rarity of a class, and for images, arrays and pretrained models by the noise and its effect on the model's outputs,
    see ``ldpfl.experiments.table_rules``."""
    server_weight_decay: NotNegative | Literal["auto"] = 0.0
    """Factor on the distance from the initial weights that the server adds to each mean gradient. It costs no privacy. ``auto`` chooses it
    for tables by the noise; for images and arrays it is 0."""
    server_momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Fraction of the server's last step that is added to the next (heavy ball). For ``adam`` and ``yogi`` it is beta 1, such as 0.9."""
    server_schedule: Schedule = "constant"
    """Schedule of the server's learning rate over the rounds: ``linear`` and ``cosine`` let it fall to 0."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether clients' steps are compiled. It needs a C++ compiler, takes 10 s the first time, and changes last bits of the model. ``auto``
    compiles in long runs on a CPU."""
    precision: Annotated[Literal["float32", "bf16"], BeforeValidator(_refuse_float16)] = "float32"
    """Precision of products in local training. ``bf16`` computes them with 8 significant bits, which is faster for wide layers on some
    processors. Values that are clipped, randomised or sent are float32. There is no float16: its gradients need a loss scale, which
    those of ``bf16`` do not."""
    average: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """Share of the rounds, at the end of the run, over which the global weights are averaged. The average is evaluated and saved."""

    @model_validator(mode="before")
    @classmethod
    def _default_rounds(cls, settings: Any) -> Any:
        """Set one round as the default of ``least-squares``."""
        if isinstance(settings, dict) and settings.get("method") == "least-squares":
            return {"rounds": 1, **settings}
        return settings

    @model_validator(mode="after")
    def _check_one_round(self) -> Self:
        """Refuse several rounds of ``least-squares``, which solves for the head in one."""
        if self.method == "least-squares" and self.rounds != 1:
            raise ValueError(f"method 'least-squares' takes one round, and rounds is {self.rounds}: set training.rounds to 1")
        return self

    def make_client_optimiser(self) -> LocalOptimiser:
        """Return the optimiser of a client's local steps."""
        rate, momentum, kind = self.learning_rate, self.momentum, self.optimiser
        return LocalOptimiser(rate, momentum, kind, self.weight_decay, self.proximal, self.schedule, self.rounds)

    def make_server_optimiser(self, measured: int, start: Tensor) -> ServerOptimiser:
        """Return the optimiser of the server.

        Args:
            measured: number of weights, at the start of the vector, that are measured instead of trained.
            start: (d,) initial weights.

        Raises:
            ConfigError: the learning rate or the weight decay is still "auto".
        """
        rate, decay = self.server_learning_rate, self.server_weight_decay
        if rate == "auto" or decay == "auto":
            keys = [key for key, value in (("server_learning_rate", rate), ("server_weight_decay", decay)) if value == "auto"]
            names = " and ".join(f"training.{key}" for key in keys)
            raise ConfigError(f"{names} = 'auto' works only in simulations and with the app ldpfl.flower.apps: here give a number")
        momentum, schedule = self.server_momentum, self.server_schedule
        return ServerOptimiser(rate, momentum, schedule, self.rounds, self.average, measured, self.server_optimiser, decay, start)


class LeastSquaresConfig(_Section):
    """Settings of ``training.method = "least-squares"``. They are public, and have no effect on other methods."""

    feature_norm: Positive = 1.0
    """Clipping norm of a record's feature vector, without the constant 1 for the bias. Built-in features have norm 1. For the columns of a
    table, the square root of their number is about the usual norm."""
    target_bound: Positive = 3.0
    """Clipping bound of a numeric target, in units of its spread."""
    target_share: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 0.5
    """Share of the feature-target products in the squared norm of a record's contribution. The feature-feature products have the rest.
    A larger share means less noise on the former and more on the latter."""
    eigenvalue_floor: NotNegative = 0.5
    """Smallest allowed eigenvalue of the mean feature-feature matrix, as a multiple of the largest eigenvalue of noise alone."""
    ridge: NotNegative = 0.0
    """Ridge that is added to each eigenvalue, as a multiple of the same noise eigenvalue."""


class EvaluationConfig(_Section):
    """Evaluation at clients: the records that they hold back from training, and the epsilon of evaluating on these records."""

    share: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Share of each client's records, or of all persons, that is held back from training. The default is 0.1 if ``epsilon`` is set.
    Positions of records, or names of persons, decide which ones."""
    epsilon: Positive | Literal["off"] = "off"
    """Epsilon of all evaluations of these records in the run, charged in the same ledger. ``off`` does not evaluate at clients."""
    every: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Number of rounds between evaluations. The model is always evaluated after the last round; 0 evaluates only then."""
    loss_bound: Positive = 5.0
    """Clipping bound of a record's loss."""
    records: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Public mean number of records, or of persons, that a client holds back. 0 uses that of the simulated clients. On Flower, 0 derives
    it from ``mechanism.records``, the number of records that are left to train on."""

    @model_validator(mode="before")
    @classmethod
    def _default_share(cls, settings: Any) -> Any:
        """Set the default ``share`` if ``epsilon`` is given without it."""
        if isinstance(settings, dict) and settings.get("epsilon", "off") != "off":
            return {"share": DEFAULT_SHARE, **settings}
        return settings

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        """Refuse an ``epsilon`` without records to evaluate on."""
        if self.epsilon != "off" and self.share == 0:
            raise ValueError(
                "evaluation.epsilon needs records that are held back, but evaluation.share is 0: set evaluation.share, such as 0.1"
            )
        return self


class RangesConfig(_Section):
    """The range (center, radius) that each layer's values are clipped to."""

    rule: Literal["fixed", "noisy-minmax", "denoised"] = "fixed"
    """How the server chooses the ranges of the next round."""
    center: FiniteFloat | dict[str, FiniteFloat] = 0.0
    """One value, or one for each layer by its name."""
    radius: Positive | dict[str, Positive] | Literal["initial"] = 0.075
    """One value, one for each layer, or ``initial``: cover each layer of the (public) initial model."""
    margin: Positive = 1.5
    """Factor on the initial model's spread, for ``radius = "initial"``."""
    floor: Positive = 0.005
    """Smallest radius that an adaptive rule may choose."""


class ClippingConfig(_Section):
    """Adaptive clipping: the clipping norm of ``dp-sgd`` or ``dp-fedavg`` follows a quantile of the norms (Andrew et al. 2021)."""

    target_quantile: Annotated[FiniteFloat, Field(gt=0, lt=1)] | Literal["off"] = "off"
    """Share of the gradients or updates that is not to be clipped, such as 0.5. Each report then also says, under the same noise, how many
    were not clipped. That costs no epsilon, and makes the noise in the mean 3 % larger. ``off`` clips to ``mechanism.clip_norm`` in all
    rounds. With ``dp-sgd`` it is for simulations."""
    learning_rate: Annotated[FiniteFloat, Field(gt=0, le=10)] = 0.2
    """Step of the logarithm of the clipping norm: each round multiplies it by exp(-learning_rate (unclipped share - target_quantile))."""

    @property
    def is_adaptive(self) -> bool:
        """Whether the clipping norm changes from round to round."""
        return self.target_quantile != "off"


class ShufflingConfig(_Section):
    """The channel between clients and server in the simulated deployment."""

    channel: Channel = "ideal-shuffler"
    """What the messages pass through. It affects the ledger and not the accuracy. A random delay does not count as a shuffler."""
    max_clients: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Public maximum number of clients whose reports a ``secure-sum`` adds up in a round. It decides whether 32 bits for each weight can
    hold the sum. 0 uses ``clients.count``."""
    colluding: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Number of clients in each round that may be dishonest, for a ``secure-sum``: they may reveal what they sent, or leave out their share
    of the noise. The guarantee, and a target epsilon, count only the noise of the other clients."""

    @model_validator(mode="after")
    def _check_settings_of_secure_sum(self) -> Self:
        """Refuse settings that have no effect, because the channel is not a secure sum."""
        if self.channel != "secure-sum" and (self.max_clients or self.colluding):
            raise ValueError("max_clients and colluding are for the channel 'secure-sum': set shuffling.channel to it, or leave them out")
        return self


class PrivacyConfig(_Section):
    """The target and the delta of the privacy guarantee."""

    delta: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 1e-5
    """Delta of the guarantees that are not pure. It should be below 1 / n, with n the number of protected clients or records."""
    target_epsilon: Positive | Literal["off"] = "off"
    """Target epsilon of the whole run, for a client or for a record. The mechanism's noise is computed from it."""
    original_target: Positive | Literal["off"] = "off"
    """Target epsilon of a run before rounds were added to it. ``ldpfl run --more-rounds`` records it."""
    measuring_share: Share = 0.15
    """Share of the run's squared privacy parameter (mu^2 of Gaussian noise) that is spent on measuring a table's columns."""


class RunConfig(_Section):
    """A complete run. Two runs of equal configs on the same machine end in the same model, bit by bit."""

    name: Printable = "run"
    """Name of the run, for its folder and tables."""
    description: Printable = ""
    """Purpose of the run."""
    seed: Annotated[int, Field(ge=0, lt=2**128)] = 0
    """Seed of all random numbers of a simulation. If you give a seed, it determines the noise on your own data too, and whoever knows it
    can remove the noise. Without a given seed, the noise on your own data has a separate secret seed."""
    secret_noise: bool = False
    """Whether the noise on your own data, and secret participation, follow from a secret that is drawn for each run and kept in the
    run's folder, in the file ``SECRET-seed``. It is set for your own data unless you give a seed."""
    data: DataConfig = DataConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    clients: ClientsConfig = ClientsConfig()
    training: TrainingConfig = TrainingConfig()
    mechanism: Annotated[SerializeAsAny[MechanismSettings], BeforeValidator(read_settings)] = DuchiSettings()
    """Local randomiser: the settings of the mechanism that ``name`` selects."""
    ranges: RangesConfig = RangesConfig()
    clipping: ClippingConfig = ClippingConfig()
    shuffling: ShufflingConfig = ShufflingConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    least_squares: LeastSquaresConfig = LeastSquaresConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def hides_seed(self) -> bool:
        """Whether the noise on a user's own rows follows from ``seed``. The seed is then secret and is not shown."""
        return self.data.brought and not self.secret_noise

    @property
    def users_code(self) -> tuple[str, ...]:
        """The model, task, features, data loader and partition that are not ldpfl's code, such as "model net.py:Net".

        A model that was passed from Python has no name, so it is listed as "model" alone. Data that were passed from Python are not
        listed: they are rows already, and no code is called for them.
        """
        names = {"model": self.model.name, "task": self.task.name, "features": self.data.features}
        names |= {key: name for key, name in (("data", self.data.name), ("partition", self.data.partition)) if name != GIVEN}
        return tuple(
            f"{role} {public_name(name)}".removesuffix(f" {GIVEN}") for role, name in names.items() if name == GIVEN or is_code(name)
        )

    def to_toml(self) -> str:
        """Return the whole config, defaults included, as TOML."""
        return tomli_w.dumps(self.model_dump())

    def by_key(self) -> dict[str, Any]:
        """Return each setting, defaults included, by its dotted key."""
        return _by_dotted_key(self.model_dump())

    def differences(self, other: RunConfig) -> list[str]:
        """Return a line ``key: ours -> theirs`` for each setting in which ``other`` differs. A secret seed is not shown."""
        ours, theirs = self.by_key(), other.by_key()
        hidden = {"seed"} if self.hides_seed or other.hides_seed else set()
        return [
            f"{key}: another one" if key in hidden else f"{key}: {ours.get(key)!r} -> {theirs.get(key)!r}"
            for key in sorted({*ours, *theirs})
            if ours.get(key) != theirs.get(key)
        ]


SECTIONS = frozenset(key for key, value in RunConfig().model_dump().items() if isinstance(value, dict))
"""Names of the sections of a config."""


def read_config(path: Path, *overrides: Iterable[str]) -> RunConfig:
    """Read a TOML file and apply ``key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value does not fit. The message is one line and names the key.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse_config(text, *overrides, origin=str(path))


def parse_config(text: str, *overrides: Iterable[str], origin: str) -> RunConfig:
    """Turn TOML ``text`` and lists of ``key=value`` overrides into a config. Errors are as for :func:`read_config`, and name ``origin``.

    Later lists override earlier ones. If a list sets ``mechanism.name``, earlier settings that the new mechanism does not have are dropped.
    The settings of that list itself are checked against the new mechanism. The text's description is dropped if a list changes more than
    the seed and the name, because it may state an epsilon or a size that no longer holds.
    """
    try:
        tree = from_toml(text)
    except ValueError as error:
        raise ConfigError(f"{origin} is not valid TOML: {error}{_HINT_ON_QUOTES if 'Invalid value' in str(error) else ''}") from error
    groups = [[single for override in group for single in split_by_key(override)] for group in overrides]
    if {_key_of(override) for group in groups for override in group} - {"seed", "name"}:
        tree["description"] = ""  # an override of the description itself is applied below
    for group in groups:
        for override in sorted(group, key=lambda each: not _sets_mechanism_name(each)):  # the mechanism's name comes first
            _apply_override(tree, override)
            if _sets_mechanism_name(override):
                _drop_foreign_settings(tree)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        mechanism = str(_section(tree, "mechanism").get("name", "duchi"))
        raise ConfigError(validation_message(error, origin, known_keys(mechanism), tuple(RunConfig.model_fields), mechanism)) from None
    _check_noise_not_set_twice(config, [text for group in groups for text in group])
    return config


_HINT_ON_QUOTES = '; put texts in quotes, also in lists: name = "a", names = ["a", "b"]'


def _check_noise_not_set_twice(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` if an override sets the noise, and ``privacy.target_epsilon`` is set, which would replace that noise."""
    if config.privacy.target_epsilon == "off" or not overrides:
        return
    try:
        little_noise, much_noise = (config.mechanism.at_strength(strength) for strength in (2.0, 0.5))
    except ConfigError:  # the mechanism has no adjustable noise, and setting the target is refused elsewhere
        return
    # The settings that set the noise are those that differ between two amounts of noise.
    noise_keys = {
        f"mechanism.{name}" for name in type(config.mechanism).model_fields if getattr(little_noise, name) != getattr(much_noise, name)
    }
    for key in map(_key_of, overrides):
        if key in noise_keys:
            target = config.privacy.target_epsilon
            raise ConfigError(
                f"{key} was set, but it is computed from privacy.target_epsilon = {target:g}: leave {key} out, or set "
                "privacy.target_epsilon to 'off'"
            )


def split_by_key(override: str) -> list[str]:
    """Split an override of a whole section, such as ``clients={count = 5}``, into one for each key. Return any other override unchanged."""
    section, _, text = override.partition("=")
    if section.strip() not in SECTIONS or not isinstance(value := setting_value(text.strip()), dict):
        return [override]
    return settings_as_text({section.strip(): value})


def settings_as_text(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as ``key=value`` texts. Sections, such as ``{"clients": {"count": 5}}``, are split into their keys."""
    return [f"{key}={toml_value(value)}" for key, value in flattened(settings).items()]


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with the dict of each section replaced by its keys, as ``section.key``."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        is_section = key in SECTIONS and isinstance(value, Mapping)
        flat |= {f"{key}.{name}": setting for name, setting in value.items()} if is_section else {key: value}
    return flat


def _key_of(override: str) -> str:
    """Return the dotted key of an ``override``, a ``key=value`` text."""
    return override.partition("=")[0].strip()


def _sets_mechanism_name(override: str) -> bool:
    """Return whether an ``override``, a ``key=value`` text, chooses the mechanism."""
    return _key_of(override) == "mechanism.name"


def _drop_foreign_settings(tree: dict[str, Any]) -> None:
    """Remove from the section ``mechanism`` of ``tree``, in place, all settings that the mechanism with this section's ``name`` lacks."""
    mechanism = tree["mechanism"]
    with suppress(ConfigError):  # an unknown name, which is refused later
        known = settings_of(str(mechanism["name"])).model_fields
        tree["mechanism"] = {key: value for key, value in mechanism.items() if key in known}


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set the dotted key of a ``key=value`` text in the nested ``tree``, in place, or raise a :class:`ConfigError` if it is not valid."""
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"setting {shown(override)} is not of the form key=value")
    if not is_text(override):
        raise ConfigError(
            f"setting {shown(key)} has bytes that are no text, in {shown(text.strip())}: rename the file or the column; "
            "if the name is valid UTF-8 but the locale is not UTF-8, set PYTHONUTF8=1"
        )
    parts = key.split(".")
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"setting {key!r}: {part!r} is a setting with a value, not a section, so it has no settings: leave this setting out"
            )
        node = child
    node[parts[-1]] = setting_value(text.strip())


def toml_value(value: Any) -> str:
    """Return ``value`` as TOML in one line, or raise a :class:`ConfigError` if it is a data frame or a container without a TOML form.

    Numbers and arrays of NumPy, pandas and PyTorch become plain numbers and lists.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(str(key))} = {toml_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):  # before whole numbers, since a bool is one
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if hasattr(value, "shape") or (hasattr(value, "__getitem__") and not isinstance(value, str)):
        raise ConfigError(f"a setting is {shown(value)}, expected a number, a text, or a list of these; give data with the argument data")
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """Return ``text`` as a TOML string. That is a JSON string in which the delete character is escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def setting_value(text: str) -> Any:
    """Parse ``text`` as a TOML value. If it is not valid TOML, it is a plain string.

    Raises:
        ConfigError: after the value, ``text`` goes on with another setting, which would be lost; or ``text`` begins like a list or a
            table, and is not valid.
    """
    try:
        tree = from_toml(f"value = {text}")
    except ValueError:
        if text.startswith(("[", "{")):
            raise ConfigError(
                f'{shown(text)} begins like a list or a table, but cannot be read as one: put its texts in quotes, as in ["a", "b"] or '
                '{sex = ["f", "m"]}'
            ) from None
        return text
    if len(tree) > 1:
        raise ConfigError(f"one setting has more than one value: {text[:80]!r}; give settings one by one, or with semicolons between them")
    return tree["value"]


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the section ``name`` of ``tree``, or an empty one if ``tree`` has none or another value in its place."""
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def known_keys(mechanism: str = "duchi") -> tuple[str, ...]:
    """Return the dotted keys of all settings of a config with this ``mechanism``; of an unknown one, those that every mechanism has."""
    others = [key for key in _by_dotted_key(RunConfig().model_dump()) if not key.startswith("mechanism.")]
    try:
        settings = settings_of(mechanism).model_fields
    except ConfigError:
        settings = MechanismSettings.model_fields
    return (*others, *(f"mechanism.{name}" for name in settings))


def _by_dotted_key(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested ``tree`` by dotted key. Each key begins with ``prefix``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:  # an empty table is the value of a setting
            flat.update(_by_dotted_key(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
