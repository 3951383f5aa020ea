"""The package that ``ldpfl init --mechanism`` writes works as it is, and is what the documentation explains."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import CommandLine
from ldpfl import ConfigError, LayerRanges, audit, mechanisms, plan
from ldpfl.mechanisms import PublicState
from ldpfl.mechanisms.base import in_round
from ldpfl.mechanisms.new_package import package_files, write_package
from ldpfl.mechanisms.registry import GROUP
from ldpfl.privacy import PureRelease

NAME = "my-bits"
PAGE = Path(__file__).parents[2] / "docs" / "adding-a-mechanism.md"
RANGES = LayerRanges(torch.tensor([0.5, -1.0]), torch.tensor([0.25, 0.1]), (3, 2))


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package, installed for the rest of the test as pip would do it."""
    folder = tmp_path / NAME
    write_package(folder, NAME)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    described = folder / "my_bits-0.1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "\n".join(f"{name} = {place}" for name, place in project["entry-points"][GROUP].items())
    (described / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")
    monkeypatch.syspath_prepend(str(folder))
    mechanisms.settings_of.cache_clear()
    yield folder
    mechanisms.settings_of.cache_clear()


def test_the_page_quotes_the_package_as_it_is_written() -> None:
    page, written = PAGE.read_text(encoding="utf-8"), package_files(NAME)
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL) == [written["my_bits.py"]]
    assert 'my-bits = "my_bits:MyBitsSettings"' in page
    assert 'my-bits = "my_bits:MyBitsSettings"' in written["pyproject.toml"]


@pytest.mark.slow
@pytest.mark.thorough
def test_it_is_a_sound_mechanism_and_what_holds_of_it_is_its_author_s_claim(brought: Path) -> None:
    found = audit(NAME, epsilon=1.0, trials=2000, seed=4)
    assert found.passed, found.verdict
    mechanism = mechanisms.with_defaults(NAME, 1.0)
    release = in_round(mechanism, PublicState(1, torch.zeros(5), None, (3, 2))).release(RANGES)
    assert isinstance(release, PureRelease)
    assert release.blanket == pytest.approx(2 / (1 + 2.718281828), rel=1e-6)
    planned = plan(mechanism=NAME, epsilon=1.0, clients=100, weights=3, rounds=1)
    assert planned.statement.status == "author's claim"


def test_an_epsilon_that_no_bit_can_have_is_refused_with_the_least_one(brought: Path) -> None:
    assert np.isfinite(mechanisms.with_defaults(NAME, 1e-9).noise(RANGES).largest_std(10)).all()
    with pytest.raises(ConfigError, match=r"epsilon 1e-10 is too small .* give at least 1e-09"):
        mechanisms.with_defaults(NAME, 1e-10)


@pytest.mark.slow
@pytest.mark.thorough
def test_its_own_tests_pass(brought: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=brought, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "4 passed" in run.stdout


@pytest.mark.slow
def test_the_command_writes_it_and_an_audit_takes_the_name_for_the_mechanism(
    tmp_path: Path, ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ldpfl("init", "--mechanism", "your-bits").code == 0
    assert sorted(path.name for path in Path("your-bits").iterdir()) == ["README.md", "pyproject.toml", "test_your_bits.py", "your_bits.py"]
    assert "your-bits exists already and was not changed" in ldpfl.refused("init", "--mechanism", "your-bits")
    assert "a mechanism 'duchi' exists already" in ldpfl.refused("init", "--mechanism", "duchi")
    Path("duchi").mkdir()
    outcome = ldpfl("audit", "duchi", "--trials", "1000", "--seed", "1")
    assert outcome.code == 0
    assert "to audit the run in the folder, give ./duchi" in " ".join(outcome.err.split())
    assert "duchi" in ldpfl.refused("audit", "./duchi")


@pytest.mark.parametrize("name", ["", "My", "a_b", "-a", "a--b", "x" * 41, "../a", "class", "json"])
def test_a_name_that_cannot_be_a_mechanism_s_and_a_module_s_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_package(tmp_path / "new", name)
    assert not (tmp_path / "new").exists()
