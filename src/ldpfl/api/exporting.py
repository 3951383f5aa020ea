"""Export the shareable part of a finished run: its model and its guarantee, and nothing that the guarantee does not cover."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import ldpfl
from ldpfl.api.arguments import checked
from ldpfl.api.certifying import certify
from ldpfl.api.results import RunResult
from ldpfl.errors import ConfigError, DataError, listed_names, printable
from ldpfl.experiments.model_file import ModelFile, check_no_personal_layers
from ldpfl.experiments.other_folders import GUARANTEE
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.models.adapters import copy_adapter
from ldpfl.privacy.accounting import account
from ldpfl.report.methods import methods
from ldpfl.report.model_card import model_card
from ldpfl.util.files import make_folder, replace_atomically, to_json, write_text, writing
from ldpfl.util.user_code import is_pretrained, named_model


@checked
def export(
    run: RunResult | str | Path,
    folder: str | Path,
    *,
    key: str | Path | None = None,
    onnx: bool = False,
    pt2: bool = False,
    model: str | nn.Module | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Path:
    """Write the shareable part of a finished run to a new folder, and return the folder.

    The folder holds the model, its description and encoding, the guarantee, a certificate and a model card (README.md), with a paragraph
    for a paper and a citation. For a pretrained model it holds only the trained parameters, and an adapter also in the format of ``peft``.
    It holds no secret, no score that was measured on private rows, no noise-free baseline, no path of this machine, and no fingerprint of
    the rows.

    Args:
        run: a finished run that has a folder, or its folder.
        folder: a new or empty folder.
        key: file of the private key that signs the certificate, see :func:`ldpfl.certify`.
        onnx, pt2: also write the model for other programs, as ``model.onnx`` or as ``model.pt2``, a program of ``torch.export``. Both take
            the inputs of the module (for a table, the encoded columns) and any number of rows.
        model: the module or its name, if ``onnx`` or ``pt2`` is set, the model is code and ``run`` is a folder; see :func:`ldpfl.predict`.
        on_note: called with a note if the guarantee does not cover all tensors of a user's own model: training leaves frozen parameters
            and constants as they were given. The model card says so, too.

    Raises:
        ConfigError: the run is not finished, has no folder, keeps layers at its clients, or protects nothing of a user's own data;
            ``folder`` is not empty; or the model has no ONNX or ``.pt2`` form.
        DataError: a file of the run is damaged, or a link.
        WriteError: the folder cannot be written.
    """
    run_path = run.folder if isinstance(run, RunResult) else Path(run)
    if run_path is None:
        raise ConfigError("this run was not saved, so it cannot be exported: run it again with ldpfl.run(..., folder=...)")
    run_folder, out = RunFolder(run_path), Path(folder)
    config, result = run_folder.config(), run_folder.result()
    run_folder.check_is_ldpfls()
    if result is None:
        raise ConfigError(f"{run_path} contains a run that is not finished: finish it with ldpfl run --resume, then export it")
    described = run_folder.model_file().without_local_folders()
    check_no_personal_layers(described.personal)
    measured_encoder = run_folder.measured_encoder()
    encoder = None if measured_encoder is None else measured_encoder.handed_on()
    if config.data.brought and not config.mechanism.protects:
        raise ConfigError(
            f"{run_path} was trained on your data without noise, so its model may reveal any row: train it with a mechanism other than "
            "'none' before you export it"
        )
    suffixes = [suffix for suffix, wanted in ((".onnx", onnx), (".pt2", pt2)) if wanted]
    certificate = certify(run_path, key=key)
    statement = account(run_folder.ledger(), config.privacy.delta)
    methods_text = methods(config, result, run_folder.ledger(), statement, run_folder.kind())
    with writing(out):  # to look into the folder may fail, too
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} is not empty: give a new folder, so that nothing else is published with the model")
    # A result holds its model, so that also a Python object can be written without being given again.
    given_model = run.module() if isinstance(run, RunResult) and model is None else model
    # This comes before the folder, because it may fail.
    exchange_files, frozen_in_exchange_files = _exchange_files(run_folder, described, suffixes, given_model)
    with _emptied_on_failure(out):
        frozen = write_model(run_folder, out)
        for name, content in exchange_files.items():
            with replace_atomically(out / name) as temporary:
                temporary.write_bytes(content)
        as_given = list(dict.fromkeys([*frozen, *frozen_in_exchange_files]))
        card = model_card(config, described, encoder, statement, result, ldpfl.__version__, methods_text, list(exchange_files), as_given)
        write_text(out / GUARANTEE, to_json(statement.to_dict(), indent=2) + "\n")
        write_text(out / "certificate.json", certificate.to_json())
        write_text(out / "README.md", card)
    if as_given and on_note is not None:
        on_note(note_on_tensors_as_given(as_given))
    return out


def note_on_tensors_as_given(names: Iterable[str]) -> str:
    """Return the note that the guarantee does not cover the tensors ``names``, which training has left as the user gave them."""
    return (
        f"the guarantee does not cover the tensors {listed_names(names, 10)} of your model: training has left them as you gave them, so "
        "publish the model only if they hold nothing about private rows"
    )


@contextmanager
def _emptied_on_failure(folder: Path) -> Iterator[None]:
    """Create the new or empty ``folder``. If the block fails, remove all files in it, so that nobody publishes half an export."""
    is_new = not folder.exists()
    make_folder(folder)
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        if is_new:
            folder.rmdir()
        raise


def _exchange_files(
    source: RunFolder, described: ModelFile, suffixes: list[str], model: str | nn.Module | None
) -> tuple[dict[str, bytes], list[str]]:
    """Return the model's file for each of ``suffixes``, ``.onnx`` or ``.pt2``, by name, and names of tensors in it.

    These are the frozen and constant tensors of a user's own model.

    Raises:
        ConfigError: the model is pretrained or takes several tensors, or it cannot be written in this format.
    """
    contents, frozen = dict[str, bytes](), list[str]()
    if not suffixes:
        return contents, frozen
    from ldpfl.models.exchange_formats import file_bytes

    if described.shape is None or is_pretrained(described.name):
        raise ConfigError(
            f"the model {printable(described.name)} is pretrained or takes several tensors, so it cannot be written as ONNX or .pt2: leave "
            "out --onnx and --pt2"
        )
    # The formats are recorded while the module computes an example: one sample of numbers, or of tokens.
    example = torch.zeros(1, *described.shape, dtype=torch.float32 if described.vocabulary is None else torch.int64)
    module = source.model_file().module(source.model_path, named_model(model) if isinstance(model, str) else model)
    for suffix in suffixes:
        contents[f"model{suffix}"], frozen = file_bytes(module, example, suffix)
    return contents, frozen if described.is_users_own else []


def _frozen_in_checkpoint(run_folder: RunFolder, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the ``tensors`` that are not in the run's checkpoint, because training leaves them as they are.

    A tensor that is equal to a trained one is not named: it reveals no more.

    Raises:
        DataError: the tensors are not the model of the checkpoint, to which the ledger belongs, or a finished run has no checkpoint.
    """
    checkpoint = run_folder.checkpoint_needed()
    if checkpoint is None:  # no round is finished
        return list(tensors)
    contents = {name: _content(tensor) for name, tensor in tensors.items()}
    weights, layers = _content(checkpoint.state.model), checkpoint.history[-1].radius  # by name, in the order of the weights
    if layers.keys() <= contents.keys():
        named_layers = [contents[name] for name in layers]
        trained = {*named_layers} if weights == b"".join(named_layers) else None
    else:  # the file has other names, such as those of a pretrained model's adapter
        trained = _pieces_of(weights, contents.values())
    if trained is None:
        raise DataError(
            f"{run_folder.model_path} has other weights than the run's checkpoint, so the ledger may not be that of this model: one of the "
            "two was changed, or is of another run or an earlier round; restore the latest copies of both"
        )
    return [name for name, content in contents.items() if content and content not in trained]


