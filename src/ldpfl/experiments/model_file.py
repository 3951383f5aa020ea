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
from ldpfl.experiments.build import made_of
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
"""Maximum number of entries of all its lists together."""

_ADAPTER_SETTINGS = ("adapter", "adapter_rank", "adapter_alpha", "adapter_modules", "adapter_tokens")
"""Settings that are needed to build a pretrained model with its adapter again."""

_SINGLE = tuple(name for name in _ADAPTER_SETTINGS if name != "adapter_modules")

_Size = Annotated[int, Field(ge=1, le=1 << 24)]


class ModelFile(BaseModel):
    """The content of ``model.json``.

    Attributes:
        name, options, mend: settings of the config. A user's code is named without its folder, for information only; it is never imported.
        shape: shape of one sample; None if a sample is several tensors.
        outputs: number of outputs of the model.
        vocabulary: number of tokens, if the samples are texts.
        targets: kind of the target.
        classes: names of the outputs, if the samples are images and their classes have names.
        mean, std: of each channel of images, see :func:`ldpfl.data.samples.normalise`; empty for other samples.
        adapter, adapter_rank, adapter_alpha, adapter_modules, adapter_tokens, licence: settings of the config.
        base: SHA-256 of the frozen weights of a pretrained model, which are not saved with the model; empty if all weights are saved.
        personal: setting of the config: layers that stayed at the clients. The saved model has their initial values.
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

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        if self.classes and len(self.classes) != self.outputs:
            raise ValueError(f"{len(self.classes)} classes and {self.outputs} outputs: expected one output for each class")
        if len(self.mean) != len(self.std) or 0.0 in self.std:
            raise ValueError("expected one standard deviation, which is not 0, for each mean")
        return self

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
    ) -> ModelFile:
        """Return what is said of the trained ``model`` on such ``data``; ``base`` is the digest of its frozen weights."""
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
        )

    def handed_on(self) -> ModelFile:
        """Return a copy that names no folder of this machine."""
        return self.model_copy(update={"name": public_name(self.name)})

    @property
    def described(self) -> Description:
        """What the model takes and gives."""
        return Description(self.shape, self.outputs, self.vocabulary)

    def module(self, weights: Path, own: str | nn.Module | None = None) -> nn.Module:
        """Return the model with the weights of a safetensors file.

        Nothing is allocated before the shapes in the file are those of the model: either may be somebody else's.

        Args:
            own: the caller's module, or its name, where the model is code.

        Raises:
            ConfigError: the model is code, and the caller names none.
            DataError: the file is damaged, or of another model.
        """
        model = self._named(own)
        try:
            check_regular(weights)
            shapes = _shapes(weights)
            if isinstance(own, str | None) and not is_code(model.name):
                with torch.device("meta"):
                    _check_shapes(self._made(model), shapes)
            module = self._made(model, own if isinstance(own, nn.Module) else None)
            check_base(module, self.base)
            _check_shapes(module, shapes)
            module.load_state_dict(load_file(weights), strict=not self.base)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise DataError(f"{weights} is damaged, or of another model: {first_line(error)}") from error
        return module

    def copy_weights(self, weights: Path, to: Path) -> None:
        """Write the tensors of a safetensors file to another one: nothing else that may be in that file, or that a link names.

        Raises:
            DataError: the file is damaged, a link, or of another built-in model.
        """
        try:
            check_regular(weights)
            if weights.is_symlink():
                raise ValueError("it is a link")
            if self.name != GIVEN and not is_code(self.name):
                with torch.device("meta"):
                    _check_shapes(self._made(ModelConfig(name=self.name, options=self.options, mend=self.mend)), _shapes(weights))
            save_file(load_file(weights), to)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise DataError(f"{weights} is damaged, or of another model: {first_line(error)}") from error

    def _named(self, own: str | nn.Module | None) -> ModelConfig:
        """Return which model is made; code is what the caller names, whatever the file says."""
        adapter = {"adapter_modules": list(self.adapter_modules), **{key: getattr(self, key) for key in _SINGLE}}
        if isinstance(own, nn.Module):
            return ModelConfig(name=GIVEN, mend=self.mend, **adapter)
        if self.name == GIVEN and own is None:
            raise ConfigError("the model of this run was handed over: give the module again, ldpfl.predict(..., model=module)")
        if is_pretrained(self.name) and (own is None or is_pretrained(own)):
            # A folder may be somebody else's, and what it names is fetched from nowhere: a base of the hub is named by the caller.
            name = own or self.name
            if own is None and not Path(name.removeprefix(PRETRAINED)).is_dir():
                raise ConfigError(f"the base of this model is {self.name}, which is not here: give its folder or name, --model {self.name}")
            return ModelConfig(name=name, **adapter)
        if (self.name == GIVEN or is_code(self.name)) and (own is None or not is_code(own)):
            raise ConfigError(
                f"the model of this run is code, which would be run: if {self.name} is yours, name it as the model (--model {self.name})"
            )
        return ModelConfig(name=own if own is not None and is_code(own) else self.name, options=self.options, mend=self.mend)

    def _made(self, model: ModelConfig, given: nn.Module | None = None) -> nn.Module:
        try:
            return made_of(model, self.described, self.targets, given=given)
        except LdpflError:
            raise
        except Exception as error:  # options that fit no model may fail in any way, and the file may be somebody else's
            raise ValueError(f"no such model can be made, {type(error).__name__}: {error}") from error


def check_whole(personal: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` if ``personal`` layers stayed at the clients, so that the saved model predicts nothing."""
    if personal:
        raise ConfigError(
            f"the layers {', '.join(personal)} stayed at the clients (model.personal), so this model predicts nothing by itself: take its "
            "module by ldpfl.load_model, and train these layers on data of your own"
        )


def kept_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a run keeps of a trained ``module``, by name. Of a frozen base it keeps none."""
    if not has_base(module):
        return dict(module.state_dict())
    return {name: own.detach() for name, own in module.named_parameters() if own.requires_grad}


def _shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the header of a file of tensors; no tensor is read."""
    with safe_open(weights, framework="pt") as handle:
        return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118  # no dict


def _check_shapes(module: nn.Module, found: dict[str, tuple[int, ...]]) -> None:
    expected = {name: tuple(value.shape) for name, value in kept_of(module).items()}
    if found == expected:
        return
    name = min(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    raise ValueError(f"expected {name[:80]!r} of shape {expected.get(name, 'none')}, found {found.get(name, 'none')}")


def read_description(path: Path, kind: type[BaseModel]) -> Any:
    """Return what a small JSON file says of a model.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: the file is damaged, or larger than any such file is.
    """
    try:
        text = read_text(path, MAX_BYTES)
        # Pydantic keeps an error for each wrong field, and with each error for a missing one a copy of all that was given.
        if text.count(":") > _MAX_FIELDS or text.count(",") > _MAX_ENTRIES:
            raise DataError(f"{path} is damaged: it has more than {_MAX_FIELDS:,} fields or {_MAX_ENTRIES:,} entries")
        return kind.model_validate_json(text)
    except FileNotFoundError:
        raise
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise DataError(f"{path} is damaged: {f'{place}: ' if place else ''}{problem['msg']}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {getattr(error, 'strerror', None) or error}") from None
