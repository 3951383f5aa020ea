"""Terminal output of attacks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ldpfl.attacks.compare import ComparedRuns, Comparison
from ldpfl.attacks.on_run import AttackRow, RunAttack
from ldpfl.util.number_format import counted

_KINDS = {
    "unprotected": "reconstructed from the unprotected model",
    "floor": "floor: other real images of the label",
    "other classes": "other classes: the client's own images, nothing learned",
}
_HOW_TO_READ = "a larger distance is a worse reconstruction; compare it with the distances of floor and other classes"


def attack_table(result: RunAttack) -> Table:
    """Return the table of an attack on a run: distances to real images of the class, and how many are recognised."""
    title = f"{result.name}: reconstruction of label {result.label}, {counted(len(result.plan.seeds), 'seed')}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("against real test images of the label")
    for heading in ("images", "Fréchet distance", "recognised*"):
        table.add_column(heading, justify="right")
    for row in result.rows:
        recognised = f"{sum(row.shares) / len(row.shares):.1%}"
        table.add_row(Text(_row_name(row, result)), _image_counts(row), _mean_and_deviation(row), recognised)
    table.caption = Text("\n".join(_notes(result.rows, result.extractor, result.features, result.classifier_accuracy)))
    table.caption_justify = "left"
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Return the table of attacks on several runs: a line for each protection, over runs and attack seeds."""
    seeds = counted(len(comparison.plan.seeds), "seed")
    title = f"reconstruction of label {comparison.label}: {comparison.runs} runs, {seeds} of the attack on each"
    table = Table(title=Text(title), title_justify="left")
    table.add_column(f"against {comparison.images:,} real test images")
    for heading in ("attacks", "Fréchet distance", "recognised*", "accuracy"):
        table.add_column(heading, justify="right")
    for line in comparison.lines:
        row = line.row
        attacks, accuracy = ("-", "-") if row.accuracy is None else (f"{len(row.distances)}", f"{row.accuracy:.1%}")  # None: a reference
        table.add_row(Text(_line_name(line)), attacks, _mean_and_deviation(row), f"{sum(row.shares) / len(row.shares):.1%}", accuracy)
    notes = _notes([line.row for line in comparison.lines], comparison.extractor, comparison.features, comparison.classifier_accuracy)
    if comparison.left_out:
        note = f"other classes: without {len(comparison.left_out)} runs whose client holds fewer than {comparison.images:,} such images"
        notes.append(note)
    table.caption = Text("\n".join(notes))
    table.caption_justify = "left"
    return table


def _line_name(line: ComparedRuns) -> str:
    """Return what the images of a line were reconstructed from: the protection's own name, or that of a reference."""
    return line.name if line.row.kind == "protected" else _KINDS[line.row.kind]


def _row_name(row: AttackRow, result: RunAttack) -> str:
    """Return what the images of a row were reconstructed from, such as "the run's model (duchi, epsilon 2 a weight)"."""
    if row.kind == "protected":
        return f"reconstructed from the run's model ({result.mechanism}, epsilon {result.epsilon:g} a {result.budget})"
    return _KINDS[row.kind]


def _image_counts(row: AttackRow) -> str:
    """Return the number of reconstructed images, and that of real ones if it differs. All attacks of a row have the same numbers."""
    distance = row.distances[0]
    return f"{distance.other:,}" if distance.other == distance.real else f"{distance.other:,} to {distance.real:,}"


def _mean_and_deviation(row: AttackRow) -> str:
    """Return the mean distance, and its deviation over several attacks."""
    return f"{row.mean:.4g}" + (f" ± {row.deviation:.2g}" if len(row.distances) > 1 else "")


def _notes(rows: Sequence[AttackRow], extractor: str, features: int, classifier_accuracy: float) -> list[str]:
    """Return the lines below a table: how to read it, the extractor, and what limits the comparison."""
    min_images = min(distance.other for row in rows for distance in row.distances)
    notes = [
        _HOW_TO_READ,
        f"extractor: {extractor}; distances of another extractor do not compare",
        f"* by the classifier of the public train split, which is right on {classifier_accuracy:.1%} of the test images",
        "distances of few images are too large on average: compare only equal numbers of images",
    ]
    if min_images <= features:
        notes.append(f"{min_images} images are too few for {features} features: only the order of distances counts; give more --images")
    return notes
