"""The config of a run: what a person writes in TOML or sets by key and value, checked before anything starts."""

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
from ldpfl.experiments.config_errors import explained
from ldpfl.mechanisms import MechanismSettings, read_settings, settings_of
from ldpfl.mechanisms.duchi import DuchiSettings
from ldpfl.models.adapters import Adapter, Kind
from ldpfl.privacy.events import Channel
from ldpfl.server.round_aggregation import Rule, Schedule, ServerOptimiser
from ldpfl.simulation.local_steps import Kind as LocalKind
from ldpfl.simulation.local_steps import LocalOptimiser
from ldpfl.util.files import from_toml, read_text
from ldpfl.util.quantities import MAX_ROUNDS, Count, NotNegative, Positive, Repeats, Share


def _printable(text: str) -> str:
    if printable(text) != text:
        raise ValueError("has characters that are not printable")
    return text


Printable = Annotated[str, AfterValidator(_printable)]
"""A folder may be somebody else's: nothing of it may steer the terminal that shows it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TaskConfig(_Section):
    """What is learned of the data."""

    name: str = "classification"
    """``classification``, ``multilabel``, ``regression``, ``poisson`` (counts), ``ordinal`` (ordered classes), ``survival`` (two columns,
    of times and events) or ``language-model``; or ``package.module:function``, which is told the number of outputs and returns an
    ``ldpfl.tasks.Task``."""
    threshold: Annotated[FiniteFloat, Field(gt=0, lt=1)] | Literal["off"] = "off"
    """Of two classes, a risk from which on a row counts as flagged: sensitivity, specificity and positive predictive value stand at it,
    too, beside those at 0.5 and at the base rate. It changes no model."""


class ModelConfig(_Section):
    """The model: a name, or ``package.module:Class`` with its ``options``."""

    name: str = "two-layer-cnn"
    """A built-in model, or ``package.module:Class`` or ``file.py:Class``, which is called with the options, and with those of ``inputs``,
    ``outputs``, ``shape`` and ``vocabulary`` that it requires: the sizes of the data. Or ``hf:FOLDER`` or ``hf:NAME``, a pretrained model
    of ``transformers`` in a folder or on the hub."""
    options: dict[str, bool | int | float | str] = {}
    """What the model is made with."""
    mend: bool = False
    """Replace what keeps the model from private training, such as batch normalisation; ``ldpfl check`` says what that is. The dropout of a
    pretrained model is set to 0 in any case."""
    adapter: Kind = "none"
    """What of a pretrained model is trained: ``none`` is all of it, ``head`` the layers of its outputs alone; ``lora``, ``ia3`` and
    ``prompt`` (prompt tuning) add an adapter of ``peft``, and train it and the head."""
    adapter_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of the products that ``lora`` adds to layers."""
    adapter_alpha: Positive = 16.0
    """Factor on these products, divided by their rank."""
    adapter_modules: list[str] = []
    """Layers that ``lora`` or ``ia3`` changes, by the ends of their names; without any, those that ``peft`` knows for the kind of model."""
    adapter_tokens: Annotated[int, Field(ge=1, le=4096)] = 8
    """Tokens that ``prompt`` trains."""
    licence: str = ""
    """Licence of the pretrained weights, where neither a file beside them nor their model card says it; ``own`` for your own."""
    base: str = ""
    """SHA-256 of the frozen weights of a pretrained model, as a finished run states it; no other base is taken then."""

    @property
    def adapted(self) -> Adapter:
        """What of a pretrained model is trained."""
        return Adapter(self.adapter, self.adapter_rank, self.adapter_alpha, tuple(self.adapter_modules), self.adapter_tokens)


