"""What a run and a sweep came to, as Python gets it: typed, frozen, and shown by notebooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn

from ldpfl.api.predicting import predict_samples
from ldpfl.data.encoder import Encoder
from ldpfl.data.new_rows import predict_rows
from ldpfl.data.new_samples import Rows
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.figures import as_released, unit_epsilon_entries
from ldpfl.experiments.model_file import ModelFile, check_no_personal_layers
from ldpfl.experiments.reproduction import ReproducedRow, Reproduction, SizeName
from ldpfl.experiments.runner import Finished
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.experiments.sweep_rows import Curve, JointGuarantee, Row, frontier, notes_on_runs
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import account
from ldpfl.privacy.guarantee import Statement
from ldpfl.report.noise_plot import draw_noise
from ldpfl.report.plots import Picture, draw_score_curve, draw_sweep
from ldpfl.report.privacy import guarantees as guarantees  # registers how a guarantee is shown
from ldpfl.report.reproduction import draw_reproduction, reproduction_table, tidy
from ldpfl.report.site_means import SiteMeans, site_means
from ldpfl.report.terminal_tables import noise_table, quality_tables, result_table, sweep_table
from ldpfl.server import RoundMetrics
from ldpfl.tasks import ACCURACY
from ldpfl.util.displays import Shown
from ldpfl.util.number_format import counted

if TYPE_CHECKING:
    import pandas

    from ldpfl.api.estimators import Classifier, MultiLabelClassifier, Regressor


@dataclass(frozen=True, eq=False, repr=False)
class RunResult(Shown):
    """A finished run.

    Attributes:
        config: config of the run, defaults included.
        history: figures of each round.
        ledger: releases of each round.
        baseline: score of the same training without noise, after each round; None if no baseline was trained.
        folder: folder with the run's files; None if nothing was written.
        encoder: encoder that turns rows of a table into inputs of :meth:`module`; None if the data are no table.
    """

    config: RunConfig
    history: tuple[RoundMetrics, ...]
    ledger: Ledger
    baseline: tuple[float, ...] | None
    folder: Path | None
    _trained: nn.Module = field(repr=False)
    _figures: Mapping[str, Any] = field(repr=False)
    encoder: Encoder | None = field(default=None, repr=False)
    _described: ModelFile | None = field(default=None, repr=False)

    @classmethod
    def of(cls, finished: Finished, folder: Path | None) -> RunResult:
        """Return the result of a run whose files, if it has any, are in ``folder``."""
        last, noise_free_scores = finished.last, finished.figures["noise_free_score_per_round"]
        baseline = None if noise_free_scores is None else tuple(noise_free_scores)
        # The result keeps only the module. The task holds all clients' samples, and a result may be pickled.
        trained = finished.federation.task.module_with(last.state.model)
        encoder = finished.federation.encoder
        # For predictions of images and arrays. Those of a table are made with the encoder.
        described = finished.model_file if finished.federation.task.task.targets == "class" and encoder is None else None
        return cls(finished.config, last.history, last.ledger, baseline, folder, trained, finished.figures, encoder, described)

    def __repr__(self) -> str:
        """Return one line, without the config: its seed may determine the noise on a user's own data."""
        return f"<RunResult {self.config.name!r}: {self.metric} {self.score:.4g} after {counted(len(self.history), 'round')}>"

    @cached_property
    def privacy(self) -> Statement:
        """Privacy guarantee of the run, for the client that took part most often."""
        return account(self.ledger, self.config.privacy.delta)

    @property
    def metric(self) -> str:
        """Name of the figure by which models are judged: AUROC for two classes or several labels, accuracy for more classes, R2 for
        numbers, perplexity for texts, or a figure that the task defines."""
        return str(self._figures["metric"])

    @property
    def score(self) -> float:
        """The :attr:`metric` of the final model."""
        return self.history[-1].score

    @property
    def scores(self) -> dict[str, float | None]:
        """All figures of the final model on the test rows, by name. A figure without a value is None."""
        return dict(self._figures["scores"])

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % interval, over the test rows, of each figure of :attr:`scores` that has one: lower and upper end."""
        return {name: (ends[0], ends[1]) for name, ends in self._figures.get("intervals", {}).items()}

    def scores_to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one row for each figure: its value, 95 % interval, and values without noise and for pooled data."""
        import pandas

        figures = self._figures
        ends = pandas.DataFrame(self.intervals, index=["low", "high"]).T
        columns = {"model": self.scores, "without noise": figures["noise_free_scores"], "pooled": figures["pooled_scores"]}
        table = pandas.DataFrame({name: pandas.Series(scores, dtype=float) for name, scores in columns.items()})
        return table.join(ends).reindex(list(self.scores))[["model", "low", "high", "without noise", "pooled"]].rename_axis("figure")

    def sites_to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one row for each client of the test rows, the worst first. Empty if the test rows have no clients.

        A row has the client's number of rows, and its figures or the reason why it has none.
        """
        import pandas

        rows = []
        for site in self._sites:
            other_figures = {key: value for key, value in site.items() if key not in ("scores", "intervals")}
            rows.append({**other_figures, **site["scores"]})
        return pandas.DataFrame(rows)

    def site_means_to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one row for each figure: its mean and deviation over clients, and its mean over the worst tenth of them.

        The table is empty for fewer than ten clients.
        """
        import pandas

        return pandas.DataFrame.from_dict(site_means(self._sites), orient="index", columns=list(SiteMeans._fields)).rename_axis("figure")

    @property
    def _sites(self) -> list[dict[str, Any]]:
        """The figures of each client of the test rows."""
        return list(self._figures.get("sites", ()))

    @property
    def accuracy(self) -> float:
        """Share of the evaluation samples that the final model classifies correctly; NaN for a model that is no classifier."""
        accuracy = self.score if self.metric == ACCURACY else self.scores.get(ACCURACY)
        return nan if accuracy is None else accuracy

    @property
    def bytes_per_client(self) -> int:
        """Bytes that one client sends in one round, at most."""
        return max(metrics.uplink_bytes_per_client for metrics in self.history)

    def module(self) -> nn.Module:
        """Return a copy of the trained model, a plain PyTorch module on the CPU."""
        return copy.deepcopy(self._trained)

    def predict(self, rows: pandas.DataFrame | Rows, *, threshold: float | None = None, id_column: str | None = None) -> pandas.DataFrame:
        """Return the model's prediction for each of ``rows``: rows of a table, texts, images or an array; see :func:`ldpfl.predict`.

        Raises:
            ConfigError: the model is neither a classifier of samples nor of a table; some layers stayed at the clients; or ``threshold``
                or ``id_column`` does not fit.
            DataError: a column is missing, or a value or an image does not fit.
        """
        check_no_personal_layers(self.config.model.personal)
        if self.encoder is None:
            if id_column is not None:
                raise ConfigError("id_column works only with models of tables, and this run's model is not one: leave it out")
            return predict_samples(self._described, self.module, rows, threshold, "this run")
        if not isinstance(rows, str | Path) and not hasattr(rows, "columns"):
            raise ConfigError(
                f"rows has the type {type(rows).__name__}, but the model was trained on a table: give a data frame, a file or a folder"
            )
        return predict_rows(self.encoder, self.module(), rows, threshold, id_column)

    def to_sklearn(self, *, threshold: float | None = None) -> Classifier | MultiLabelClassifier | Regressor:
        """Return the trained model as a fitted estimator of scikit-learn. It takes the table's original columns and can be pickled.

        Do not cross-validate it: ``fit`` trains nothing and ``clone`` returns the same estimator, so each fold would be tested on rows that
        the model was trained on. ``threshold`` is as for :meth:`predict`.

        Raises:
            ConfigError: the model was not trained on a table; some of its layers stayed at the clients, so it cannot predict by itself;
                scikit-learn has no estimator for its target; or ``threshold`` does not fit.
        """
        from ldpfl.api.estimators import estimator

        check_no_personal_layers(self.config.model.personal)
        return estimator(self.encoder, self.module(), threshold)

    def plot(self) -> Picture:
        """Return the score against rounds as a picture, which a notebook shows and :meth:`Picture.save` writes."""
        figures = {**self._figures, **unit_epsilon_entries(self.ledger, self.config.privacy.delta)}
        return _picture(lambda path: draw_score_curve(path, figures))

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one row for each round: score, clients, bytes and seconds, and each layer's radius, noise and clipping."""
        import pandas

        rows = [{**metrics.reproducible(), "seconds": metrics.seconds} for metrics in self.history]
        return pandas.json_normalize(rows).set_index("round")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``result.json`` in a run's folder, with privacy figures computed from the ledger."""
        return as_released(copy.deepcopy(dict(self._figures)), self.ledger, self.privacy)

    def __rich__(self) -> Group:
        caveats = (Text(f"note: {caveat}", style="yellow") for caveat in self._figures["caveats"])
        figures = self.to_dict()
        return Group(result_table(figures), *quality_tables(figures), self.privacy, *caveats)


