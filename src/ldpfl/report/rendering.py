"""What pages have in common: templates, pictures in the colours of the reader's mode, and the table of what holds."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ldpfl.errors import printable
from ldpfl.privacy.guarantee import WHAT_IS_PROTECTED, Statement
from ldpfl.report.plots import ZONES, styled_figure
from ldpfl.report.privacy import CLAIM, guarantee_rows

_COLOURS = {
    "#000000": "currentColor",
    "#1f77b4": "var(--blue)",
    "#8c8c8c": "var(--soft)",
    "#b0b0b0": "var(--line)",
    "#cccccc": "var(--line)",
    "#d62728": "var(--bad)",
    "#ffffff": "var(--paper)",
    **{colour: f"var(--{name}-area)" for name, colour in ZONES.items()},
}
"""What pictures are drawn in, and what a page makes of it: the colours of its reader's light or dark mode."""


def rendered(name: str, **values: Any) -> str:
    """Return the page that the template ``name`` makes of ``values``; texts in them are no markup."""
    return _templates().get_template(name).render(**values)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    return Environment(loader=PackageLoader("ldpfl.report"), autoescape=True, finalize=_visible, keep_trailing_newline=True)


def _visible(value: object) -> object:
    """Return texts with what steers a reader spelled out: characters that are not seen, as those that turn the direction round."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(char if char in "\n\t" else printable(char) for char in value)


def held(statement: Statement, caveats: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the table of guarantees in a page shows."""
    rows = guarantee_rows(statement.to_dict())
    return {
        "protected": WHAT_IS_PROTECTED[statement.protected],
        "delta": f"{statement.delta:g}",
        "guarantees": [
            {"what": what, "trusted": trusted, "epsilon": epsilon, "status": status, "struck": status == CLAIM}
            for what, trusted, epsilon, status in rows
        ],
        "notes": [*statement.notes, *caveats],
        "warnings": statement.warnings,
    }


def inline(draw: Callable[[Any], None], size: tuple[float, float]) -> Markup:
    """Return a picture of one panel as SVG that stands in a page, in the page's colours."""
    return inline_figure(lambda figure: draw(figure.subplots()), size)


def inline_figure(draw: Callable[[Any], None], size: tuple[float, float]) -> Markup:
    """Return what is drawn on a figure as SVG that stands in a page, in the page's colours."""
    buffer = io.StringIO()
    with styled_figure(size) as figure:
        draw(figure)
        figure.patch.set_alpha(0.0)
        for axes in figure.get_axes():
            axes.patch.set_alpha(0.0)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for theirs, ours in _COLOURS.items():
        text = text.replace(theirs, ours)
    text = re.sub(r'(<svg[^>]*) height="[^"]*"', r"\1", re.sub(r'(<svg[^>]*) width="[^"]*"', r"\1", text))
    return Markup(_with_ids_of_its_own(text))


def _with_ids_of_its_own(text: str) -> str:
    """Return a picture whose ids are no other's on the page, and only those that something in it refers to."""
    own = hashlib.sha256(text.encode()).hexdigest()[:8]
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{own}-{found[1]}"' if found[1] in used else "", text)
    return re.sub(r'(url\(|href=")#', rf"\g<1>#{own}-", text)
