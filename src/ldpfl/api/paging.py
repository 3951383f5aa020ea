"""Write one HTML file about runs, a sweep or a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ldpfl.api.showing import resume_sweep_command
from ldpfl.errors import ConfigError
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.sweep_run import stored_sweep
from ldpfl.report.page import page as page_of_runs
from ldpfl.report.plan_page import plan_page
from ldpfl.report.sweep_page import sweep_page
from ldpfl.util.files import check_suffix, write_text

_FOR_THE_OWNER = "a page for its owner alone, with what the guarantee does not cover"
_TO_HAND_ON = "a public page, without what the guarantee does not cover"


@dataclass(frozen=True)
class Page:
    """A self-contained HTML file.

    Attributes:
        path: path of the file.
        size: size of the file in bytes.
        kind: for whom the page is, in words.
    """

    path: Path
    size: int
    kind: str


def page(what: Sequence[Path], file: Path, *, public: bool = False) -> Page:
    """Write a page about runs, a sweep or a plan to ``file``.

    Args:
        what: folders of runs, finished or not; the folder of a sweep; or the JSON of a plan.
        public: leave out of a run's page what its guarantee does not cover.

    Raises:
        ConfigError: a path is neither a run, a sweep nor a plan; a sweep or plan is not the only path, or is to be ``public``.
        DataError: a file is damaged, or for a public page a link.
        WriteError: ``file`` cannot be written.
    """
    check_suffix(file, "a page in HTML", ".html", ".htm")
    text, kind = _page_text(what, public=public)
    write_text(file, text)
    return Page(file, len(text.encode()), kind)


def _page_text(what: Sequence[Path], *, public: bool) -> tuple[str, str]:
    """Return the HTML text of the page of the runs, the sweep or the plan in ``what``, and for whom the page is, in words.

    Raises:
        ConfigError, DataError: as for :func:`page`.
    """
    sweeps = [(path, stored) for path in what if path.is_dir() and (stored := stored_sweep(path)) is not None]
    plans = [path for path in what if path.suffix == ".json" and path.is_file()]
    if not sweeps and not plans:
        if public:
            for path in what:
                RunFolder(path).check_may_be_handed_on()
        return page_of_runs(what, public=public), _TO_HAND_ON if public else _FOR_THE_OWNER
    if public:
        raise ConfigError("--public works only for runs, not for a sweep or a plan: leave it out")
    if len(what) > 1:
        raise ConfigError("a page can show several runs, but only one sweep or one plan: give the sweep or plan alone")
    if plans:
        return plan_page(plans[0]), "the page of a plan, without a figure of any data"
    folder, (sweep, overrides) = sweeps[0]
    return sweep_page(folder, sweep, overrides, resume_sweep_command(folder)), _FOR_THE_OWNER
