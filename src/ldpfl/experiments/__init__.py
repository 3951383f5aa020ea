"""Typed configs, the papers' settings as recipes, and the runner that turns one into a run folder."""

from ldpfl.experiments.config import RunConfig, read_config
from ldpfl.experiments.recipes import load_recipe, recipe_names
from ldpfl.experiments.runner import Runner

__all__ = ["RunConfig", "Runner", "load_recipe", "read_config", "recipe_names"]
