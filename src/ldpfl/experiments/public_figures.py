"""Which figures of a run may be handed on: those that follow from what clients released, or from public data.

The guarantee of a run covers the model and all that was sent. It does not cover scores that are measured on private rows, the noise-free
baseline, the pooled reference, how much was clamped or clipped, how long training took, a fingerprint of the rows, or the round after
which training stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import nan
from typing import Any

from ldpfl.data.leaks import COLLISIONS, COPIES, EMPTY, GAPS, LEAK, REPEATED_PERSONS
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import SECRET_SEED_NOTE, SIMULATION
from ldpfl.experiments.figures import CHANCE, COMMON_EVENT, EXTREME, NARROW, NO_SCORES, OFF, OFF_MEAN, ONE_CLASS, STOPPED, UNSURE, UNUSABLE
from ldpfl.experiments.start_warnings import FEW_OUTCOMES, SCALE, SIMILAR, SINGLE_CLASS
from ldpfl.server import RoundMetrics
from ldpfl.tasks.weighted_metrics import MEASURED_AT_CLIENTS
from ldpfl.util.user_code import public_name

_ON_FIGURES = (CHANCE, COMMON_EVENT, EXTREME, NARROW, NO_SCORES, OFF, OFF_MEAN, UNSURE)
_ON_TABLES = (COLLISIONS, COPIES, EMPTY, FEW_OUTCOMES, GAPS, LEAK, ONE_CLASS, REPEATED_PERSONS, SCALE, SIMILAR, SINGLE_CLASS, UNUSABLE)
_ON_TEST_ROWS = (*_ON_FIGURES, *_ON_TABLES)
_ON_PRIVATE_ROWS = (*_ON_TEST_ROWS, *(start.replace("test", "holdout") for start in _ON_TEST_ROWS))
"""Starts of notes that reveal something about rows that are not protected, be they test rows or holdout rows."""


def scores_are_public(config: RunConfig) -> bool:
    """Return whether scores are measured on the public test split of a built-in data set."""
    data = config.data
    return not (data.brought or data.at_nodes) and data.evaluate_on == "test"


def public_caveats(config: RunConfig, caveats: list[str]) -> list[str]:
    """Return the ``caveats`` that may be published, without those about private rows.

    The round after which such rows stopped the run is left out, too: a caveat only says that such rows decided. The file with the secret of
    the noise stays with the run's owner, so the note on that file is shortened to the note on simulations.
    """
    caveats = [SIMULATION if caveat == SECRET_SEED_NOTE else caveat for caveat in caveats]
    if not scores_are_public(config):
        caveats = [caveat for caveat in caveats if not caveat.startswith(_ON_PRIVATE_ROWS)]
    if not config.data.brought or config.training.patience == 0:
        return caveats
    others = [caveat for caveat in caveats if not caveat.startswith(STOPPED)]
    return [*others, "which round's model was kept was decided by the loss on rows that are not protected: the guarantee does not cover it"]


def without_private_figures(config: RunConfig, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``result``, the content of a run's ``result.json``, with None or an empty value for figures that may not be published.

    Scores on private rows are removed. Scores that clients measured under noise stay. ``stopped_after``, ``seconds_per_round`` and
    ``data_fingerprint`` stay as well, although they are private. Callers that publish the result of a user's own data must leave these
    three out.
    """
    # Baselines without noise, clipping and times follow from all training rows.
    layers = {name: {**layer, "clipped_fraction": None} for name, layer in result["layers"].items()}
    replacements: dict[str, Any] = {"noise_free_score": None, "noise_free_score_per_round": None, "clamped_score": None, "layers": layers}
    replacements |= {"noise_free_scores": {}, "pooled_scores": {}, "clipped_records_per_round": None}
    replacements |= {"caveats": public_caveats(config, list(result.get("caveats", ()))), "seconds": None}
    if not scores_are_public(config):
        # Only what clients measured under noise is protected. All other figures are exact ones of private test rows.
        protected = {name: score for name, score in result["scores"].items() if name.endswith(MEASURED_AT_CLIENTS)}
        protected_intervals = {name: ends for name, ends in result.get("intervals", {}).items() if name in protected}
        replacements |= {"score": None, "scores": protected, "score_per_round": [None] * len(result["score_per_round"])}
        replacements |= {"intervals": protected_intervals, "test_rows": 0, "event": None, "calibration": [], "risks": None, "sites": []}
        replacements |= {"intervals_note": "", "horizon": None}
    return {**result, **replacements}


def public_round(config: RunConfig, metrics: RoundMetrics) -> RoundMetrics | None:
    """Return the metrics of a round, with NaN, None or an empty value for each figure that may not be published.

    The result is None if private rows decide when training stops. The metrics of later rounds would show that nobody trained in them.
    """
    if config.data.brought and config.training.patience:
        return None
    score = metrics.score if scores_are_public(config) else nan
    return replace(metrics, score=score, seconds=nan, clipped_fraction={}, clipped_records=None, validation=None, noise={})


def public_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings by dotted key, without a seed that determines the noise, and without folders of this machine."""
    private_keys = {"data.path", "data.test_path", *(["seed"] if config.hides_seed else [])}
    return {key: _without_folder(value) for key, value in config.by_key().items() if key not in private_keys}


def _without_folder(value: Any) -> Any:
    """Return a setting without the folders of the files, code and pretrained models that it names."""
    if isinstance(value, list | tuple):
        return type(value)(map(_without_folder, value))
    if isinstance(value, dict):
        return {key: _without_folder(part) for key, part in value.items()}
    return public_name(value) if isinstance(value, str) else value
