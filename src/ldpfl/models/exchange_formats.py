"""Write a trained module in a form that runs without its Python code: ONNX, or a program of ``torch.export``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ldpfl.errors import ConfigError, first_line

INPUTS, OUTPUTS = "inputs", "outputs"
"""Names of a model's only input and output in ONNX."""


def file_bytes(module: nn.Module, example: Tensor, suffix: str) -> tuple[bytes, list[str]]:
    """Return a file of ``module`` in the format of ``suffix``, ``.onnx`` or ``.pt2``, and the names of frozen and constant tensors in it.

    The file takes any number of rows.

    Args:
        example: inputs (N, ...) as the module takes them. Their values do not matter.

    Raises:
        ConfigError: a library is missing, or the module cannot be written in this format.
    """
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    two_rows = example.expand(2, *example.shape[1:])  # PyTorch would take one row for a fixed number of rows
    try:
        program = torch.export.export(module.eval(), (two_rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names files of this machine
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"model{suffix}"
            _WRITERS[suffix](program, path)
            return path.read_bytes(), [*frozen, *program.constants]
    except ImportError as error:
        raise ConfigError("writing ONNX needs the packages onnx and onnxscript: pip install 'ldpfl[onnx]'") from error
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"the model cannot be written as {suffix}: {type(error).__name__}: {first_line(error)}") from error


def _write_onnx(program: Any, path: Path) -> None:
    """Write ``program``, which ``torch.export`` made, to ``path`` as ONNX."""
    # Imported so that a missing package raises an ImportError here, which the caller turns into advice.
    import onnx  # noqa: F401
    import onnxscript  # noqa: F401

    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that torchvision, which nothing here needs, is not installed
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)", FutureWarning)  # PyTorch warns of its own code
            names: dict[str, Any] = {"input_names": [INPUTS], "output_names": [OUTPUTS]}
            onnx_program = torch.onnx.export(program, dynamo=True, external_data=False, verbose=False, **names)
    finally:
        log.setLevel(level)
    if onnx_program is None:
        raise ValueError("PyTorch's ONNX exporter returned no program: name the file .pt2, or use another version of PyTorch")
    onnx_program.save(path)


_WRITERS: Mapping[str, Callable[[Any, Path], None]] = {".onnx": _write_onnx, ".pt2": torch.export.save}
