"""The description of a trained model beside its weights, ``model.json``. It holds nothing secret and names no code that is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ldpfl.errors import ConfigError, DataError, LdpflError, first_line
from ldpfl.experiments.build import make_module
from ldpfl.experiments.config import ModelConfig
from ldpfl.experiments.dataset import Description
from ldpfl.models.adapters import Kind, check_base, has_base
from ldpfl.tasks import Targets
from ldpfl.util.files import check_regular, read_text
from ldpfl.util.user_code import GIVEN, PRETRAINED, is_code, is_pretrained, lies_in_file, public_name

MAX_BYTES = 1 << 24
"""Maximum size of a description in bytes. The file may be untrusted, and no real list of columns and classes is longer."""

_MAX_FIELDS = 1 << 18
"""Maximum number of fields in a description. Each column of a table has a few."""

_MAX_ENTRIES = 1 << 21
"""Maximum number of entries of all lists of a description together."""

_REMEDY = "restore it from a backup"

_ADAPTER_SETTINGS = ("adapter", "adapter_rank", "adapter_alpha", "adapter_modules", "adapter_tokens")
"""Settings that are needed to build a pretrained model with its adapter again."""

_Size = Annotated[int, Field(ge=1, le=1 << 24)]


class ModelFile(BaseModel):
    """The content of ``model.json``.

    Attributes:
        name, options, mend: settings of the config. A user's code is named without its folder, for information only; it is never imported.
        shape: shape of one sample; None if a sample is several tensors.
        outputs: number of outputs of the model.
        vocabulary: number of tokens, if the samples are texts.
        targets: kind of the target.
        classes: names of the outputs, if these are classes that have names, and no encoder beside the file names them.
        mean, std: mean and standard deviation of each channel of images, see :func:`ldpfl.data.samples.normalise`; empty for other samples.
        adapter, adapter_rank, adapter_alpha, adapter_modules, adapter_tokens, licence: settings of the config.
        base: SHA-256 of the frozen weights of a pretrained model, which are not saved with the model; empty if all weights are saved.
        personal: setting of the config: layers that stayed at the clients. The saved model has their initial values.
        has_encoding: whether the file ``encoding.json`` belongs to the model, which encodes rows of a table.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    options: dict[str, bool | int | float | str] = {}
    mend: bool = False
    shape: Annotated[tuple[_Size, ...], Field(fail_fast=True)] | None
    outputs: _Size
    vocabulary: _Size | None = None
    targets: Targets
    classes: Annotated[tuple[str, ...], Field(fail_fast=True)] = ()
    mean: Annotated[tuple[float, ...], Field(fail_fast=True)] = ()
    std: Annotated[tuple[float, ...], Field(fail_fast=True)] = ()
    adapter: Kind = "none"
    adapter_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    adapter_alpha: float = 16.0
    adapter_modules: Annotated[tuple[str, ...], Field(fail_fast=True)] = ()
    adapter_tokens: Annotated[int, Field(ge=1, le=4096)] = 8
    licence: str = ""
    base: str = ""
    personal: Annotated[tuple[str, ...], Field(fail_fast=True)] = ()
    has_encoding: bool = False

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        """Refuse a file whose fields contradict each other."""
        if self.classes and len(self.classes) != self.outputs:
            raise ValueError(f"{len(self.classes)} classes and {self.outputs} outputs: expected one output for each class")
        if len(self.mean) != len(self.std) or 0.0 in self.std:
            raise ValueError("expected one standard deviation, which is not 0, for each mean")
        return self

    @property
    def is_users_own(self) -> bool:
        """Whether the model is a user's code, and not a pretrained model, whose base is public."""
        return self.name == GIVEN or (is_code(self.name) and not is_pretrained(self.name))

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        data: Description,
        targets: Targets,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        classes: tuple[str, ...] = (),
        base: str = "",
        *,
        has_encoding: bool = False,
    ) -> ModelFile:
        """Return the description of a trained ``model`` for ``data``. ``base`` is the digest of its frozen weights, if it has any.

        For the other arguments, see the attributes of the class.
        """
        name = public_name(model.name) if lies_in_file(model.name) else model.name
        return cls(
            name=name,
            options=dict(model.options),
            mend=model.mend,
            shape=data.shape,
            outputs=int(data.outputs),  # numbers of a caller's own data set may be NumPy's
            vocabulary=None if data.vocabulary is None else int(data.vocabulary),
            targets=targets,
            classes=classes,
            mean=tuple(map(float, mean)),
            std=tuple(map(float, std)),
            **model.model_dump(include={*_ADAPTER_SETTINGS, "licence"}) | {"adapter_modules": tuple(model.adapter_modules)},
            base=base,
            personal=tuple(model.personal),
            has_encoding=has_encoding,
        )

    def without_local_folders(self) -> ModelFile:
        """Return a copy that names no folder of this machine."""
        return self.model_copy(update={"name": public_name(self.name)})

    @property
    def data_description(self) -> Description:
        """The data that the model is for, as far as the file describes them: shape, outputs and vocabulary."""
        return Description(self.shape, self.outputs, self.vocabulary)

    def module(self, weights: Path, caller_model: str | nn.Module | None = None) -> nn.Module:
        """Return the model with the weights of the safetensors file ``weights``.

        The description and the file may be somebody else's. So no memory is allocated for a built-in model before the shapes of both agree.

        Args:
            caller_model: the caller's module, or the import path of its class, if the model is a user's code.

        Raises:
            ConfigError: the model is code, and the caller names none.
            DataError: the file is missing, damaged, or of another model.
        """
        check_present(weights)
        model = self._model_to_make(caller_model)
        try:
            check_regular(weights)
            stored_shapes = _stored_shapes(weights)
            if isinstance(caller_model, str | None) and not is_code(model.name):  # a built-in model
                with torch.device("meta"):  # which allocates no memory
                    _check_shapes(self._make_module(model), stored_shapes)
            module = self._make_module(model, caller_model if isinstance(caller_model, nn.Module) else None)
            check_base(module, self.base)
            _check_shapes(module, stored_shapes)
            module.load_state_dict(load_file(weights), strict=not self.base)  # the file lacks the frozen weights of a base
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise DataError(f"{weights} is damaged, or of another model: {first_line(error)}") from error
        return module

    def copy_weights(self, weights: Path, to: Path) -> dict[str, Tensor]:
        """Write only the tensors of the safetensors file ``weights`` to the file ``to``, and return them. Metadata are left out.

        Raises:
            DataError: the file is missing, damaged, or of another built-in model.
        """
        check_present(weights)
        try:
            check_regular(weights)
            if self.name != GIVEN and not is_code(self.name):  # a built-in model, which can be made without the caller
                with torch.device("meta"):  # which allocates no memory
                    _check_shapes(
                        self._make_module(ModelConfig(name=self.name, options=self.options, mend=self.mend)), _stored_shapes(weights)
                    )
            tensors = load_file(weights)
            save_file(tensors, to)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise DataError(f"{weights} is damaged, or of another model: {first_line(error)}") from error
        return tensors

    def _model_to_make(self, caller_model: str | nn.Module | None) -> ModelConfig:
        """Return the settings of the model to make.

        Code, and pretrained models from the hub, are used only if the caller names them (``caller_model``), since the file may be somebody
        else's.

        Raises:
            ConfigError: the model is code, was passed from Python, or has a base that is not here, and the caller does not name it.
        """
        adapter_settings = self.model_dump(include=set(_ADAPTER_SETTINGS)) | {"adapter_modules": list(self.adapter_modules)}
        if isinstance(caller_model, nn.Module):
            return ModelConfig(name=GIVEN, mend=self.mend, **adapter_settings)
        if self.name == GIVEN and caller_model is None:
            raise ConfigError("this run's model was a module passed from Python: pass it again, as in ldpfl.predict(..., model=module)")
        if is_pretrained(self.name) and (caller_model is None or is_pretrained(caller_model)):
            name = caller_model or self.name
            if caller_model is None and not Path(name.removeprefix(PRETRAINED)).is_dir():
                raise ConfigError(
                    f"this model needs its base {self.name}, which was not found: give its folder or name with --model {self.name}"
                )
            return ModelConfig(name=name, **adapter_settings)
        if (self.name == GIVEN or is_code(self.name)) and (caller_model is None or not is_code(caller_model)):
            raise ConfigError(
                f"the model of this run is the code {self.name}, and loading it runs this code: if you trust it, give --model {self.name}"
            )
        # From here on, the caller names the code, or the model is built in and needs no name from the caller.
        name = caller_model if caller_model is not None and is_code(caller_model) else self.name
        return ModelConfig(name=name, options=self.options, mend=self.mend)

    def _make_module(self, model: ModelConfig, caller_module: nn.Module | None = None) -> nn.Module:
        """Return the initial module of ``model``. If it cannot be made, raise a :class:`ConfigError` or a ``ValueError``."""
        try:
            return make_module(model, self.data_description, self.targets, caller_module=caller_module)
        except LdpflError:
            raise
        except Exception as error:  # options that fit no model may fail in any way, and the file may be somebody else's
            raise ValueError(f"the model {model.name} cannot be built with its options, {type(error).__name__}: {error}") from error


