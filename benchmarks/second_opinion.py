"""Each recipe by the second implementation of the accountants, and how long it takes: python benchmarks/second_opinion.py [RECIPE...]."""

from __future__ import annotations

import argparse
import time
from math import isfinite

from rich.console import Console
from rich.table import Table

from ldpfl import ConfigError, api
from ldpfl.api.certified_lines import certified
from ldpfl.experiments.shipped import recipe_names
from ldpfl.privacy.guarantee import TRUSTED
from ldpfl.util.number_format import number
from ldpfl_verify import Certificate, verify

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("recipes", nargs="*", default=sorted(recipe_names()), metavar="RECIPE")
table = Table(title="a run's whole cost, stated and by a second opinion")
for heading in ("recipe", "trusted", "stated", "second opinion", "", "s, both"):
    table.add_column(heading, justify="right" if heading[:1] == "s" else "left")
for name in parser.parse_args().recipes:
    try:
        ledger, delta = api.released(name)
        began = time.perf_counter()
        certificate = Certificate(statement=certified(ledger.to_json(), name, delta, {}))
        stated, began = time.perf_counter() - began, time.perf_counter()
        opinion = verify(certificate)
    except ConfigError as error:
        table.add_row(name, "", "", "", str(error)[:60], "")
        continue
    seconds = f"{stated:.1f}, {time.perf_counter() - began:.1f}"
    for verdict in opinion.lines:
        second = "-" if verdict.second is None else number(verdict.second if isfinite(verdict.second) else "infinity")
        trusted = TRUSTED[verdict.line.trusted] + (", pure" if verdict.line.delta == 0 else "")
        table.add_row(name, trusted, number(verdict.line.epsilon), second, verdict.status, seconds)
        name = seconds = ""  # once a recipe
Console(width=140).print(table)
