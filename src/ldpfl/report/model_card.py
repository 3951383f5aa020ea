"""The card of a model that is handed on: a README in the form of Hugging Face's model cards, without a figure of private rows."""

from __future__ import annotations

import re
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
from ldpfl.report.scores import format_score
from ldpfl.util.number_format import counted, number
from ldpfl.util.user_code import PRETRAINED, is_pretrained, public_name

_NUMBER_TARGETS = ("number", "count", "survival")
"""Kinds of targets for which a model predicts numbers instead of classes."""


def model_card(
    config: RunConfig,
    described: ModelFile,
    encoder: Encoder | None,
    statement: Statement,
    result: Mapping[str, Any],
    version: str,
    methods: str,
    formats: Sequence[str] = (),
    as_given: Sequence[str] = (),
) -> str:
    """Return the card of a finished run's model as Markdown.

    Args:
        result: figures of the run; scores are stated only where they were measured on public data.
        described: description of the model's file.
        encoder: how a table's rows become numbers; None for other data.
        version: version of ldpfl.
        methods: the paragraph about the run, see :mod:`ldpfl.report.methods`.
        formats: names of further files of the model.
        as_given: names of tensors of a user's own model that training has left as they were.
    """
    sections = (
        ("", _head_lines(config, encoder)),
        ("What it was trained on", _data_lines(config, described, encoder, result["rounds"])),
        ("What is guaranteed", _guarantee_lines(config, statement)),
        ("Limits", _limit_lines(config, encoder, statement, result, as_given)),
        ("How to use it", chain(_usage_lines(described, encoder), _file_lines(described, formats, encoder))),
        ("For a paper or an ethics board", (f"{_escape_markdown(methods)}\n",)),
        ("How to cite", (f"{_escape_markdown(citation())}\n",)),
    )
    texts = []
    for title, lines in sections:
        heading = f"## {title}" if title else f"# {_escape_markdown(config.name)}"
        texts.append(f"{heading}\n\n{''.join(lines)}")
    body = "\n".join(texts)
    return f"{_front_matter(config, described, encoder, statement)}\n{body}\nMade with ldpfl {version}.\n"


def _front_matter(config: RunConfig, described: ModelFile, encoder: Encoder | None, statement: Statement) -> str:
    """Return the metadata at the head of the card, in YAML, by which the hub classifies the model."""
    model_lines = "" if encoder is None or encoder.data.text else f"pipeline_tag: tabular-{_task_name(encoder)}\n"
    if is_pretrained(described.name):
        licence = f"license: {_escape_markdown(described.licence)}\n" if described.licence else ""
        model_lines = f"base_model: {_escape_markdown(described.name.removeprefix(PRETRAINED))}\n{licence}"
    is_own_data = config.data.brought or config.data.at_nodes
    data = "" if is_own_data else f"datasets:\n- {public_name(config.data.name)}\n"
    tags = "tags:\n- differential-privacy\n- federated-learning\n"
    return f"---\nlibrary_name: ldpfl\n{model_lines}{data}{tags}{''.join(_privacy_lines(statement))}---\n"


def _privacy_lines(statement: Statement) -> Iterator[str]:
    """Yield the best guarantee over the whole run as lines of YAML; nothing if no finite epsilon is known."""
    best = statement.best
    if best is None or not isfinite(best.epsilon):
        return
    yield "differential_privacy:\n"
    delta = repr(best.delta)
    delta = delta if "." in delta else delta.replace("e", ".0e")  # YAML recognises a number with an exponent only if it has a point
    yield f"  epsilon: {number(best.epsilon).replace(',', '')}\n  delta: {delta}\n"
    yield f"  protected: {best.unit}\n  trusted: {TRUSTED[best.trust_model]}\n  status: {best.status}\n"
    yield "  certificate: certificate.json\n"


def _task_name(encoder: Encoder) -> str:
    """Return whether a model predicts numbers or classes, in the words of Hugging Face's tags."""
    return "regression" if encoder.targets in _NUMBER_TARGETS else "classification"


def _head_lines(config: RunConfig, encoder: Encoder | None) -> Iterator[str]:
    """Yield sentences on what the model is and predicts, and the run's description."""
    prediction = ""
    if encoder is not None:
        target = encoder.data.target
        prediction = f" It tells {_code_list([target] if isinstance(target, str) else target)}."
    name = public_name(config.model.name).rpartition(":")[2]
    yield f"A model ({_escape_markdown(name)}) that was trained with ldpfl under local differential privacy.{prediction}\n"
    if config.description:
        yield f"\n{_escape_markdown(config.description)}\n"


def _data_lines(config: RunConfig, described: ModelFile, encoder: Encoder | None, rounds: int) -> Iterator[str]:
    """Yield sentences on the training: data, sizes, mechanism, inputs and classes."""
    if config.data.at_nodes:
        trained_on = "rows that stayed with their owners"
    else:
        rows = "rows that one machine held" if config.data.brought else f"the data set `{public_name(config.data.name)}`"
        trained_on = f"{rows}, in a simulation"
    sizes = f"{counted(config.clients.count, 'client')}, {counted(rounds, 'round')}"
    yield f"Trained on {trained_on}: {sizes}, mechanism `{config.mechanism.name}`.\n"
    if encoder is None:
        if described.shape is not None:
            yield f"A sample has the shape {described.shape}.\n"
        return
    data = encoder.data
    yield f"\nInputs: {_code_list([data.text] if data.text else data.columns)}. No value of a row is in these files.\n"
    if encoder.classes:
        source = "named beforehand" if config.data.classes else "**taken from the rows**, which the guarantee does not cover"
        yield f"\nClasses: {_code_list(encoder.classes)}; they were {source}.\n"
    if encoder.shares or encoder.knots:
        yield "\nScales of columns, and shares of classes, are public settings or were measured as a part of the run's guarantee.\n"