def check_present(path: Path) -> None:
    """Raise if the file ``path`` in the folder of a finished run or an export is missing.

    Raises:
        DataError: there is no such file. If the folder is a simulation's, the message says how to write the file again.
    """
    if not path.exists():
        # A simulation's folder has no kind.txt.
        can_resume = (path.parent / "config.toml").exists() and not (path.parent / "kind.txt").exists()
        remedy = f", or let ldpfl run --resume --out {path.parent} write it again" if can_resume else ""
        raise DataError(f"{path} is missing: restore the file from a backup{remedy}")


def check_no_personal_layers(personal: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` if there are ``personal`` layers. They stayed at the clients, so the saved model cannot predict."""
    if personal:
        raise ConfigError(
            f"the layers {', '.join(personal)} are not in this model, as they stayed at the clients (model.personal): to predict, load the "
            "module with ldpfl.load_model, train these layers on your own data, and call the module"
        )


def tensors_to_save(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a trained ``module`` that a run saves, by name. Frozen weights of a pretrained model are not saved."""
    if not has_base(module):
        return dict(module.state_dict())
    return {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}


def _stored_shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the safetensors file ``weights``, by name. Only the header is read."""
    with safe_open(weights, framework="pt") as handle:
        return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118  # no dict


def _check_shapes(module: nn.Module, stored_shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise a ``ValueError`` unless a file whose tensors have the ``stored_shapes`` can be the saved weights of ``module``."""
    expected = {name: tuple(value.shape) for name, value in tensors_to_save(module).items()}
    if stored_shapes == expected:
        return
    name = min(name for name in {*stored_shapes, *expected} if stored_shapes.get(name) != expected.get(name))
    raise ValueError(f"expected {name[:80]!r} of shape {expected.get(name, 'none')}, found {stored_shapes.get(name, 'none')}")


def read_description(path: Path, kind: type[BaseModel]) -> Any:
    """Return the content of a small JSON file that describes a model, as an instance of ``kind``.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: the file is damaged, or larger than a description can be.
    """
    try:
        text = read_text(path, MAX_BYTES)
        # Pydantic keeps an error for each wrong field, and a copy of the whole input with each error for a missing field. So the numbers of
        # fields (about one for each colon) and of entries (commas) are limited before it parses the text.
        if text.count(":") > _MAX_FIELDS or text.count(",") > _MAX_ENTRIES:
            raise DataError(f"{path} is damaged: it has more than {_MAX_FIELDS:,} fields or {_MAX_ENTRIES:,} entries; {_REMEDY}")
        return kind.model_validate_json(text)
    except FileNotFoundError:
        raise
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise DataError(f"{path} is damaged: {f'{place}: ' if place else ''}{problem['msg']}; {_REMEDY}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {getattr(error, 'strerror', None) or error}; {_REMEDY}") from None