class ClientsConfig(_Section):
    """How many clients there are (n), and which part of them takes part in a round (f_r)."""

    count: Count = 100
    """How many clients there are; where ``data.client`` names them, as many as it does."""
    fraction: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Part of the clients that the server draws for a round."""
    self_sampling: Literal["off", "restrictive", "plain"] = "off"
    """Each client decides for itself, with probability q ~ U(0.5, 1) or U(0, 1) a round; then ``fraction`` must be 1."""
    full_weight: Count | Literal["off"] = "off"
    """Records from which on a client counts in full; the change that a smaller one sends is scaled by its share of them, before
    noise. So it costs no privacy and tells no sizes, and the noise stays what it is. Not for ``dp-sgd``, where records count anyway."""
    once: bool = False
    """Each client takes part in one round of the whole run, in a secret random order; then ``fraction`` must be 1."""


LOWEST_PROBABILITY = {"off": None, "restrictive": 0.5, "plain": 0.0}


Method = Literal["gradient", "least-squares"]

DEFAULT_SHARE = 0.1
"""Share of the records that clients hold back where only an epsilon of evaluation is given."""


class TrainingConfig(_Section):
    """Rounds on the server, epochs of SGD on the client."""

    method: Method = "gradient"
    """``gradient`` trains by steps, as the mechanism says. ``least-squares`` sums the products of each record's features and solves for a
    linear head, in one round: for ``dp-sgd``, and the models ``linear`` and ``logistic-regression``. No other setting of this section has
    an effect then; see the section ``least_squares``."""
    rounds: Repeats = 10
    """Number of rounds. ``least-squares`` takes 1. More local training in a round (``epochs``) costs no more privacy."""
    epochs: Annotated[int, Field(ge=1, le=10**5)] = 5
    """In which a client goes through its samples in each round."""
    batch_size: Count = 10
    """Samples of each of a client's steps."""
    learning_rate: Positive = 0.03
    """Of the client."""
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Of the client's SGD."""
    optimiser: LocalKind = "sgd"
    """Of the client: ``sgd``, or ``adam``, whose moments begin anew in each round."""
    weight_decay: NotNegative = 0.0
    """Part of the weights that each of the client's steps adds to the gradient."""
    proximal: NotNegative = 0.0
    """Part of the way from the broadcast weights that each of the client's steps adds to the gradient (FedProx)."""
    schedule: Schedule = "constant"
    """Of the client's learning rate over the rounds: ``linear`` and ``cosine`` let it fall to 0."""
    clip_norm: Positive | Literal["off"] = "off"
    """Longest gradient of a mini-batch, flat over all weights; a longer one is shortened to it, as in LaDP-FL."""
    patience: Annotated[int, Field(ge=0, le=MAX_ROUNDS)] = 0
    """Rounds without a lower loss on ``data.validation`` after which no more is trained, and the model of the best round is the result;
    0 trains in all rounds. The guarantee is that of all rounds: when to stop follows from what was released."""
    extended: Annotated[int, Field(ge=0, le=MAX_ROUNDS)] = 0
    """How many of the rounds were added after the run had come to its end; ``ldpfl run --more-rounds`` counts them."""
    server_optimiser: Rule = "sgd"
    """Of the server, which costs no privacy: ``sgd`` (FedAvg, with ``server_momentum`` FedAvgM), ``adam`` or ``yogi``."""
    server_learning_rate: Positive | Literal["auto"] = 1.0
    """Scales the mean update or gradient; of no effect where ``mechanism.perturbed`` is ``weights``. ``auto`` chooses it for a table, by
    the noise and by how rare a class is, and for images and arrays by the noise and by how it moves the outputs of the model, see
    ``ldpfl.experiments.table_rules``."""
    server_weight_decay: NotNegative | Literal["auto"] = 0.0
    """Part of the way back to the initial weights that the server adds to each mean gradient; it costs no privacy. ``auto`` chooses it for
    tables, by the noise; for images and arrays it is 0."""
    server_momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Part of the server's last step that is carried on to the next (heavy ball; for ``adam`` and ``yogi`` beta 1, such as 0.9)."""
    server_schedule: Schedule = "constant"
    """Of the server's learning rate over the rounds: ``linear`` and ``cosine`` let it fall to 0."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether clients' steps are compiled, which takes a C++ compiler and 10 s the first time, and changes last bits of the model. ``auto``
    does so for long runs on a CPU."""
    precision: Literal["float32", "bf16"] = "float32"
    """Of products in local training: ``bf16`` computes them with 8 significant bits, which is faster for wide layers on processors that
    can. Whatever is clipped, randomised or sent is float32."""
    average: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """Share of the run, from its end, over which the global weights are averaged; the average is what is measured and kept."""

    @model_validator(mode="before")
    @classmethod
    def _one_round(cls, given: Any) -> Any:
        """Take one round for a method that has no more."""
        if isinstance(given, dict) and given.get("method") == "least-squares":
            return {"rounds": 1, **given}
        return given

    @model_validator(mode="after")
    def _check_one_round(self) -> Self:
        if self.method == "least-squares" and self.rounds != 1:
            raise ValueError(f"method 'least-squares' takes one round, and rounds is {self.rounds}: set training.rounds to 1")
        return self

    def at_client(self) -> LocalOptimiser:
        """Return what clients make of their gradients."""
        rate, momentum, kind = self.learning_rate, self.momentum, self.optimiser
        return LocalOptimiser(rate, momentum, kind, self.weight_decay, self.proximal, self.schedule, self.rounds)

    def at_server(self, measured: int, start: Tensor) -> ServerOptimiser:
        """Return what the server makes of a mean.

        Args:
            measured: how many weights of the model, the first ones, are measured and not trained.
            start: (d,) initial weights.

        Raises:
            ConfigError: the learning rate or the weight decay is still to be chosen.
        """
        rate, decay = self.server_learning_rate, self.server_weight_decay
        if rate == "auto" or decay == "auto":
            raise ConfigError("training.server_learning_rate and server_weight_decay are 'auto' for one's own data only: give numbers")
        momentum, schedule = self.server_momentum, self.server_schedule
        return ServerOptimiser(rate, momentum, schedule, self.rounds, self.average, measured, self.server_optimiser, decay, start)


