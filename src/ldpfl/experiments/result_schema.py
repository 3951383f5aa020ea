"""What ``result.json`` must hold to be read: the folder may be somebody else's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

Figure = float | None
"""None stands for one that is not a finite number."""


Interval = Annotated[list[Figure], Field(min_length=2, max_length=2)]

Word = Annotated[str, Field(max_length=1000)]
"""What is repeated elsewhere, as on a certificate."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class _Layer(_Strict):
    weights: int
    radius: Figure
    noise_std: Figure
    clipped_fraction: Figure


class _Noise(_Strict):
    norm: Figure
    protected_fraction: float
    paper_epsilon: Figure
    paper_epsilon_per_round: list[Figure]


class _Tenth(_Strict):
    predicted: float
    observed: float
    low: float
    high: float
    rows: int


class _Risks(_Strict):
    edges: list[float]
    rows: list[int]


class _Site(_Strict):
    name: Word
    rows: int
    events: int | None = None
    scores: dict[str, Figure]
    intervals: dict[str, Interval]
    note: str


class Figures(_Strict):
    """The figures of a finished run that are read again; more may stand there."""

    name: Word
    seed: int
    seed_is_secret: bool = False
    own_data: bool = False
    metric: str
    score: Figure
    scores: dict[str, Figure]
    intervals: dict[str, Interval] = {}
    noise_free_scores: dict[str, Figure] = {}
    pooled_scores: dict[str, Figure] = {}
    test_rows: int = 0
    event: Word | None = None
    calibration: Annotated[list[_Tenth], Field(max_length=100)] = []
    risks: _Risks | None = None
    sites: list[_Site] = []
    score_per_round: list[Figure]
    noise_free_score: Figure
    noise_free_score_per_round: list[Figure] | None = None
    clamped_score: Figure = None
    evaluated_on: str
    mechanism: str
    epsilon_per_unit: float | Literal["infinity"] | None
    unit: str
    target: Figure = None
    caveats: list[str] = []
    privacy: dict[str, JsonValue]
    clients: int
    records: int | None = None
    clients_per_round: int
    stopped_after: int | None = None
    rounds: int
    weights: int
    uplink_bits_per_client_round: int
    uplink_bytes_per_client_round: int
    layers: dict[str, _Layer]
    clipped_records_per_round: list[Figure] | None = None
    noise: _Noise | None = None
    seconds: float
    device: str
    versions: dict[Word, Word]

    @model_validator(mode="after")
    def _has_a_figure_a_round(self) -> Self:
        figures = (self.score_per_round, self.noise_free_score_per_round)
        if any(own is not None and len(own) != self.rounds for own in figures) or self.rounds > _MOST_ROUNDS:
            raise ValueError(f"there is a score for each of {self.rounds:.6g} rounds, and of no more than {_MOST_ROUNDS:,}")
        return self


_MOST_ROUNDS = 100_000


def problem_of(figures: Any) -> str:
    """Say what in ``figures``, as they stood in a file, is not as a finished run's are; nothing where all are."""
    try:
        Figures.model_validate(figures)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            return "it is nested too deeply"
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    return ""
