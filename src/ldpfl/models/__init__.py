"""Built-in models, and building a model by its name or import path, or from a module that a caller passes."""

from ldpfl.models.dense import CenteredLinear
from ldpfl.models.images import InputShape
from ldpfl.models.registry import CENTERED, create, names

__all__ = ["CENTERED", "CenteredLinear", "InputShape", "create", "names"]