class LeastSquaresConfig(_Section):
    """How ``training.method = "least-squares"`` weighs and solves; all of it is public. It has no effect elsewhere."""

    feature_norm: Positive = 1.0
    """Longest vector of features of a record, without the constant of a bias; a longer one is shortened to it. Features of this project
    have length 1; of the columns of a table, the root of their number is about the usual length."""
    target_bound: Positive = 3.0
    """Largest target that is a number, in units of its spread; a larger one is cut to it."""
    target_share: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 0.5
    """Share of the products of features and targets in the squared length of what a record adds; the rest is that of the products of its
    features with each other. A larger share makes the noise of the former smaller and that of the latter larger."""
    eigenvalue_floor: NotNegative = 0.5
    """Least eigenvalue of the mean product of features, as a multiple of the largest eigenvalue that noise alone would have."""
    ridge: NotNegative = 0.0
    """Ridge that is added to each eigenvalue, as a multiple of the same noise eigenvalue."""


class EvaluationConfig(_Section):
    """Evaluation at clients: the records that they hold back from training, and the epsilon of measuring on these records."""

    share: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Part of each client's records, or of all persons, that is not trained on; 0.1 where ``epsilon`` is given alone. Places decide which,
    or names of persons."""
    epsilon: Positive | Literal["off"] = "off"
    """Epsilon of all that clients send of these records in the run, charged in the same ledger; ``off`` looks at none of them."""
    every: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Rounds after which the model is measured, each time; it is measured after the last round in any case. 0 does so there alone."""
    loss_bound: Positive = 5.0
    """Largest loss of a record that counts; a larger one is cut to it."""
    records: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Mean number of records, or of persons, that a client holds back, which is public. 0 takes that of the simulated clients. On Flower,
    0 takes the number that goes with ``mechanism.records``, which are those that are left to train on."""

    @model_validator(mode="before")
    @classmethod
    def _a_tenth(cls, given: Any) -> Any:
        """Hold a tenth of the records back where an epsilon is said and no share."""
        return {"share": DEFAULT_SHARE, **given} if isinstance(given, dict) and given.get("epsilon", "off") != "off" else given

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        if self.epsilon != "off" and self.share == 0:
            raise ValueError("evaluation.epsilon measures on records that are held back, and none are: set evaluation.share, such as 0.1")
        return self


class RangesConfig(_Section):
    """The range (center, radius) that each layer's values are clamped to."""

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