@dataclass(frozen=True, eq=False)
class SweepResult(Shown):
    """A finished sweep.

    Attributes:
        config: config of the sweep.
        rows: figures of each variant at each point of the axes, over all seeds.
        curves: figures of each row after each round.
        folder: folder with the sweep's files; None if nothing was kept.
        together: joint guarantee of all runs on a user's own data; None for built-in data.
    """

    config: SweepConfig
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    folder: Path | None
    together: JointGuarantee | None = None

    @property
    def frontier(self) -> tuple[Row, ...]:
        """Rows on the Pareto frontier of score, bytes and privacy budget."""
        return tuple(frontier(self.rows))

    @property
    def failed(self) -> tuple[str, ...]:
        """Error of each run that failed, after the run's name. Resume the sweep to try these runs again."""
        return tuple(reason for row in self.rows for reason in row.failed)

    def plot(self) -> Picture:
        """Return the score against the first axis and against bytes, as a picture."""
        return _picture(lambda path: draw_sweep(path, self.config, self.rows))

    def plot_noise(self) -> Picture | None:
        """Return a picture of noise, score and budget (as the papers count it) by round; None if no mechanism has a noise schedule."""
        if not any(curve.norm for curve in self.curves):
            return None
        return _picture(lambda path: draw_noise(path, self.config, self.curves))

    def to_dataframe(self, *, by_seed: bool = False) -> pandas.DataFrame:
        """Return a table with one row for each variant at each point of the axes, with its figures over all seeds.

        With ``by_seed`` it has one row for each finished run: its variant, its point and all its figures. Runs are numbered from 1.
        """
        import pandas

        if not by_seed:
            return pandas.json_normalize([{**row.to_dict(), "caveats": row.notes, "budget": row.budget} for row in self.rows])
        return pandas.DataFrame([run for row in self.rows for run in _finished_runs(row)])

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep's name, its ``rows`` as in the folder's ``rows.json``, and the joint guarantee of all runs, ``together``."""
        together = None if self.together is None else self.together.to_dict()
        return {"name": self.config.name, "rows": [row.to_dict() for row in self.rows], "together": together}

    def __rich__(self) -> RenderableType:
        noise = [noise_table(self.config, self.rows)] if any(row.noise for row in self.rows) else []
        sentences = () if self.together is None else self.together.sentences
        notes = (Text(f"note: {note}", style="yellow") for note in notes_on_runs(self.rows))
        return Group(sweep_table(self.config, self.rows), *noise, *map(Text, sentences), *notes)


def _finished_runs(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the figures of each finished run of a sweep's row: ``row.score`` and each list in ``row.scores`` have one value a run."""
    for index, score in enumerate(row.score):
        figures = {name: values[index] for name, values in row.scores.items()}
        yield {"variant": row.variant, **dict(row.point), "run": index + 1, row.metric: score, **figures, "budget": row.budget}


