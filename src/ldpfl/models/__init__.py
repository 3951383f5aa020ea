"""Built-in models, and how one is built by its name or import path, or taken as a caller hands it over."""

from ldpfl.models.dense import CenteredLinear
from ldpfl.models.images import InputShape
from ldpfl.models.registry import CENTERED, create, names

__all__ = ["CENTERED", "CenteredLinear", "InputShape", "create", "names"]