class ShufflingConfig(_Section):
    """What stands between clients and server in the deployment that is simulated."""

    channel: Channel = "ideal-shuffler"
    """Accuracy does not depend on it, the ledger does: a random delay is no shuffler."""
    max_clients: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Most clients whose reports a ``secure-sum`` adds up in a round, which is public: whether 32 bits a weight hold the sum follows from
    it. 0 takes ``clients.count``."""
    colluding: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Clients of each round that are not relied on, for a ``secure-sum``: they may tell others what they sent, or leave out their share of
    the noise. The guarantee counts the noise of the others alone, and a target epsilon is kept by them."""

    @model_validator(mode="after")
    def _check_sums(self) -> Self:
        if self.channel != "secure-sum" and (self.max_clients or self.colluding):
            raise ValueError("max_clients and colluding are for the channel 'secure-sum': set shuffling.channel to it, or leave them out")
        return self


class PrivacyConfig(_Section):
    """How the guarantee is stated, and what it is to be."""

    delta: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 1e-5
    """Failure probability of the figures that are not pure; it should be below 1 / n."""
    target_epsilon: Positive | Literal["off"] = "off"
    """Epsilon of all that a client, or one record of it, ever sends in the run; the mechanism's noise is set by it."""
    measuring_share: Share = 0.15
    """Share of the run's squared privacy parameter (mu^2 of Gaussian noise) that is spent on measuring a table's columns."""


class RunConfig(_Section):
    """A complete run. Two runs of equal configs on the same machine end in the same model, bit by bit."""

    name: Printable = "run"
    """Of the run, for its folder and tables."""
    description: Printable = ""
    """What it is for."""
    seed: Annotated[int, Field(ge=0, lt=2**128)] = 0
    """From which all that a simulation draws follows: on your own data the noise too, if you give a seed, so that whoever knows it can
    take the noise off. Without one, the noise on your own data has a secret of its own, and the seed decides about the rest alone."""
    secret_noise: bool = False
    """Whether the noise on your own data, and who takes part in secret, follow from a secret that is drawn for each run and kept in the
    run's folder, in the file ``SECRET-seed``. It is set for your own data unless you give a seed."""
    data: DataConfig = DataConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    clients: ClientsConfig = ClientsConfig()
    training: TrainingConfig = TrainingConfig()
    mechanism: Annotated[SerializeAsAny[MechanismSettings], BeforeValidator(read_settings)] = DuchiSettings()
    """What clients do to their values before they leave: the settings of the mechanism that ``name`` says."""
    ranges: RangesConfig = RangesConfig()
    shuffling: ShufflingConfig = ShufflingConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    least_squares: LeastSquaresConfig = LeastSquaresConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def hides_seed(self) -> bool:
        """Whether the noise on a user's own rows follows from ``seed``, which then is shown to nobody."""
        return self.data.brought and not self.secret_noise

    def to_toml(self) -> str:
        """Return the whole config, defaults included, as TOML."""
        return tomli_w.dumps(self.model_dump())

    def differences(self, other: RunConfig) -> list[str]:
        """Return a line ``key: ours -> theirs`` for each setting in which ``other`` differs."""
        ours, theirs = _flat(self.model_dump()), _flat(other.model_dump())
        hidden = {"seed"} if self.hides_seed or other.hides_seed else set()
        return [
            f"{key}: another one" if key in hidden else f"{key}: {ours.get(key)!r} -> {theirs.get(key)!r}"
            for key in sorted({*ours, *theirs})
            if ours.get(key) != theirs.get(key)
        ]


