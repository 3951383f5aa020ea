"""Tasks: the loss of a sample, and the metrics by which a model is judged."""

from ldpfl.tasks.task import (
    ABSENT,
    ACCURACY,
    CLASSIFICATION,
    EVEN,
    NO_TOKEN,
    PARALLEL,
    Emphasis,
    Metric,
    Targets,
    Task,
    create,
    names,
    unusable,
    without_answer,
)

__all__ = [
    "ABSENT",
    "ACCURACY",
    "CLASSIFICATION",
    "EVEN",
    "NO_TOKEN",
    "PARALLEL",
    "Emphasis",
    "Metric",
    "Targets",
    "Task",
    "create",
    "names",
    "unusable",
    "without_answer",
]
