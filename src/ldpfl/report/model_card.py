"""The card of a model that is handed on: a README in the form of Hugging Face's model cards, without a figure of private rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any

from ldpfl.data.encoder import Encoder
from ldpfl.errors import printable
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.model_file import ModelFile
from ldpfl.experiments.public_figures import public_caveats, scores_are_public
from ldpfl.privacy.guarantee import TRUSTED, Statement
from ldpfl.report.methods import citation
from ldpfl.report.privacy import guarantee_rows
from ldpfl.report.scores import shown
from ldpfl.util.number_format import counted, number
from ldpfl.util.user_code import GIVEN, PRETRAINED, is_code, is_pretrained, public_name

_OF_NUMBERS = ("number", "count", "survival")
"""Targets of which a model tells numbers, and no classes."""


def model_card(
    config: RunConfig,
    described: ModelFile,
    encoder: Encoder | None,
    statement: Statement,
    result: Mapping[str, Any],
    version: str,
    methods: str,
    formats: Sequence[str] = (),
) -> str:
    """Return the card of a finished run's model as Markdown.

    Args:
        result: figures of the run; scores are stated only where they were measured on public data.
        version: of ldpfl.
        methods: the paragraph about the run, see :mod:`ldpfl.report.methods`.
        formats: names of further files of the model.
    """
    sections = (
        ("", _head(config, encoder)),
        ("What it was trained on", _data(config, described, encoder, result["rounds"])),
        ("What is guaranteed", _guarantee(config, statement)),
        ("Limits", _limits(config, encoder, statement, result)),
        ("How to use it", chain(_use(described, encoder), _further(formats, encoder))),
        ("For a paper or an ethics board", (f"{_text(methods)}\n",)),
        ("How to cite", (f"{_text(citation())}\n",)),
    )
    body = "\n".join(f"{f'## {title}' if title else f'# {_text(config.name)}'}\n\n{''.join(lines)}" for title, lines in sections)
    return f"{_front_matter(config, described, encoder, statement)}\n{body}\nMade with ldpfl {version}.\n"


def _front_matter(config: RunConfig, described: ModelFile, encoder: Encoder | None, statement: Statement) -> str:
    pipeline = "" if encoder is None or encoder.data.text else f"pipeline_tag: tabular-{_kind(encoder)}\n"
    if is_pretrained(described.name):
        licence = f"license: {_text(described.licence)}\n" if described.licence else ""
        pipeline = f"base_model: {_text(described.name.removeprefix(PRETRAINED))}\n{licence}"
    own = config.data.brought or config.data.at_nodes
    data = "" if own else f"datasets:\n- {public_name(config.data.name)}\n"
    tags = "tags:\n- differential-privacy\n- federated-learning\n"
    return f"---\nlibrary_name: ldpfl\n{pipeline}{data}{tags}{''.join(_privacy(statement))}---\n"


def _privacy(statement: Statement) -> Iterator[str]:
    """Yield the best guarantee over the whole run as lines of YAML; nothing if no finite epsilon is known."""
    best = statement.best
    if best is None or not isfinite(best.epsilon):
        return
    yield "differential_privacy:\n"
    delta = repr(best.delta)
    delta = delta if "." in delta else delta.replace("e", ".0e")  # a number of YAML has a point
    yield f"  epsilon: {number(best.epsilon).replace(',', '')}\n  delta: {delta}\n"
    yield f"  protected: {best.unit}\n  trusted: {TRUSTED[best.trust_model]}\n  status: {best.status}\n"
    yield "  certificate: certificate.json\n"


def _kind(encoder: Encoder) -> str:
    return "regression" if encoder.targets in _OF_NUMBERS else "classification"


def _head(config: RunConfig, encoder: Encoder | None) -> Iterator[str]:
    told = f" It tells {_names([encoder.data.target] if isinstance(encoder.data.target, str) else encoder.data.target)}." if encoder else ""
    name = public_name(config.model.name).rpartition(":")[2]
    yield f"A model ({_text(name)}) that was trained with ldpfl under local differential privacy.{told}\n"
    if config.description:
        yield f"\n{_text(config.description)}\n"


def _data(config: RunConfig, described: ModelFile, encoder: Encoder | None, rounds: int) -> Iterator[str]:
    of = (
        "rows that stayed with their owners"
        if config.data.brought or config.data.at_nodes
        else f"the data set `{public_name(config.data.name)}`"
    )
    sizes = f"{counted(config.clients.count, 'client')}, {counted(rounds, 'round')}"
    yield f"Trained on {of}: {sizes}, mechanism `{config.mechanism.name}`.\n"
    if encoder is None:
        shape = "" if described.shape is None else f" A sample has the shape {described.shape}."
        yield f"{shape.strip()}\n" if shape else ""
        return
    data = encoder.data
    yield f"\nInputs: {_names([data.text] if data.text else data.columns)}. No value of a row is in these files.\n"
    if encoder.classes:
        whence = "named beforehand" if config.data.classes else "**taken from the rows**, which the guarantee does not cover"
        yield f"\nClasses: {_names(encoder.classes)}; they were {whence}.\n"
    if encoder.shares or encoder.knots:
        yield "\nScales of columns, and shares of classes, are public settings or were measured as a part of the run's guarantee.\n"


def _guarantee(config: RunConfig, statement: Statement) -> Iterator[str]:
    yield f"{statement.verdict or 'Nothing is protected: values left as they are.'}\n\n"
    yield f"| protected | trusted | epsilon (delta {statement.delta:g}) | status |\n|---|---|---|---|\n"
    for row in guarantee_rows(statement.to_dict()):
        yield f"| {' | '.join(map(_text, row))} |\n"
    yield "\n`guarantee.json` has these lines with what each assumes. `ldpfl verify certificate.json` computes them a second time.\n"


def _limits(config: RunConfig, encoder: Encoder | None, statement: Statement, result: Mapping[str, Any]) -> Iterator[str]:
    if scores_are_public(config):
        yield f"- {result['metric']} on the public test split: {shown(result['metric'], result['score'])}\n"
    else:
        yield "- How good the model is is not said: scores were measured on rows that are not protected. Measure it on rows of your own.\n"
    if encoder is not None:
        yield "- Names of columns, and whether each holds numbers or words, count as public.\n"
    for line in (*public_caveats(config, list(result.get("caveats", ()))), *statement.notes, *statement.warnings):
        yield f"- {_text(line)}\n"


def _use(described: ModelFile, encoder: Encoder | None) -> Iterator[str]:
    if is_pretrained(described.name):
        yield f"It was trained on the pretrained model `{_text(described.name)}`, which is not in this folder: BASE is its folder.\n"
        yield "\n```\nldpfl predict FOLDER rows.csv --model BASE\n```\n"
        return
    code = described.name == GIVEN or is_code(described.name)
    if code:
        yield f"The model is code of its owner (`{_text(described.name)}`), which is not in this folder and is never run by its name.\n\n"
    if encoder is None:
        own = ", model=MODULE" if code else ""
        if described.targets == "class" and described.mean:
            yield f"```\nldpfl predict FOLDER images{' --model file.py:Class' if code else ''}\n```\n"
            yield "\nThe rows are a folder of images, or an image, a Parquet file with images or a `.npy` file.\n\n"
        yield f'```python\nimport ldpfl\n\nmodule = ldpfl.load_model("FOLDER"{own})  # a plain PyTorch module\n```\n'
        if described.mean:
            mean, std = ([round(value, 6) for value in own] for own in (described.mean, described.std))
            yield f"\nIt takes pixels x from 0 to 255 as (x / 255 - mean) / std, by channel: mean {mean}, std {std}.\n"
        return
    yield f"```\nldpfl predict FOLDER rows.csv{' --model file.py:Class' if code else ''}\n```\n"
    yield f'\n```python\nimport ldpfl\n\nldpfl.predict("FOLDER", "rows.csv"{", model=MODULE" if code else ""})\n```\n'


def _further(formats: Sequence[str], encoder: Encoder | None) -> Iterator[str]:
    if formats:
        inputs = "inputs as the module does" if encoder is None else "rows in numbers, which `encoding.json` describes"
        yield f"\n{_names(list(formats))}: the same model for other programs. It takes {inputs}, and gives the module's outputs.\n"


def _names(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{_text(name).replace('`', '')}`" for name in names)


def _text(text: str) -> str:
    """Return ``text`` in one line, as Markdown that makes no table, link or markup of it."""
    shown_text = printable(str(text))
    return "".join(f"\\{char}" if char in "\\|<>[]*_#" else char for char in shown_text)