_SECTIONS = frozenset(key for key, value in RunConfig().model_dump().items() if isinstance(value, dict))


def read_config(path: Path, *overrides: Iterable[str]) -> RunConfig:
    """Read a TOML file and apply ``key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value does not fit; one line, naming the key.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse_config(text, *overrides, origin=str(path))


def parse_config(text: str, *overrides: Iterable[str], origin: str) -> RunConfig:
    """Turn TOML ``text`` and ``key=value`` overrides into a config; ``origin`` is named in errors.

    Overrides may come in several lists. One that names another mechanism leaves, of what was set before its list, the settings that
    this mechanism has too; so a list can choose a mechanism, and what it says itself is checked by that.
    """
    try:
        tree = from_toml(text)
    except ValueError as error:
        raise ConfigError(f"{origin} is not valid TOML: {error}{_QUOTES if 'Invalid value' in str(error) else ''}") from error
    _without_noise_section(tree, origin)
    groups = [[one for override in group for one in _by_key(override)] for group in overrides]
    for group in groups:
        for override in sorted(group, key=lambda text: not _names_mechanism(text)):
            _apply(tree, override)
            if _names_mechanism(override):
                _keep_what_fits(tree)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        named = str(_section(tree, "mechanism").get("name", "duchi"))
        raise ConfigError(explained(error, origin, known_keys(named), tuple(RunConfig.model_fields), named)) from None
    _check_one_says_the_noise(config, [text for group in groups for text in group])
    return config


_QUOTES = '; texts stand in quotes, in lists too: name = "a", names = ["a", "b"]'


def _check_one_says_the_noise(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` if one of ``overrides`` sets what is found for a target: it would be replaced without a word."""
    if config.privacy.target_epsilon == "off" or not overrides:
        return
    try:
        twice, half = (config.mechanism.at_strength(strength) for strength in (2.0, 0.5))
    except ConfigError:  # it has none, which is refused where one is looked for
        return
    found = {f"mechanism.{name}" for name in type(config.mechanism).model_fields if getattr(twice, name) != getattr(half, name)}
    for key in (override.partition("=")[0].strip() for override in overrides):
        if key in found:
            target = config.privacy.target_epsilon
            raise ConfigError(
                f"{key} is found for privacy.target_epsilon = {target:g}, and was set: set the target to another number, or to 'off'"
            )


def _by_key(override: str) -> list[str]:
    """Return one override for each key of a section that is given as a whole, such as ``clients={count = 5}``, and else ``override``."""
    section, _, text = override.partition("=")
    if section.strip() not in _SECTIONS or not isinstance(value := setting_value(text.strip()), dict):
        return [override]
    return settings_as_text({section.strip(): value})


