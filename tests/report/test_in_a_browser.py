"""Pages as a browser shows them: on a phone and on a desk, in light and in dark, and to people who see little or nothing."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from conftest import CommandLine
from ldpfl import api
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.report.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PHONE, DESK = 390, 1280
LOOK = """
<script>%s</script>
<script>
document.documentElement.style.maxWidth = "%dpx";  // a window is never narrower than 500
// Equal pictures bring equal marks under equal names; names of different ones differ.
addEventListener("load", () => axe.run({rules: {"duplicate-id": {enabled: false}}}).then(found => {
  const told = document.createElement("pre");
  told.id = "found";
  told.textContent = JSON.stringify({
    violations: found.violations.map(rule => [rule.id, rule.nodes.map(node => node.html.slice(0, 100))]),
    passed: found.passes.map(rule => rule.id),
    wide: document.body.scrollWidth,
    pictures: [...document.querySelectorAll("svg")].map(one => [one.getBoundingClientRect().width, one.textContent.trim().length]),
    paper: getComputedStyle(document.body).backgroundColor,
  });
  document.documentElement.appendChild(told);
}));
</script></body>
"""


@pytest.fixture(scope="module")
def pages(tiny_data: Path, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    for seed in (0, 1):
        api.run(config_file, folder=folder / f"run-{seed}", data_dir=tiny_data, progress=False, seed=seed, baseline=seed == 0)
    small = ['data.name="mnist"', 'model.name="logistic-regression"', "clients.count=4", "training.epochs=1", "training.rounds=1"]
    sweep = SweepConfig(name="tiny", recipe="quickstart", settings=small, seeds=[0], axes={"mechanism.epsilon": [1.0, 4.0]})
    api.sweep(sweep, folder=folder / "sweep", data_dir=tiny_data, progress=False)
    return {"a run": page([folder / "run-0"]), "two runs": page([folder / "run-0", folder / "run-1"]), "a sweep": str(folder / "sweep")}


def seen(text: str, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """What a browser made of a page: what is hard to read or to find in it, how wide it is, and its colours."""
    if CHROMIUM is None:
        if os.environ.get("CI"):
            raise AssertionError("there is no Chromium")
        pytest.skip("there is no Chromium")
    script = files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    shown = folder / "shown.html"
    shown.write_text(text.replace("</body>", LOOK % (script, width)), encoding="utf-8")
    looks = (f"--window-size={width},900", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=30000")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        *QUIET,
        f"--user-data-dir={folder / 'browser'}",
        *looks,
        "--dump-dom",
        shown.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return dict(json.loads(html.unescape(found[1])))


def check(text: str, folder: Path) -> None:
    papers = set()
    for width, dark in ((PHONE, True), (DESK, False)):
        found = seen(text, folder, width=width, dark=dark)
        assert found["violations"] == []
        assert {"color-contrast", "landmark-one-main", "page-has-heading-one", "region"} <= set(found["passed"])
        assert found["wide"] <= width  # tables scroll by themselves
        assert [(shown, letters) for shown, letters in found["pictures"] if not (300 < shown <= width and letters > 20)] == []
        papers.add(found["paper"])
    assert len(papers) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a run", "two runs"])
@pytest.mark.thorough
def test_a_page_about_runs_is_for_everybody(name: str, pages: dict[str, str], tmp_path: Path) -> None:
    check(pages[name], tmp_path)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_page_about_a_sweep_is_for_everybody(pages: dict[str, str], tmp_path: Path, ldpfl: CommandLine) -> None:
    assert ldpfl("report", pages["a sweep"], "--out", tmp_path / "sweep.html").code == 0
    check((tmp_path / "sweep.html").read_text(encoding="utf-8"), tmp_path)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_page_about_a_plan_is_for_everybody(tmp_path: Path, ldpfl: CommandLine) -> None:
    asked = ("--regime", "records", "--target", "2", "--clients", "100", "--weights", "2000", "--rounds", "20", "--records", "600")
    (tmp_path / "plan.json").write_text(ldpfl("plan", *asked, "--json").out, encoding="utf-8")
    assert ldpfl("report", tmp_path / "plan.json", "--out", tmp_path / "plan.html").code == 0
    check((tmp_path / "plan.html").read_text(encoding="utf-8"), tmp_path)


@pytest.mark.slow
def test_what_is_hard_to_read_is_found(tmp_path: Path) -> None:
    """So that the tests above can fail."""
    text = '<!doctype html><html><body><p style="color: #bbb; background: #fff">pale</p></body></html>'
    found = {rule for rule, _ in seen(text, tmp_path, width=PHONE, dark=False)["violations"]}
    assert found >= {"color-contrast", "html-has-lang", "landmark-one-main"}
