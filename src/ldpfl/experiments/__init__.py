"""Typed configs, the papers' settings as recipes, and the runner that turns one into a run folder."""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl.experiments.config import RunConfig as RunConfig, read_config as read_config
    from ldpfl.experiments.recipes import load_recipe as load_recipe
    from ldpfl.experiments.runner import Runner as Runner
    from ldpfl.experiments.shipped import recipe_names as recipe_names

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "ldpfl.experiments.config": ("RunConfig", "read_config"),
        "ldpfl.experiments.recipes": ("load_recipe",),
        "ldpfl.experiments.runner": ("Runner",),
        "ldpfl.experiments.shipped": ("recipe_names",),
    },
)