def settings_as_text(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as ``key=value``; those of a section, as ``{"clients": {"count": 5}}``, one by one."""
    found: list[str] = []
    for key, value in settings.items():
        inner = {f"{key}.{name}": part for name, part in value.items()} if key in _SECTIONS and isinstance(value, Mapping) else {key: value}
        found += (f"{name}={toml_value(part)}" for name, part in inner.items())
    return found


def _names_mechanism(override: str) -> bool:
    return override.partition("=")[0].strip() == "mechanism.name"


def _keep_what_fits(tree: dict[str, Any]) -> None:
    mechanism = tree["mechanism"]
    with suppress(ConfigError):  # an unknown name, which is refused later
        known = settings_of(str(mechanism["name"])).model_fields
        tree["mechanism"] = {key: value for key, value in mechanism.items() if key in known}


class _OnceForAll(_Section):
    """Settings that every mechanism had in configs of version 0.1, whether it used them or not."""

    group: Count | Literal["layer"] = "layer"
    coordinates: Count | Literal["all", "auto"] = "all"
    norm: Positive = 1.0
    magnitude_share: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.5


_NOISE = (
    *("delta", "sensitivity", "constant", "layers_separately", "selection", "threshold", "p_max", "p_min", "normaliser", "share_rule"),
    *("smallest_share", "variant", "participations", "ratio", "contraction", "own_share", "kappa", "clip_to_estimate", "rate_decay"),
    *("degrees_bug", "exposures"),
)
"""Settings of the section ``[noise]`` that configs of version 0.1 had."""


def _without_noise_section(tree: dict[str, Any], origin: str) -> None:
    """Read a config of version 0.1, with a section ``[noise]`` for all Gaussian mechanisms; others ignored it, as they did ``group``.

    Raises:
        ConfigError: it has a setting that configs of that version did not have, or one of a value that it could not have.
    """
    noise, mechanism = tree.pop("noise", None), tree.get("mechanism", {})
    if noise in (None, {}) or not isinstance(mechanism, dict):
        return
    for key in noise if isinstance(noise, dict) else {"": noise}:
        if key not in _NOISE:
            setting = f"noise.{key}" if key else "noise"
            raise ConfigError(f"unknown setting {setting!r} in {origin}: what noise there is stands in [mechanism] today")
    name = str(mechanism.get("name", "duchi"))
    try:
        known = settings_of(name).model_fields
    except ConfigError:  # which is refused later
        return
    foreign = {key: value for key, value in mechanism.items() if key in _OnceForAll.model_fields and key not in known}
    try:
        _OnceForAll.model_validate(foreign)
    except ValidationError as error:
        raise ConfigError(explained(error, f"{origin}, section mechanism", tuple(foreign), (), name)) from None
    own = {key: value for key, value in mechanism.items() if key not in foreign}
    tree["mechanism"] = {**{key: value for key, value in noise.items() if key in known}, **own}


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"setting {shown(override)} is not of the form key=value")
    if not is_text(override):
        raise ConfigError(
            f"setting {shown(key)} has bytes that are no text, in {shown(text.strip())}: rename the file or the column; "
            "where that is a name in UTF-8, and the locale knows none, set PYTHONUTF8=1"
        )
    parts = key.split(".")
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"setting {key!r}: {part!r} is a value, not a section")
        node = child
    node[parts[-1]] = setting_value(text.strip())


def toml_value(value: Any) -> str:
    """Return ``value`` as TOML, in one line; numbers and arrays of NumPy, pandas and PyTorch as what they hold."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(str(key))} = {toml_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if hasattr(value, "shape") or (hasattr(value, "__getitem__") and not isinstance(value, str)):
        raise ConfigError(f"a setting is a number, a text, or a list of such, and {shown(value)} was given: data go to the argument data")
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """Return ``text`` as a TOML string: as JSON has it, but for what only TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def setting_value(text: str) -> Any:
    """Read ``text`` as a TOML value, and as a plain string where it is none.

    Raises:
        ConfigError: something follows the value, which would be lost: another setting, most likely; or it begins like a list or a table,
            and is none.
    """
    try:
        tree = from_toml(f"value = {text}")
    except ValueError:
        if text.startswith(("[", "{")):
            raise ConfigError(
                f'{shown(text)} begins like a list or a table, and is none: texts in it stand in quotes, as in ["a", "b"] or '
                '{sex = ["f", "m"]}'
            ) from None
        return text
    if len(tree) > 1:
        raise ConfigError(f"more than a value in one setting: {text[:80]!r}; give settings one by one, or with semicolons between them")
    return tree["value"]


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def known_keys(mechanism: str = "duchi") -> tuple[str, ...]:
    """All settings of a config that names this ``mechanism``, in dotted form."""
    others = [key for key in _flat(RunConfig().model_dump()) if not key.startswith("mechanism.")]
    try:
        own = settings_of(mechanism).model_fields
    except ConfigError:
        own = MechanismSettings.model_fields
    return (*others, *(f"mechanism.{name}" for name in own))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
