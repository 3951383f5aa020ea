"""The section ``[data]`` of a config: which data, and how they are divided over the clients."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal
from unicodedata import normalize

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

from ldpfl.data.cells import MISSING_WORDS, parse_day
from ldpfl.data.partition import BY_LABEL, Isolation, Scheme
from ldpfl.data.persons import DEFAULT_ROWS
from ldpfl.errors import ConfigError
from ldpfl.util.quantities import Count, Positive
from ldpfl.util.user_code import GIVEN, is_code, is_pretrained

NODE = "node"
"""Name of data that each client on Flower has itself."""


def _day(value: Any) -> Any:
    """Return a bound that is a date as its day number. Any other value is returned unchanged, and pydantic checks it."""
    if not isinstance(value, str | date):
        return value
    try:
        return parse_day(value if isinstance(value, str) else value.isoformat())
    except ValueError:
        return value


def _check_code(name: str) -> str:
    """Return ``name``, the import path of a user's own partition, or raise if it is not an import path."""
    if not is_code(name):
        raise ValueError(f"got {name!r}, expected a built-in partition, or your own as package.module:function or file.py:function")
    return name


def _check_tokenizer(name: str) -> str:
    """Return the tokenizer ``name``, or raise if it has no form that can be loaded. An empty name stands for the model's tokenizer."""
    if name and not is_pretrained(name):
        raise ValueError(f"got {name!r}, expected a tokenizer as hf:NAME or hf:FOLDER")
    return name


