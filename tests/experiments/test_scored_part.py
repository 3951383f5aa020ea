"""Texts say "holdout rows" of scores that were measured on rows taken out of training, and "test rows" of other scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ldpfl import api
from ldpfl.data.holding_out import scored_part
from ldpfl.errors import ConfigError
from ldpfl.experiments.public_figures import public_caveats
from ldpfl.report.page import page
from ldpfl.report.sweep_page import sweep_page

PARTS = ("test", "holdout")
HOW: dict[str, Any] = {"target": "ill", "client": "town", "target_epsilon": 50.0, "progress": False}
SETTINGS: dict[str, Any] = {"data.classes": ["no", "yes"], "training.rounds": 2}
MEASURE_ONCE = "measure it once on test rows, without data.evaluate_on"

UNSURE = "the {part} rows hardly show how good the model is: AUROC 0."
SAME_ROWS = "Runs with other seeds are tested on the same rows, so they do not help: test on more rows (data.test_path names a file"
OTHER_ROWS = "The mean over several seeds (ldpfl sweep --seeds) is surer: each seed draws other holdout rows, unless names of persons"
IN_RUN = ("figures on {part} rows", "of 160 {part} rows.", "else by a bootstrap over {part} rows", "{part} rows are not protected: scores")
IN_PAGE = ("figures on {part} rows", "for each tenth of the {part} rows by predicted", "How many {part} rows have", ">{part} rows</th>")
IN_SWEEP = {
    "test": (
        "±: standard deviation over 2 seeds, which says nothing about the choice of test rows",
        "choosing the best row by these scores is choosing on the test rows: measure it on other rows, or choose by ldpfl tune",
        "the scores of this table were measured on test rows without noise: no epsilon covers them",
    ),
    "holdout": (
        "±: standard deviation over 2 seeds, each of which draws its holdout rows, unless names of persons or files choose them",
        f"choose the best row by these scores, or within one epsilon by ldpfl tune, and {MEASURE_ONCE}",
        "the scores of this table were measured on holdout rows without noise: no epsilon covers them",
    ),
}


def rows(count: int, rare: float = 2.2) -> pd.DataFrame:
    """Return rows of which few are ill. The larger ``rare`` is, the fewer."""
    generator = np.random.default_rng(0)
    signal = generator.normal(size=count)
    risks = 1 / (1 + np.exp(rare - 1.5 * signal))
    ill = np.where(generator.random(count) < risks, "yes", "no")
    return pd.DataFrame({"signal": signal, "ill": ill, "town": np.arange(count) // 2 % 4})


def settings_of(part: str, folder: Path) -> dict[str, Any]:
    """Return settings under which 160 rows of 1,760 are scored: those of a file, or a tenth of 1,600 training rows."""
    rows(1760).tail(160).to_csv(folder / "test.csv", index=False)
    return {**SETTINGS, "data.test_path": str(folder / "test.csv"), "data.evaluate_on": part}


def one_line(text: object) -> str:
    return " ".join(str(text).split())


@pytest.mark.parametrize("part", PARTS)
def test_texts_of_a_run_name_the_rows_that_its_scores_are_of(part: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = api.run(data=rows(1760).head(1600), settings=settings_of(part, tmp_path), baseline=False, seed=1, folder=folder, **HOW)
    html = page([folder])
    for text, sentences in ((one_line(run), IN_RUN), (html, IN_PAGE)):
        assert [sentence for sentence in sentences if sentence.format(part=part) not in text] == []
        assert part == "test" or "test row" not in text
        assert UNSURE.format(part=part) in text
        assert {"test": SAME_ROWS, "holdout": OTHER_ROWS}[part] in text
    assert f"and scores on {part} rows." in html
    assert not any("hardly show" in note for note in public_caveats(run.config, run.to_dict()["caveats"]))  # rows are not protected


@pytest.mark.parametrize("part", PARTS)
def test_texts_of_a_sweep_name_the_rows_that_its_scores_are_of(part: str, tmp_path: Path) -> None:
    axes, folder = {"training.rounds": [1, 2]}, tmp_path / "sweep"
    sweep = api.sweep(data=rows(1760).head(1600), axes=axes, seeds=2, settings=settings_of(part, tmp_path), folder=folder, **HOW)
    text, html = one_line(sweep), sweep_page(folder, sweep.config, [], "")
    assert [sentence for sentence in IN_SWEEP[part] if sentence not in text] == []
    assert [sentence for sentence in IN_SWEEP[part][1:] if sentence[1:] not in html] == []
    if part == "holdout":
        assert "test row" not in (text + html).replace(MEASURE_ONCE, "")


@pytest.mark.parametrize(
    ("part", "count", "rare", "sentence"),
    [
        (
            "test",
            50,
            0.0,
            "say something from 20 test rows on, and intervals need 10 of each class; give 100 rows in all, or a data.test_path",
        ),
        (
            "holdout",
            50,
            0.0,
            "say something from 20 holdout rows on, and intervals need 10 of each class; give 200 rows besides the test rows",
        ),
        ("test", 400, 6.0, "Give at least 10 rows of each outcome by a file of test rows (data.test_path)"),
        ("holdout", 400, 6.0, "Give some 100 rows of each outcome besides the test rows: a tenth of them are holdout rows"),
        ("test", 400, 6.0, "the test set says little about some outcomes, which are missing or rare among its 80 rows"),
        ("holdout", 400, 6.0, "the holdout set says little about some outcomes, which are missing or rare among its 32 rows"),
    ],
)
def test_warnings_say_how_many_rows_of_which_kind_are_needed(part: str, count: int, rare: float, sentence: str) -> None:
    run = api.run(data=rows(count, rare), settings={**SETTINGS, "data.evaluate_on": part}, baseline=False, seed=1, **HOW)
    caveats = run.to_dict()["caveats"]
    (note,) = [note for note in caveats if sentence in note]
    assert (note in public_caveats(run.config, caveats)) == ("too few" in note)  # numbers of rows are public, and outcomes are not


@pytest.mark.parametrize("part", PARTS)
def test_too_few_rows_for_early_stopping_are_named(part: str) -> None:
    settings = {**SETTINGS, "data.evaluate_on": part, "data.validation": 0.001, "training.patience": 1}
    with pytest.raises(ConfigError, match=rf"0 of \d+ {part} rows .* change data.validation, or add {part} rows"):
        api.run(data=rows(400), settings=settings, baseline=False, **HOW)


def test_runs_on_both_kinds_of_rows_are_named_by_test_rows() -> None:
    """Choosing among them would be choosing on test rows."""
    assert [scored_part("test", "holdout"), scored_part("clients"), scored_part()] == ["test", "test", "test"]
    assert scored_part("holdout", "holdout") == "holdout"
