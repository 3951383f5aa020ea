"""Results that display themselves in terminals and notebooks. Packages that may draw register how each type of result looks."""

from __future__ import annotations

from functools import singledispatch
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


@singledispatch
def look(result: object) -> RenderableType:
    """Return what ``rich`` displays for ``result``: its repr, unless ``look.register`` was called for its type."""
    from rich.text import Text

    return Text(repr(result))


class Shown:
    """Base of results that notebooks show in the same form as a terminal."""

    def __rich__(self) -> RenderableType:
        return look(self)

    def __str__(self) -> str:
        """Return a terminal's display as plain text, or the repr if neither the type itself nor ``look.register`` gives a display."""
        if type(self).__rich__ is Shown.__rich__ and look.dispatch(type(self)) is look.dispatch(object):
            return object.__repr__(self)
        from rich.console import Console

        text = StringIO()
        # In a notebook, ``rich`` would by default display the result there instead of writing it to ``file``.
        console = Console(markup=False, emoji=False, width=110, file=text, force_jupyter=False, color_system=None)
        console.print(self)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(markup=False, emoji=False, record=True, width=110, file=StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format='<pre style="font-family:monospace">{code}</pre>')