class DataConfig(BaseModel):
    """Which data are used, and how they are divided over the clients."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    name: str = "mnist"
    """A built-in data set, the id of one on the Hugging Face hub (``owner/name``), or ``package.module:function``, which returns a
    data frame or an ``ldpfl.data.Dataset``; or ``node``, on Flower: each node's own table."""
    path: str = ""
    """A CSV or Parquet file, a folder of them, or a folder of images by class, instead of a data set by name. The pixels x of images become
    (x / 255 - 0.5) / 0.25."""
    target: str | list[str] = ""
    """The column that is to be predicted; several for a task of several labels; for survival the time and the event."""
    columns: list[str] = []
    """The columns to predict from. By default all other columns."""
    client: str = ""
    """The column that names the client that a row belongs to; without one, ``partition`` divides the rows."""
    person: str = ""
    """The column of a table that names each row's person, where persons may have several rows. Mechanisms that protect records then
    protect all records of one person at a client. All rows of a person go to one client, and to either the training or the test set. Both
    follow from the person's own name."""
    person_rows: Annotated[int, Field(ge=1, le=4096)] = DEFAULT_ROWS
    """Maximum number of a person's rows that count in one round. The person's mean gradient over them is clipped. If a person has more
    rows, they take turns from round to round. A larger value takes more time for each person, and adds no noise."""
    bounds: dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = {}
    """For columns of numbers, the publicly known least and largest value; see ``scaling``. For a column of dates they may be
    dates, ``["2015-01-01", "2024-12-31"]``, which are kept as days since 1970."""
    scaling: Literal["quantiles", "measured", "bounds"] = "quantiles"
    """How columns of numbers are scaled. ``quantiles`` measures each column before the first round, by the mechanism and as a part of its
    guarantee, within ``bounds`` if it has any. ``bounds`` maps each column from its bounds to [-1, 1] and measures nothing. Nodes' own
    tables are measured only with ``measured``, which in a simulation equals ``quantiles``; else nodes use ``bounds``."""
    class_shares: list[Annotated[FiniteFloat, Field(gt=0, lt=1)]] = []
    """Publicly known share of each class, in the order of ``classes``, or of each label; or the hazard of each interval of
    ``survival``. The bias of the model's outputs starts at it; a model without such a bias is refused, unless ``task.class_weights`` is
    ``balanced``. By default it is measured with the columns of a table."""
    numbers: list[str] = []
    """Columns that hold numbers. ``words`` and ``dates`` name columns of words and dates. By default most of a column's cells decide. Codes
    with leading zeros, such as ``0471``, are words. Among numbers, a cell such as ``<0.5`` counts as the number at the limit."""
    words: list[str] = []
    """See ``numbers``."""
    dates: list[str] = []
    """Columns of ISO dates, or dates and times, such as ``2024-12-31T08:30``; see ``numbers``. They become days since 1970-01-01."""
    missing_words: list[str] = list(MISSING_WORDS)
    """Words that mean "no value", in upper or lower case. They may be numbers, such as 999. An empty cell never has a value. A word in
    ``classes`` or ``categories``, or the name of a client, is always a value."""
    categories: dict[str, list[str]] = {}
    """For columns of words, the publicly known words. By default words are hashed into ``buckets`` buckets."""
    buckets: Annotated[int, Field(ge=2, le=4096)] = 128
    """Number of hash buckets for a column of words without ``categories``."""
    classes: list[str] = []
    """Names of the classes of a classification; for ``ordinal``, in ascending order. By default they are taken from the data, and the
    guarantee says so."""
    cut_points: list[Annotated[FiniteFloat, Field(gt=0)]] = []
    """Times at which the intervals of ``survival`` end, ascending, in the unit of the time. By default eight, by measured quantiles."""
    missing: Literal["center", "indicator", "refuse"] = "center"
    """How a missing number is treated: the middle of its column, the middle and an indicator column, or an error."""
    text: str = ""
    """The column that holds texts, for models of texts."""
    tokenizer: Annotated[str, AfterValidator(_check_tokenizer)] = ""
    """Tokenizer for a pretrained model: ``hf:NAME`` or ``hf:FOLDER``. By default that of the model. Other models take hashed words.
    ``text`` may be left out if the table has only one column beside the target's."""
    tokenizer_digest: str = ""
    """SHA-256 of the tokenizer's vocabulary, as a finished run states it. If set, a tokenizer with another vocabulary is refused."""
    length: Count = 64
    """Number of words or tokens that are kept of a text; of bytes, for a language model that is not pretrained. Short texts are padded."""
    vocabulary: Annotated[int, Field(ge=2, le=2**20)] = 4096
    """Number of hash buckets for the words of texts. A language model that is not pretrained uses the 256 bytes instead."""
    test_path: str = ""
    """Test rows, in the same form as ``path``. By default a fifth of the rows, by a hash of their positions (``ldpfl.data.held_out`` says
    which), or all rows of about a fifth of the persons, by a hash of their names (``ldpfl.data.held_out_by_person``)."""
    features: str = "none"
    """Public, frozen transform that is applied to each sample before training: a name, ``timm:NAME``, ``hf:NAME`` or ``hf:FOLDER``, or
    ``package.module:Class``."""
    features_digest: str = ""
    """SHA-256 of the frozen weights that compute the ``features``, as Flower's terms name it. If set, other weights are refused."""
    feature_options: dict[str, bool | int | float | str] = {}
    """Options of the ``features``. ``timm`` takes ``size``, in pixels, and ``weights``, a file in place of the hub's."""
    partition: Scheme | Annotated[str, AfterValidator(_check_code)] = "iid"
    """How samples are divided over clients: equal shares, by Dirichlet proportions of each label, by labels, or unequal shares. Or your own
    ``file.py:function`` or ``package.module:function``, which is called with the number of samples, the number of clients and the seed,
    and returns the client of each sample, from 0, or -1 to leave it out. It sees no row and no label. Persons (``person``) are divided by
    their names, with ``iid`` or ``quantity`` alone."""
    alpha: Positive = 0.5
    """Concentration of ``dirichlet`` and ``quantity``. The smaller it is, the more clients differ."""
    labels_per_client: Count = 2
    """Labels that a client holds with ``labels``."""
    private_label: Annotated[int, Field(ge=0)] | Literal["none"] = "none"
    """Label of which client 0, honest but curious, holds no sample, as in LaDP-FL; works with every ``partition``."""
    private_alpha: Positive = 0.5
    """With ``dirichlet`` and a private label, the ``alpha`` for dividing that label over the other clients."""
    validation: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Share of the test rows, at even distances, or of the test persons, that decides on early stopping (``training.patience``). These are
    left out of the scores. Like all test rows they are not protected."""
    evaluate_on: Literal["test", "holdout", "clients"] = "test"
    """``holdout`` sets a tenth of the training samples aside and evaluates on them. Use it to choose hyper-parameters. The seed draws these
    samples, unless they have names of persons or files: compare runs with the same seed, or in one sweep. ``clients``, for simulations
    only, evaluates on the records that each client holds back (``evaluation.share``), with scores by client."""

    @model_validator(mode="before")
    @classmethod
    def _days_of_dates(cls, given: Any) -> Any:
        """Convert bounds that are dates to day numbers, and add their columns to ``dates``. Invalid values are left for pydantic."""
        bounds = given.get("bounds") if isinstance(given, dict) else None
        if not isinstance(bounds, dict):
            return given
        pairs = {name: pair for name, pair in bounds.items() if isinstance(pair, list)}
        days = {name: [_day(value) for value in pair] for name, pair in pairs.items()}
        date_columns = [name for name, pair in pairs.items() if days[name] != pair]  # a bound was converted, so it was a date
        named_dates = given.get("dates", [])
        if not date_columns or not isinstance(named_dates, list):
            return given
        return {**given, "bounds": bounds | days, "dates": [*named_dates, *(name for name in date_columns if name not in named_dates)]}

    @model_validator(mode="before")
    @classmethod
    def _without_the_text(cls, given: Any) -> Any:
        """Leave ``columns`` out if it names the column of texts alone, which is read anyway."""
        is_repeated = isinstance(given, dict) and given.get("text") and given.get("columns") == [given["text"]]
        return {**given, "columns": []} if is_repeated else given

    @field_validator("classes", "categories")
    @classmethod
    def _in_one_form(cls, words: Any) -> Any:
        """Return ``words`` in one Unicode form, as words of a table are read."""
        if isinstance(words, dict):
            return {name: cls._in_one_form(listed) for name, listed in words.items()}
        normalised = [normalize("NFC", word) for word in words]
        if len(set(normalised)) < len(normalised):
            twice = next(word for word in normalised if normalised.count(word) > 1)
            raise ValueError(f"expected each word once, but {twice!r} stands there twice")
        return normalised

    @field_validator("cut_points")
    @classmethod
    def _check_ascending(cls, points: list[float]) -> list[float]:
        if points != sorted(set(points)):
            raise ValueError("expected numbers in ascending order, none twice")
        return points

    @property
    def target_names(self) -> tuple[str, ...]:
        """Columns to predict. For a language model, this is the column of texts.

        Raises:
            ConfigError: neither ``target`` nor ``text`` names a column.
        """
        if self.text and not self.target:
            return (self.text,)
        if not self.target:
            raise ConfigError("data.target is missing: name the column to predict with --target COLUMN (data.target)")
        return (self.target,) if isinstance(self.target, str) else tuple(self.target)

    @property
    def brought(self) -> bool:
        """Whether the data are the user's own: read from a path or the hub, made by code, or passed from Python."""
        return bool(self.path or self.test_path) or is_code(self.name) or "/" in self.name or self.name == GIVEN

    @property
    def at_nodes(self) -> bool:
        """Whether each client on Flower has a table of its own."""
        return self.name == NODE

    @property
    def by_label(self) -> bool:
        """Whether the label of one sample affects which client gets another sample."""
        return self.partition in BY_LABEL or self.private_label != "none"

    @property
    def isolated(self) -> Isolation | None:
        """Private label that client 0 does not get, or None."""
        return None if self.private_label == "none" else Isolation(self.private_label, self.private_alpha)
