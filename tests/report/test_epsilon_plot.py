"""The plot of epsilon against the number of clients: a real picture, the same bytes each time, in the format of its name."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from ldpfl.errors import ConfigError
from ldpfl.experiments.planning.planner import Setting
from ldpfl.report.plots import draw_epsilon_by_clients, require_plot

SETTING = Setting(1.0, 100, 21_840, 10)
POINTS = [(10, 5000.0, 5100.0), (100, 1400.0, 1410.0), (1000, 200.0, 205.0)]


def drawn(path: Path, target: float | None = 4.0) -> bytes:
    draw_epsilon_by_clients(path, SETTING, POINTS, target)
    return path.read_bytes()


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Draws one of a name, or returns what was drawn by that name before."""
    folder = tmp_path_factory.mktemp("pictures")
    return cache(lambda name: drawn(folder / name))


@pytest.mark.slow
@pytest.mark.xdist_group("epsilon plot")
def test_an_svg_is_one_and_names_what_it_shows(picture: Callable[[str], bytes], tmp_path: Path) -> None:
    text = picture("plot.svg").decode()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for word in (
        "clients",
        "21,840 weights, 10 rounds",
        "claimed by the paper",
        "attained by a data set",
        "certified",
        "target 4",
        "1e-05",
    ):
        assert word in text, word
    assert "target" not in drawn(tmp_path / "plot.svg", None).decode()


@pytest.mark.slow
@pytest.mark.xdist_group("epsilon plot")
def test_a_png_is_one_and_is_not_blank(picture: Callable[[str], bytes]) -> None:
    with Image.open(io.BytesIO(picture("plot.PNG"))) as image:
        assert image.format == "PNG"
        assert min(image.size) >= 500
        colours = image.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    assert len(colours) > 20


@pytest.mark.slow
@pytest.mark.xdist_group("epsilon plot")
def test_a_pdf_is_one(picture: Callable[[str], bytes]) -> None:
    content = picture("plot.pdf")
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("epsilon plot")
def test_the_same_figures_give_the_same_bytes(suffix: str, picture: Callable[[str], bytes], tmp_path: Path) -> None:
    assert drawn(tmp_path / f"two.{suffix}") == picture(f"plot.{suffix}")
    assert [path.name for path in tmp_path.iterdir()] == [f"two.{suffix}"]


@pytest.mark.parametrize("name", ["plot.jpg", "plot", "plot.svg.gz", ".svg", "plot.toml"])
def test_another_suffix_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    for draw in (lambda path: drawn(path), require_plot):
        with pytest.raises(ConfigError, match=r"\.svg, \.png, \.pdf"):
            draw(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
