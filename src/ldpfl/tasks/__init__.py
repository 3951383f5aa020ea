"""Tasks: the loss of a sample, and the metrics by which a model is judged."""

from ldpfl.tasks.task import (
    ABSENT,
    ACCURACY,
    CLASSIFICATION,
    NO_EMPHASIS,
    NO_TOKEN,
    PARALLEL,
    Emphasis,
    Metric,
    Targets,
    Task,
    absent_targets,
    create,
    names,
    unusable,
)

__all__ = [
    "ABSENT",
    "ACCURACY",
    "CLASSIFICATION",
    "NO_EMPHASIS",
    "NO_TOKEN",
    "PARALLEL",
    "Emphasis",
    "Metric",
    "Targets",
    "Task",
    "absent_targets",
    "create",
    "names",
    "unusable",
]
