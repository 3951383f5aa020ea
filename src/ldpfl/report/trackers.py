"""Trackers of runs: MLflow, Weights & Biases and TensorBoard, each through its own client, imported when it is asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from math import isfinite
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.server import RoundMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Tracker(Protocol):
    """Client of a tracker, for one run."""

    is_local: ClassVar[bool]
    """Whether all figures stay in the run's folder. Then the tracker may also get figures that are not public."""

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Begin a run called ``name``."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures of the round ``step``."""

    def conclude(self, figures: Mapping[str, float], texts: Mapping[str, str], step: int, files: Path | None) -> None:
        """Record the final figures and texts of a run of ``step`` rounds, and keep the files in a folder."""

    def close(self, *, failed: bool) -> None:
        """End the run, if it was begun."""


class MLflow:
    """A run of MLflow. ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` say where; the default experiment is ``ldpfl``.

    The low-level client adds no tags about the user, the command and the machine, as ``mlflow.start_run`` would.
    """

    is_local: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self._entities = _import_client("mlflow.entities", "mlflow")
        self._client = _import_client("mlflow", "mlflow").MlflowClient()
        self._run = ""

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Create a run in the experiment that the environment names, and record the ``settings`` within MLflow's limits."""
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment_id(os.environ.get("MLFLOW_EXPERIMENT_NAME", "ldpfl"))
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        texts = [self._entities.Param(key, str(value)[:_MAX_PARAM_LENGTH]) for key, value in settings.items()]
        for start in range(0, len(texts), _MAX_PARAMS):
            self._client.log_batch(self._run, params=texts[start : start + _MAX_PARAMS])

    def _experiment_id(self, name: str) -> str:
        """Return the id of the experiment called ``name``, which is created if it does not exist."""
        experiment = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if experiment is None else experiment.experiment_id)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures of the round ``step``, with characters that MLflow refuses in names replaced by ``_``."""
        now_ms = int(1000 * time())
        allowed_names = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in figures.items()}
        self._client.log_batch(
            self._run, metrics=[self._entities.Metric(name, value, now_ms, step) for name, value in allowed_names.items()]
        )

    def conclude(self, figures: Mapping[str, float], texts: Mapping[str, str], step: int, files: Path | None) -> None:
        self.log(figures, step)
        for name, text in texts.items():
            self._client.set_tag(self._run, f"ldpfl.{name}", text[:_MAX_TAG_LENGTH])
        if files is not None:
            self._client.log_artifacts(self._run, str(files))

    def close(self, *, failed: bool) -> None:
        if self._run:
            self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


_MAX_PARAMS, _MAX_PARAM_LENGTH, _MAX_TAG_LENGTH = 100, 6000, 5000
"""MLflow's limits: number of parameters in a request, and characters of a parameter and of a tag."""


class WandB:
    """A run of Weights & Biases, in the project ``WANDB_PROJECT``, else ``ldpfl``; its local files are in the run's folder.

    The client may not collect data by itself: the console's text has exact scores, and the command may have a seed or a path.
    """

    is_local: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self._library, self._folder = _import_client("wandb", "wandb"), folder
        self._run: Any = None

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Begin a run, with everything switched off that the client would collect by itself."""
        switched_off = {"x_disable_machine_info": True, "x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False}
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", "ldpfl"),
            name=name,
            dir=os.environ.get("WANDB_DIR", str(self._folder.absolute())),  # its service may have another current folder
            config=dict(settings),
            reinit="create_new",
            settings=self._library.Settings(host="", console="off", disable_git=True, disable_code=True, save_code=False, **switched_off),
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def conclude(self, figures: Mapping[str, float], texts: Mapping[str, str], step: int, files: Path | None) -> None:
        """Record the final figures and texts, and keep the files. ``step`` is not needed: every tracker gets it."""
        self._run.summary.update({**figures, **texts})
        if files is not None:
            artifact = self._library.Artifact(f"ldpfl-{self._run.id}", type="model")
            artifact.add_dir(str(files))
            self._run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))


class TensorBoard:
    """Files for TensorBoard, in the run's folder."""

    is_local: ClassVar[bool] = True

    def __init__(self, folder: Path) -> None:
        _import_client("torch.utils.tensorboard", "tensorboard")  # only to raise early
        self._folder = folder / "tensorboard"
        self._writer: SummaryWriter | None = None

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Open the files. Name and settings are not written, because the run's folder has them."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def conclude(self, figures: Mapping[str, float], texts: Mapping[str, str], step: int, files: Path | None) -> None:
        if self._writer is not None:
            self._writer.add_text("privacy", "\n\n".join(texts.values()), step)

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


TRACKERS: Mapping[str, type[MLflow] | type[WandB] | type[TensorBoard]] = {"mlflow": MLflow, "wandb": WandB, "tensorboard": TensorBoard}
"""Trackers by name, which is also the name of the extra that installs the client."""


def _import_client(module: str, extra: str) -> Any:
    """Import the client of a tracker.

    Raises:
        ConfigError: the client is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"track is {extra!r}, but its client is not installed: pip install 'ldpfl[{extra}]'") from error


def round_figures(config: RunConfig, metric: str, metrics: RoundMetrics) -> dict[str, float]:
    """Return the figures of a round by name, without those that have no value. ``metric`` is the name of the score.

    Weights have a clipping range only with some mechanisms. A clipping norm is a figure of the round if it is adaptive, else a setting.
    """
    figures = {metric: metrics.score, "clients": metrics.clients, "bytes": metrics.uplink_bytes_per_client, "seconds": metrics.seconds}
    layers = {"noise std": metrics.noise_std, "clipped": metrics.clipped_fraction}
    if config.mechanism.uses_ranges:
        layers["radius"] = metrics.radius
    elif config.clipping.is_adaptive:
        figures["clipping norm"] = max(metrics.radius.values())  # the same in all layers
    figures |= {f"{kind}/{layer}": value for kind, by_layer in layers.items() for layer, value in by_layer.items()}
    return {name: float(value) for name, value in figures.items() if isfinite(value)}