def _guarantee_lines(config: RunConfig, statement: Statement) -> Iterator[str]:
    """Yield the verdict and the table of guarantees."""
    yield f"{statement.verdict or 'Nothing is protected: values left as they are.'}\n\n"
    yield f"| protected | trusted | epsilon (delta {statement.delta:g}) | status |\n|---|---|---|---|\n"
    for row in guarantee_rows(statement.to_dict()):
        yield f"| {' | '.join(map(_escape_markdown, row))} |\n"
    yield "\n`guarantee.json` has these lines with what each assumes. `ldpfl verify certificate.json` computes them a second time.\n"


def _limit_lines(
    config: RunConfig, encoder: Encoder | None, statement: Statement, result: Mapping[str, Any], as_given: Sequence[str]
) -> Iterator[str]:
    """Yield the score if it is public, and what the guarantee does not cover."""
    if scores_are_public(config):
        yield f"- {result['metric']} on the public test split: {format_score(result['metric'], result['score'])}\n"
    else:
        yield "- How good the model is is not said: scores were measured on rows that are not protected. Measure it on rows of your own.\n"
    if as_given:
        names = _code_list(as_given)
        yield f"- The guarantee does not cover these tensors, which training has left as the model's owner gave them: {names}.\n"
    if encoder is not None:
        yield "- Names of columns, and whether each holds numbers or words, count as public.\n"
    caveats = filter(None, map(_without_advice, public_caveats(config, list(result.get("caveats", ())))))
    for line in (*caveats, *statement.notes, *statement.warnings):
        yield f"- {_escape_markdown(line)}\n"


def _without_advice(caveat: str) -> str:
    """Return ``caveat`` without advice on settings and commands, which is for the run's owner. A sentence ends where advice begins."""
    kept = []
    for sentence in re.split(r"(?<=\.) (?=[A-Z])", caveat):
        clauses = re.split(r"(; |: |, so )", sentence)  # clauses at even places, with separators between them
        advice = [place for place in range(0, len(clauses), 2) if _ADVICE.search(clauses[place])]
        end = advice[0] - 1 if advice else len(clauses)  # the separator before the advice goes with it
        if end > 0:  # else the sentence begins with advice, and nothing of it is kept
            kept.append("".join(clauses[:end]).removesuffix("."))
    return ". ".join(kept)


_ADVICE = re.compile(
    r" --[a-z]|\(--[a-z]|\bby ldpfl [a-z]|"
    r"\b(?:[Ss]et|[Ll]ist|[Nn]ame)\b.* (?:data|task|model|clients|training|mechanism|privacy|evaluation)\.[a-z_]+"
)
"""Clause of a caveat that says which setting or command its owner may use."""


def _usage_lines(described: ModelFile, encoder: Encoder | None) -> Iterator[str]:
    """Yield the commands and the code by which the model predicts new rows."""
    model_name = _escape_markdown(described.name)
    if is_pretrained(described.name):
        yield f"It was trained on the pretrained model `{model_name}`, which is not in this folder: BASE is its folder.\n"
        yield "\n```\nldpfl predict FOLDER rows.csv --model BASE\n```\n"
        return
    model_is_code = described.is_users_own
    if model_is_code:
        yield f"The model is code of its owner (`{model_name}`), which is not in this folder and is never run by its name.\n\n"
    if encoder is None:
        model_argument = ", model=MODULE" if model_is_code else ""
        if described.targets == "class" and described.mean:
            yield f"```\nldpfl predict FOLDER images{' --model file.py:Class' if model_is_code else ''}\n```\n"
            yield "\nThe rows are a folder of images, or an image, a Parquet file with images or a `.npy` file.\n\n"
        yield f'```python\nimport ldpfl\n\nmodule = ldpfl.load_model("FOLDER"{model_argument})  # a plain PyTorch module\n```\n'
        if described.mean:
            mean, std = ([round(value, 6) for value in values] for values in (described.mean, described.std))
            yield f"\nIt takes pixels x from 0 to 255 as (x / 255 - mean) / std, by channel: mean {mean}, std {std}.\n"
        return
    yield f"```\nldpfl predict FOLDER rows.csv{' --model file.py:Class' if model_is_code else ''}\n```\n"
    yield f'\n```python\nimport ldpfl\n\nldpfl.predict("FOLDER", "rows.csv"{", model=MODULE" if model_is_code else ""})\n```\n'


def _file_lines(described: ModelFile, formats: Sequence[str], encoder: Encoder | None) -> Iterator[str]:
    """Yield sentences on the model's files, and on those in further formats."""
    encoding = "" if encoder is None else ", and `encoding.json` how rows become its inputs"
    yield f"\n`model.safetensors` holds the weights, `model.json` describes the network they belong to{encoding}.\n"
    if formats:
        inputs = "inputs as the module does" if encoder is None else "rows in numbers, which `encoding.json` describes"
        yield f"\n{_code_list(formats)}: the same model for other programs. It takes {inputs}, and gives the module's outputs.\n"
        if described.is_users_own:
            yield "It holds the numbers in its owner's code, too, which the guarantee does not cover.\n"


def _code_list(names: Sequence[str]) -> str:
    """Return ``names`` as code in Markdown, separated by commas."""
    return ", ".join(f"`{_escape_markdown(name).replace('`', '')}`" for name in names)


def _escape_markdown(text: str) -> str:
    """Return ``text`` in one line, with the characters escaped that Markdown would take for a table, a link or markup."""
    one_line = printable(str(text))
    return "".join(f"\\{char}" if char in "\\|<>[]*_#" else char for char in one_line)