@dataclass(frozen=True)
class ReproductionResult(Shown):
    """A table or figure of a paper, as far as its runs are finished.

    Attributes:
        name, size: name of the table or figure, and the size at which it was made.
        reproduction: its description, with the paper's figures.
        sweep: the sweep that was run.
        rows: one for each setting, also for settings that were not run.
        folder: folder of its files; None if there are none.
    """

    name: str
    size: SizeName
    reproduction: Reproduction
    sweep: SweepConfig
    rows: tuple[ReproducedRow, ...]
    folder: Path | None

    @property
    def is_finished(self) -> bool:
        """Whether all runs are finished: each row has as many seeds as are wanted."""
        return all(row.seeds == row.wanted for row in self.rows)

    def plot(self) -> Picture:
        """Return a picture of our figures and the paper's."""
        return _picture(lambda path: draw_reproduction(path, self.reproduction, self.sweep, self.rows))

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a dict for each setting: our figure, the paper's figure, the epsilon that the paper claims, and the proved one."""
        return tidy(self.reproduction, self.sweep, self.rows)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the content of :meth:`to_dict` as a table."""
        import pandas

        return pandas.DataFrame(self.to_dict())

    def __rich__(self) -> RenderableType:
        return reproduction_table(self.reproduction, self.sweep, self.rows)


def _picture(draw: Callable[[Path], object]) -> Picture:
    """Return the picture that ``draw`` writes to a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        draw(path)
        return Picture(path.read_text(encoding="utf-8"))
