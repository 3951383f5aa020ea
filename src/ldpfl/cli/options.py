"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ldpfl.api import DATA_DIR_VARIABLE

DataDirOption = Annotated[Path | None, typer.Option(envvar=DATA_DIR_VARIABLE, help="Folder of data sets; else the Hugging Face hub")]
