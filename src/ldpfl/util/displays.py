"""Results that show themselves: what a kind of result looks like is registered by who may draw, which is on a higher floor."""

from __future__ import annotations

from functools import singledispatch
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


@singledispatch
def look(result: object) -> RenderableType:
    """Return what ``result`` is shown as; ``look.register`` adds a kind. One that nobody registered is shown as its repr."""
    from rich.text import Text

    return Text(repr(result))


class Shown:
    """A result that notebooks show as a terminal does."""

    def __rich__(self) -> RenderableType:
        return look(self)

    def __str__(self) -> str:
        """Return what a terminal shows, as plain text; the repr of a kind that nobody registered."""
        if type(self).__rich__ is Shown.__rich__ and look.dispatch(type(self)) is look.dispatch(object):
            return object.__repr__(self)
        from rich.console import Console

        console = Console(markup=False, emoji=False, width=110, file=(text := StringIO()), force_jupyter=False, color_system=None)
        console.print(self)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(markup=False, emoji=False, record=True, width=110, file=StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format='<pre style="font-family:monospace">{code}</pre>')
