"""Check before a run whether a model can be trained privately on some data, and suggest fixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ldpfl.errors import LdpflError
from ldpfl.experiments.build import build, choose_device, model_of, with_torch_defaults
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import NO_CALLER_OBJECTS, CallerObjects, describe_data, load_dataset
from ldpfl.experiments.secret_seed import new_secret
from ldpfl.models.mending import Change, mended
from ldpfl.models.registry import offered
from ldpfl.util.user_code import GIVEN


@dataclass(frozen=True, eq=False)
class Checked:
    """The result of checking a model.

    Attributes:
        problem: why the model cannot be trained unchanged; empty if it can.
        changes: parts that were replaced to fix it.
        remaining_problem: why the fixed model cannot be trained either; empty if it can.
        module: the fixed module with its initial weights; the model itself if it needs no fix.
        weights: number of trainable weights.
        notes: warnings, for example of slow training, or of records that contribute nothing.
        sizes: sizes of the data, by the names of :func:`ldpfl.models.registry.offered`.
    """

    problem: str
    changes: tuple[Change, ...]
    remaining_problem: str
    module: nn.Module
    weights: int
    notes: tuple[str, ...]
    sizes: Mapping[str, Any]

    @property
    def is_fit(self) -> bool:
        """Whether the model can be trained unchanged."""
        return not self.problem


@with_torch_defaults()
def check(config: RunConfig, data_dir: Path | None, caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> Checked:
    """Check whether the model of ``config`` can be trained on its data, and if not, whether a fixed copy can.

    No real sample goes through the model.

    Raises:
        LdpflError: the data cannot be read, or the model cannot be built.
    """
    # Finding the noise for a target epsilon takes long, and does not matter here. So the target is switched off.
    config = resolve_settings(
        config.model_copy(update={"privacy": config.privacy.model_copy(update={"target_epsilon": "off"})}), caller_objects
    )
    data = describe_data(config, caller_objects)
    if config.data.brought and data.clients is None:  # a run checks that all clients have samples; here the model alone is checked
        count = min(config.clients.count, data.records)
        config = config.model_copy(update={"clients": config.clients.model_copy(update={"count": count})})
    module = model_of(config, data, caller_objects.module)
    problem, notes = _problem_and_warnings(config, data_dir, caller_objects)
    changes: tuple[Change, ...] = ()
    remaining_problem = ""
    if problem:
        module, changes = mended(module)
        # The fixed module is passed as an object, so the config no longer says how to create it.
        changed = config.model_copy(update={"model": config.model.model_copy(update={"name": GIVEN, "options": {}, "adapter": "none"})})
        remaining_problem, notes = _problem_and_warnings(changed, data_dir, CallerObjects(caller_objects.data, module))
    weights = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad and not is_lazy(parameter))
    return Checked(problem, changes, remaining_problem, module, weights, notes, offered(data.shape, data.outputs, data.vocabulary))


def _problem_and_warnings(config: RunConfig, data_dir: Path | None, caller_objects: CallerObjects) -> tuple[str, tuple[str, ...]]:
    """Return why a run of ``config`` could not start ("" if it could), and the warnings that it would give."""
    notes: list[str] = []
    try:
        data = load_dataset(config, data_dir, notes.append, caller_objects=caller_objects)
        build(config, data, choose_device("cpu"), caller_objects.module, notes.append, new_secret(config))
    except LdpflError as error:
        return str(error), tuple(notes)
    return "", tuple(notes)
