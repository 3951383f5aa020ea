"""Check the data of a node on the node itself. The findings depend on the data, so they are for the terminal of the node's operator."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unicodedata import normalize

from ldpfl.data.folders import visible_files
from ldpfl.data.nodes import node_table_path, read_node_table, values_beyond_bounds
from ldpfl.data.tables import SUFFIXES, read_table
from ldpfl.data.user_images import IMAGE_SUFFIXES
from ldpfl.deploy.node_set_up import Finding, NodeSetUp, Standing, wrong_finding
from ldpfl.errors import DataError, LdpflError, printable
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import target_kind_of
from ldpfl.flower.policy_init import Offer, check_table_fits
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.tasks import absent_targets
from ldpfl.util.number_format import counted
from ldpfl.util.suggestions import nearest

_OTHERS_MAY_ACCESS = stat.S_IRWXG | stat.S_IRWXO
_MAX_NAMED = 5
"""Maximum number of names in a finding."""
_WRONG_FACTOR = 5
"""From this multiple of the stated mean on, a node's own number of records (or persons) counts as wrong."""
_UNUSUAL_FACTOR = 3
"""A node's own number gets a finding if it is this many times the stated mean, or if the mean is this many times the number.

Nodes may differ so much, so the finding is no error."""


def check_data(node: NodeSetUp, offer: Offer | None) -> Iterator[Finding]:
    """Check that the node's own data and its folder of data sets exist and fit the app, and yield the findings."""
    if node.data_dir:
        problem = _problem_of_folder(node.data_dir)
        if problem:
            yield Finding("data", Standing.WRONG, f"{node.data_dir} {problem}: set LDPFL_DATA_DIR to the folder of data sets")
        else:
            yield Finding("data", Standing.FINE, f"{node.data_dir} is there")
    trains_on_table = offer is not None and offer.config.data.at_nodes
    if not node.data:
        if trains_on_table:
            yield Finding("data", Standing.WRONG, "the app trains on this node's own table, but none is set: set LDPFL_DATA to its file")
        return
    try:
        path = node_table_path(node.data, node.partition)
        if offer is not None and trains_on_table:
            yield from _check_table(offer, path)
        else:  # an app with its own code reads its data in its own way
            yield from _check_files(path, () if offer is None else offer.config.data.classes)
        if os.name == "posix" and path.stat().st_mode & _OTHERS_MAY_ACCESS:
            yield Finding("data", Standing.LOOK, f"{path} can be read by other users of this machine: run chmod go= {path}")
    except LdpflError as error:
        yield wrong_finding("data", error)
    except OSError as error:
        yield Finding("data", Standing.WRONG, f"{node.data} cannot be read: {error.strerror}")


def _check_table(offer: Offer, table: Path) -> Iterator[Finding]:
    """Check how many rows of a table fit the rules by which the app reads it, and how many values are outside the bounds."""
    rows, unusable, misfit = check_table_fits(offer.config, table)  # misfit: the first problem, as text
    standing = Standing.LOOK if misfit else Standing.FINE
    if unusable == rows:
        standing = Standing.WRONG
    first_misfit = f". The first that does not fit: {misfit}" if misfit else ""
    text = f"{table} has {counted(rows, 'row')}, {rows - unusable:,} of which can be trained on{first_misfit}"
    yield Finding("data", standing, printable(text))
    yield from _check_record_count(offer.config, rows - unusable, table)
    for name, count in values_beyond_bounds(offer.config.data, table).items():
        text = f"the column {name!r} has {count:,} of {counted(rows, 'value')} outside its data.bounds"
        yield Finding(
            "data", Standing.LOOK, printable(f"{text}, which count as the nearer bound: check that column and bounds have the same unit")
        )


def _check_record_count(config: RunConfig, records: int, table: Path) -> Iterator[Finding]:
    """Check whether the node's number of records, or of persons, is far from ``mechanism.records``, the app's mean for a client."""
    stated = config.mechanism.records if isinstance(config.mechanism, DpSgdSettings) else 0
    if not stated or not records:
        return
    count, unit = (_count_persons(config, table), "person") if config.data.person else (records, "record")
    text = f"this node has {counted(count, unit)}, but the app's mechanism.records states {stated:,} for a client on average"
    if count >= _WRONG_FACTOR * stated:
        why = "if other nodes have as many, training diverges; ask the app's operator to set it to the mean"
        yield Finding("data", Standing.WRONG, f"{text}: {why}")
    elif count >= _UNUSUAL_FACTOR * stated or _UNUSUAL_FACTOR * count <= stated:
        why = "unless this node is unusually large or small, steps have the wrong length; ask the app's operator whether it is the mean"
        yield Finding("data", Standing.LOOK, f"{text}: {why}. The node's own number is private: only this terminal shows it")


def _count_persons(config: RunConfig, table: Path) -> int:
    """Return the number of persons in the node's own ``table`` with a row that can be trained on."""
    dataset = read_node_table(config.data, target_kind_of(config), table)
    usable = ~absent_targets(dataset.train.targets).numpy()
    return 0 if dataset.persons is None else len(set(dataset.persons[usable]))


