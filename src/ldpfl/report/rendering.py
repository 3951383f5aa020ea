"""What pages have in common: templates, pictures in the colours of the reader's mode, and the table of guarantees."""

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

_PAGE_COLOURS = {
    "#000000": "currentColor",
    "#1f77b4": "var(--blue)",
    "#8c8c8c": "var(--soft)",
    "#b0b0b0": "var(--line)",
    "#cccccc": "var(--line)",
    "#d62728": "var(--bad)",
    "#ffffff": "var(--paper)",
    **{colour: f"var(--{name}-area)" for name, colour in ZONES.items()},
}
"""For each colour that Matplotlib draws, the page's colour, which depends on the reader's light or dark mode."""


def rendered(name: str, **values: Any) -> str:
    """Return the page that the template ``name`` makes of ``values``. Texts in them are escaped."""
    return _templates().get_template(name).render(**values)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    """Return the templates of pages, which escape all texts."""
    return Environment(loader=PackageLoader("ldpfl.report"), autoescape=True, finalize=_spell_out_controls, keep_trailing_newline=True)


def _spell_out_controls(value: object) -> object:
    """Return a text with invisible characters spelled out, such as those that reverse the direction of writing."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(char if char in "\n\t" else printable(char) for char in value)


def guarantee_values(statement: Statement, caveats: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values for the table of guarantees in a page's template."""
    rows = guarantee_rows(statement.to_dict())
    return {
        "protected": WHAT_IS_PROTECTED[statement.protected],
        "delta": f"{statement.delta:g}",
        "guarantees": [
            {"what": protected, "trusted": trusted, "epsilon": epsilon, "status": status, "struck": status == CLAIM}
            for protected, trusted, epsilon, status in rows
        ],
        "notes": [*statement.notes, *caveats],
        "warnings": statement.warnings,
    }


def inline(draw: Callable[[Any], None], size: tuple[float, float]) -> Markup:
    """Draw one panel, and return it as SVG for a page, in the page's colours."""
    return inline_figure(lambda figure: draw(figure.subplots()), size)


def inline_figure(draw: Callable[[Any], None], size: tuple[float, float]) -> Markup:
    """Draw on a figure, and return it as SVG for a page, in the page's colours."""
    buffer = io.StringIO()
    with styled_figure(size) as figure:
        draw(figure)
        figure.patch.set_alpha(0.0)  # the page's background shows through
        for axes in figure.get_axes():
            axes.patch.set_alpha(0.0)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # without the head of an SVG file, which has no place within a page
    for drawn, replacement in _PAGE_COLOURS.items():
        text = text.replace(drawn, replacement)
    # Without its own width and height, the picture takes the width that the page gives it.
    text = re.sub(r'(<svg[^>]*) height="[^"]*"', r"\1", re.sub(r'(<svg[^>]*) width="[^"]*"', r"\1", text))
    return Markup(_with_unique_ids(text))


def _with_unique_ids(text: str) -> str:
    """Return an SVG whose ids are unique on the page, by a prefix made of its content. Ids to which nothing in it refers are removed."""
    prefix = hashlib.sha256(text.encode()).hexdigest()[:8]
    referred = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in referred else "", text)
    return re.sub(r'(url\(|href=")#', rf"\g<1>#{prefix}-", text)
