"""The schema of ``result.json``. A result is checked against it before it is used, since its folder may be untrusted."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from ldpfl.tasks import ACCURACY
from ldpfl.tasks.weighted_metrics import COMMONEST
from ldpfl.util.name_limits import FEW, require_few
from ldpfl.util.quantities import MAX_COUNT, MAX_ROUNDS

Whole = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A number of rows, rounds, weights and so on."""

Figure = float | None
"""A number, or None for one that is not finite."""

PerRound = Annotated[list[Figure], Field(fail_fast=True)]
"""A figure for each round. Validation stops at the first wrong entry, since each error takes about a thousand bytes."""

Interval = Annotated[list[Figure], Field(min_length=2, max_length=2)]

Word = Annotated[str, Field(max_length=1000)]
"""Short text that is repeated elsewhere, such as on a certificate."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    _has_few_fields = model_validator(mode="before")(require_few)


class _Layer(_Strict):
    weights: Whole
    radius: Figure
    noise_std: Figure
    clipped_fraction: Figure


class _Noise(_Strict):
    norm: Figure
    protected_fraction: float
    paper_epsilon: Figure
    paper_epsilon_per_round: PerRound


class _Tenth(_Strict):
    predicted: float
    observed: float
    low: float
    high: float
    rows: Whole


class _Risks(_Strict):
    edges: Annotated[list[float], Field(fail_fast=True)]
    rows: Annotated[list[Whole], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _check_edges(self) -> Self:
        """Refuse a histogram that does not have one edge more than bars."""
        if len(self.edges) != len(self.rows) + 1:
            raise ValueError(f"expected {len(self.rows) + 1:,} edges for {len(self.rows):,} counts of rows, got {len(self.edges):,}")
        return self


class _Site(_Strict):
    name: Word
    rows: Whole
    events: Whole | None = None
    scores: Annotated[dict[str, Figure], FEW]
    intervals: Annotated[dict[str, Interval], FEW]
    note: str


class _AtClients(_Strict):
    value: Figure
    noise: Figure
    sampling: Figure
    low: Figure
    high: Figure


class _Measured(_Strict):
    round: Whole
    records: Whole
    unit: Literal["record", "client"] = "record"
    stated: bool = False
    counted: Annotated[list[float], Field(max_length=3)] = []
    target_spread: float | None = None
    binning: float | None = None
    rare_class: bool = False
    figures: Annotated[dict[str, _AtClients], FEW]
    confusion: Annotated[list[list[float]], Field(fail_fast=True)] = []
    confusion_noise: Figure = None
    calibration: Annotated[list[_Tenth], Field(max_length=100)] = []


class Figures(_Strict):
    """The figures of a finished run that ldpfl reads again. The file may hold more."""

    name: Word
    seed: int
    seed_is_secret: bool = False
    own_data: bool = False
    metric: str
    lower_is_better: bool = False
    score: Figure
    scores: Annotated[dict[str, Figure], FEW]
    intervals: Annotated[dict[str, Interval], FEW] = {}
    intervals_note: str = ""
    horizon: Figure = None
    noise_free_scores: Annotated[dict[str, Figure], FEW] = {}
    pooled_scores: Annotated[dict[str, Figure], FEW] = {}
    test_rows: Whole = 0
    event: Word | None = None
    classes: Annotated[list[Word], Field(fail_fast=True)] = []
    calibration: Annotated[list[_Tenth], Field(max_length=100)] = []
    risks: _Risks | None = None
    at_clients: Annotated[list[_Measured], Field(fail_fast=True)] = []
    sites: Annotated[list[_Site], Field(fail_fast=True)] = []
    score_per_round: PerRound
    noise_free_score: Figure
    noise_free_score_per_round: PerRound | None = None
    clamped_score: Figure = None
    evaluated_on: str
    mechanism: str
    epsilon_per_unit: float | Literal["infinity"] | None
    unit: str
    target: Figure = None
    caveats: Annotated[list[str], Field(fail_fast=True)] = []
    privacy: dict[str, JsonValue]
    clients: Whole
    records: Whole | None = None
    clients_per_round: Whole
    clients_in_rounds: Annotated[list[Whole], Field(min_length=2, max_length=2)]
    stopped_after: Whole | None = None
    rounds: Whole
    weights: Whole
    chosen: Annotated[dict[Word, float], FEW] = {}
    uplink_bits_per_client_round: Whole
    uplink_bytes_per_client_round: Whole
    layers: Annotated[dict[str, _Layer], FEW]
    clipped_records_per_round: PerRound | None = None
    noise: _Noise | None = None
    seconds: float
    device: str
    versions: Annotated[dict[Word, Word], FEW]

    @model_validator(mode="after")
    def _check_needed_together(self) -> Self:
        """Refuse a result that lacks a figure with which another one is shown."""
        if COMMONEST in self.scores and ACCURACY not in self.scores:
            raise ValueError(f"scores has {COMMONEST!r}, but {ACCURACY!r} is missing")
        if self.event is not None and "test_rows" not in self.model_fields_set:
            raise ValueError("event is set, but test_rows is missing")
        return self

    @model_validator(mode="after")
    def _check_rounds(self) -> Self:
        """Refuse a list of scores that does not have one score for each round, and more rounds than a run can have."""
        score_lists = (self.score_per_round, self.noise_free_score_per_round)
        if any(scores is not None and len(scores) != self.rounds for scores in score_lists) or self.rounds > MAX_ROUNDS:
            raise ValueError(f"expected a score for each of {self.rounds:.6g} rounds, and no more than {MAX_ROUNDS:,} rounds")
        return self


def problem_in_result(figures: Any) -> str:
    """Return what is wrong with the ``figures`` of a result file, or "" if they are valid."""
    try:
        Figures.model_validate(figures)
    except (ValidationError, RecursionError) as error:  # the file may be untrusted
        if isinstance(error, RecursionError):
            return "it is nested too deeply"
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    return ""