def _content(tensor: Tensor) -> bytes:
    """Return the values of ``tensor`` as bytes."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


_MAX_COUNTS = 1_000_000
"""Maximum number of counts of pieces, in all ways that are tried to make a model's weights of the tensors in its file."""


def _pieces_of(whole: bytes, pieces: Iterable[bytes]) -> set[bytes] | None:
    """Return those of ``pieces`` that make ``whole``, one after another in any order, each used at most once. None if none do.

    A model's file has frozen tensors and buffers, too, and its order is not that of the checkpoint's vector. All orders that fit so far are
    followed, because several pieces may fit at one place. In a made-up file, orders may be without number: beyond :data:`_MAX_COUNTS` the
    answer is None.
    """
    counts = Counter(piece for piece in pieces if piece)
    # A way is the place where the next piece starts, and how many of each different piece are left.
    tried_ways, open_ways = set[tuple[int, tuple[int, ...]]](), [(0, tuple(counts.values()))]
    while open_ways and len(tried_ways) * len(counts) < _MAX_COUNTS:
        way = start, left = open_ways.pop()
        if start == len(whole):
            return {piece for piece, count_left in zip(counts, left, strict=True) if count_left < counts[piece]}
        if way in tried_ways:
            continue
        tried_ways.add(way)
        for index, piece in enumerate(counts):
            if left[index] and whole.startswith(piece, start):
                left_after_piece = (*left[:index], left[index] - 1, *left[index + 1 :])
                open_ways.append((start + len(piece), left_after_piece))
    return None


def write_model(run_folder: RunFolder, out: Path) -> list[str]:
    """Write the model of a finished run, and the files that are needed to use it, to the folder ``out``.

    Return the names of the tensors in it that training has left as they were, if the model is a user's own.

    Raises:
        DataError: a file of the run is damaged, or a link.
    """
    run_folder.check_no_links()
    described, target = run_folder.model_file().without_local_folders(), RunFolder(out)
    make_folder(out)
    with replace_atomically(target.model_path) as temporary:
        tensors = described.copy_weights(run_folder.model_path, temporary)
        frozen = _frozen_in_checkpoint(run_folder, tensors)
    if described.base and run_folder.adapter_path.exists():
        copy_adapter(run_folder.adapter_path, out)
    if (encoder := run_folder.measured_encoder()) is not None:
        write_text(target.encoding_path, encoder.handed_on().model_dump_json(indent=1) + "\n")
    write_text(target.description_path, described.model_dump_json(indent=1) + "\n")
    return frozen if described.is_users_own else []  # those of other models, such as a pretrained base, are public


def given_seed(run: str | Path) -> int | None:
    """Return the seed that determines all noise of a run on a user's own data; None if the noise is secret, or the data are public.

    Raises:
        ConfigError: there is no such run.
    """
    config = RunFolder(Path(run)).config()
    return config.seed if config.data.brought and not config.secret_noise else None
