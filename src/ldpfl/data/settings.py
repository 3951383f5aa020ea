"""The section ``[data]`` of a config: which data, and how they are divided over the clients."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

from ldpfl.data.cells import MISSING_WORDS, day_in
from ldpfl.data.partition import BY_LABEL, Isolation, Scheme
from ldpfl.data.persons import DEFAULT_ROWS
from ldpfl.errors import ConfigError
from ldpfl.util.quantities import Count, Positive
from ldpfl.util.user_code import GIVEN, is_code, is_pretrained

NODE = "node"
"""Name of data that each client on Flower has itself."""


def _day(value: Any) -> Any:
    """Return the day of a bound that is a date; what is none is left to be checked."""
    if not isinstance(value, str | date):
        return value
    try:
        return day_in(value if isinstance(value, str) else value.isoformat())
    except ValueError:
        return value


def _is_code(name: str) -> str:
    if not is_code(name):
        raise ValueError("a partition of your own is named package.module:function or file.py:function")
    return name


def _is_tokenizer(name: str) -> str:
    if name and not is_pretrained(name):
        raise ValueError("a tokenizer is named hf:NAME or hf:FOLDER")
    return name


class DataConfig(BaseModel):
    """Which data, and how they are divided over the clients."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    name: str = "mnist"
    """A built-in data set, the id of one on the Hugging Face hub (``owner/name``), or ``package.module:function``, which returns a
    data frame or an ``ldpfl.data.Dataset``; or ``node``, on Flower: each node's own table."""
    path: str = ""
    """A CSV or Parquet file, or a folder of them, in the place of a data set by name."""
    target: str | list[str] = ""
    """The column that is to be predicted; several for a task of several labels; for survival the time and the event."""
    columns: list[str] = []
    """The columns that it is told from; all others where there are none."""
    client: str = ""
    """The column that names the client that a row belongs to; without one, ``partition`` divides the rows."""
    person: str = ""
    """The column of a table that names the person whose record a row is, where persons may have several. Mechanisms that protect records
    then protect all records of one person at a client. Persons are dealt out to clients whole, and none has both training and test rows:
    both follow from each person's own name."""
    person_rows: Annotated[int, Field(ge=1, le=4096)] = DEFAULT_ROWS
    """Rows of a person that count in one round, at most: the person's mean gradient over them is clipped as one. Who has more has them take
    turns from round to round. More rows take more time, for each person, and make for no more noise."""
    bounds: dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = {}
    """For columns of numbers, the least and the largest value that the public knows of; see ``scaling``. Of a column of dates they may be
    dates, ``["2015-01-01", "2024-12-31"]``, which are kept as days since 1970."""
    scaling: Literal["quantiles", "measured", "bounds"] = "quantiles"
    """How numbers come to one scale: ``quantiles`` of each column, measured before the first round by the mechanism and as a part of its
    guarantee, within ``bounds`` where there are any; or ``bounds`` alone, which bring a column to [-1, 1] and measure nothing. Nodes' own
    tables are measured where it says ``measured``, which in a simulation is ``quantiles``; else nodes take ``bounds``."""
    class_shares: list[Annotated[FiniteFloat, Field(gt=0, lt=1)]] = []
    """Share of each class, in the order of ``classes``, or of each label, as the public knows it; or the hazard of each interval of
    ``survival``. Without, it is measured with the columns."""
    numbers: list[str] = []
    """Columns that hold numbers, and ``words`` those that hold words, where what most of their cells are is not to decide."""
    words: list[str] = []
    """See ``numbers``."""
    dates: list[str] = []
    """Columns of ISO dates, or dates and times, such as ``2024-12-31T08:30``; see ``numbers``. They become days since 1970-01-01."""
    missing_words: list[str] = list(MISSING_WORDS)
    """What stands for no value, in any case of letters, as an empty cell always does; numbers such as 999 too. A word that ``classes`` or
    ``categories`` names is a value all the same, and so is the name of a client."""
    categories: dict[str, list[str]] = {}
    """For columns of words, what may stand there, as the public knows it. Without, words are hashed into ``buckets`` places."""
    buckets: Annotated[int, Field(ge=2, le=4096)] = 128
    """Places that the words of a column without ``categories`` are hashed into."""
    classes: list[str] = []
    """What may stand in the target of a classification. Without, it is taken from the data, and the guarantee says so. For ``ordinal``,
    in their order."""
    cut_points: list[Annotated[FiniteFloat, Field(gt=0)]] = []
    """Where the intervals of ``survival`` end, ascending, in the unit of the time. Without, they are eight, by measured quantiles."""
    missing: Literal["center", "indicator", "refuse"] = "center"
    """What becomes of a number that is not there: the middle of its column, that and a column which tells so, or an error."""
    text: str = ""
    """The column that holds texts, for models of texts."""
    tokenizer: Annotated[str, AfterValidator(_is_tokenizer)] = ""
    """Turns texts into tokens, for a pretrained model: ``hf:NAME`` or ``hf:FOLDER``. That of the model is taken where none is named. Other
    models take words, which are hashed. The column of texts need not be named where it is the only one beside the target's."""
    tokenizer_digest: str = ""
    """SHA-256 of the tokenizer's vocabulary, as a finished run states it. If set, a tokenizer with another vocabulary is refused."""
    length: Count = 64
    """Words, or tokens, that are kept of a text; or bytes, for a language model that is not pretrained. Shorter ones are filled up."""
    vocabulary: Annotated[int, Field(ge=2, le=2**20)] = 4096
    """Places that words of texts are hashed into. A language model knows the 256 bytes instead."""
    test_path: str = ""
    """Like ``path``, the rows to measure on; without, a fifth of the rows, by a hash of their places (``ldpfl.data.held_out`` says which),
    or all rows of about a fifth of the persons, by a hash of their names (``ldpfl.data.held_out_by_person``)."""
    features: str = "none"
    """What a public, frozen transform makes of each sample before anything is trained: a name, or ``package.module:Class``."""
    feature_options: dict[str, bool | int | float | str] = {}
    """What the features are made with."""
    partition: Scheme | Annotated[str, AfterValidator(_is_code)] = "iid"
    """How samples are dealt out to clients: equal shares, by Dirichlet proportions of each label, by labels, or unequal shares. Or your own
    ``file.py:function`` or ``package.module:function``, which is called with the number of samples, the number of clients and the seed,
    and returns the client of each, from 0, or -1 to leave it out. It is shown no row and no label. Persons (``person``) are dealt out by
    their names, by ``iid`` or ``quantity`` alone."""
    alpha: Positive = 0.5
    """Concentration of ``dirichlet`` and ``quantity``: the smaller, the less alike clients are."""
    labels_per_client: Count = 2
    """Labels that a client holds with ``labels``."""
    private_label: Annotated[int, Field(ge=0)] | Literal["none"] = "none"
    """Label of which client 0, honest but curious, holds no sample, as in LaDP-FL; works with every ``partition``."""
    private_alpha: Positive = 0.5
    """``dirichlet`` with a private label: ``alpha`` of that label's division over the other clients."""
    validation: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Share of the test rows, at even distances, or of the test persons that say when to stop (``training.patience``) and are left out of
    the scores. Like all test rows they are not protected."""
    evaluate_on: Literal["test", "holdout"] = "test"
    """``holdout`` sets a tenth of the training images aside and measures on them: use it to choose hyper-parameters."""

    @model_validator(mode="before")
    @classmethod
    def _days_of_dates(cls, given: Any) -> Any:
        """Turn bounds that are dates into days, and say that their columns are of dates."""
        bounds = given.get("bounds") if isinstance(given, dict) else None
        if not isinstance(bounds, dict):
            return given
        pairs = {name: pair for name, pair in bounds.items() if isinstance(pair, list)}
        days = {name: [_day(value) for value in pair] for name, pair in pairs.items()}
        of_dates = [name for name, pair in pairs.items() if days[name] != pair]
        known = given.get("dates", [])
        if not of_dates or not isinstance(known, list):
            return given
        return {**given, "bounds": bounds | days, "dates": [*known, *(name for name in of_dates if name not in known)]}

    @field_validator("cut_points")
    @classmethod
    def _ascend(cls, points: list[float]) -> list[float]:
        if points != sorted(set(points)):
            raise ValueError("expected ascending values, each of them once")
        return points

    @property
    def target_names(self) -> tuple[str, ...]:
        """The columns that are to be predicted; of texts alone, their own.

        Raises:
            ConfigError: none is named.
        """
        if self.text and not self.target:
            return (self.text,)
        if not self.target:
            raise ConfigError("data.target (--target) has to name the column that is to be predicted")
        return (self.target,) if isinstance(self.target, str) else tuple(self.target)

    @property
    def brought(self) -> bool:
        """Whether they are a user's own: read from a path or the hub, made by code, or handed over."""
        return bool(self.path or self.test_path) or is_code(self.name) or "/" in self.name or self.name == GIVEN

    @property
    def at_nodes(self) -> bool:
        """Whether each client on Flower has a table of its own."""
        return self.name == NODE

    @property
    def by_label(self) -> bool:
        """Whether the label of one sample has a say in which client gets another."""
        return self.partition in BY_LABEL or self.private_label != "none"

    @property
    def isolated(self) -> Isolation | None:
        """What is kept from client 0, if anything."""
        return None if self.private_label == "none" else Isolation(self.private_label, self.private_alpha)