def _check_files(path: Path, classes: Sequence[str]) -> Iterator[Finding]:
    """Check the data at ``path`` for an app that reads them by its own code, as far as this is possible without running the app."""
    _check_readable(path)
    files = visible_files(path) if path.is_dir() else [path]
    if not files:
        raise DataError(f"there is no file in the folder {path}: expected the node's data")
    empty = [file for file in files if not file.stat().st_size]
    if len(empty) == len(files):
        raise DataError(f"{path} is empty, expected the node's data" if path.is_file() else f"all files in the folder {path} are empty")
    if empty:
        are = "is" if len(empty) == 1 else "are"
        text = f"{len(empty):,} of the {len(files):,} files in {path} {are} empty"
        yield Finding("data", Standing.LOOK, printable(text))
    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in files):
        yield from _check_images(path, files, classes)
    elif any(file.suffix.lower() in SUFFIXES for file in files):
        yield _describe_table(path)
    else:
        yield Finding("data", Standing.FINE, printable(f"{path} is there. Only --try shows whether the app can read it"))


def _describe_table(path: Path) -> Finding:
    """Return the finding on a file that looks like a table: its size, or why ldpfl cannot read it."""
    try:
        table = read_table(path, names_shown=False)
    except LdpflError as error:
        text = f"is not a table with a header that ldpfl can read ({error}). Only --try shows whether the app can read it"
        return Finding("data", Standing.LOOK, printable(f"{path} {text}"))
    text = (
        f"{path} has {counted(len(table), 'row')} and {counted(len(table.columns), 'column')}. Only --app with --try shows whether it fits"
    )
    return Finding("data", Standing.FINE, text)


def _check_images(folder: Path, files: Sequence[Path], classes: Sequence[str]) -> Iterator[Finding]:
    """Check whether images lie in one folder for each class, as apps expect, and whether these are the app's ``classes``.

    Folders that the app does not name are only counted, never named: an operator may have one folder for each patient.
    """
    images = [file.relative_to(folder) for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    images_in = Counter(normalize("NFC", image.parts[0]) for image in images if len(image.parts) > 1)
    class_folders = [name for name in classes if name in images_in]
    content = counted(len(images), "image")
    if images_in:
        content += f" in {counted(len(images_in), 'folder')}"
    if class_folders:
        content += f", among them {_first_names(class_folders)}"
    yield Finding("data", Standing.FINE, printable(f"{folder} has {content}"))
    if loose := len(images) - images_in.total():
        lie = "lies" if loose == 1 else "lie"
        text = f"{loose:,} of the images {lie} in {folder} itself, and so in no class: move each into the folder of its class"
        yield Finding("data", Standing.LOOK, printable(text))
    folders = [normalize("NFC", entry.name) for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."]
    empty_folders = [name for name in folders if name not in images_in]
    if empty_folders:
        empty_classes = sorted(set(empty_folders).intersection(classes))
        among_them = f", among them {_first_names(empty_classes)}" if empty_classes else ""
        text = f"{folder} has {counted(len(empty_folders), 'folder')} without images{among_them}: add images, or delete what stays empty"
        yield Finding("data", Standing.LOOK, printable(text))
    if classes and (unknown := len(images_in.keys() - set(classes))):
        missing_classes = [name for name in classes if name not in images_in]
        text = f"{folder} has {counted(unknown, 'folder')} whose name is not one of the app's classes"
        missing_text = f", and no folder is called {_first_names(missing_classes)}" if missing_classes else ""
        yield Finding(
            "data",
            Standing.WRONG,
            printable(f"{text}: data.classes has {_first_names(classes)}{missing_text}. Rename or remove such folders"),
        )


def _check_readable(path: Path) -> None:
    """Raise a :class:`DataError` unless ``path`` is a file or a folder that this user can read."""
    if not path.exists():
        neighbours = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        suggestion = nearest(path.name, neighbours)
        hint = f" (did you mean {suggestion!r}?)" if suggestion else ""
        raise DataError(f"there is no file or folder {path}{hint}: set LDPFL_DATA to the node's data")
    if path.is_dir() and (problem := _problem_of_folder(path)):
        raise DataError(f"the folder {path} {problem}: set LDPFL_DATA to the node's data")
    if not os.access(path, os.R_OK):
        raise DataError(
            f"{path} cannot be read by this user: run the check as the user of the SuperNode, or change the file's owner or mode"
        )


def _problem_of_folder(folder: Path) -> str:
    """Return why ``folder`` cannot be read as a folder of data; an empty text if it can."""
    if not folder.is_dir():
        return "is not a folder"
    if not os.access(folder, os.R_OK | os.X_OK):
        return "cannot be read by this user"
    return "" if any(folder.iterdir()) else "is empty"


def _first_names(names: Iterable[str]) -> str:
    """Return the first few names, separated by commas."""
    all_names = list(names)
    return f"{', '.join(all_names[:_MAX_NAMED])}{' and others' if len(all_names) > _MAX_NAMED else ''}"
