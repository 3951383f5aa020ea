"""Images as PNG grids that a second run of the same figures repeats byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ldpfl.errors import ConfigError
from ldpfl.util.files import replace_atomically

_GAP = 2  # pixels between images of a grid, before scaling
_MARGIN = 16  # pixels around grids
_SCALE = 2
_BACKGROUND, _GAP_GRAY = 255, 96  # brightness of the sheet, and of the gaps in a grid


def draw_image_grid(path: Path, images: Tensor, *, columns: int = 10, rows: int = 10) -> None:
    """Write the first ``rows * columns`` of ``images`` as a PNG grid: N images of C channels, 1 or 3, height H and width W, as uint8.

    Raises:
        ConfigError: there is no image, or images are neither grey nor coloured.
    """
    _save_png(path, _grid(images, columns, rows))


def draw_side_by_side(path: Path, panels: Sequence[tuple[str, Tensor]], *, columns: int = 8, rows: int = 8, abreast: int = 3) -> None:
    """Write a PNG with a grid for each (heading, images) of ``panels``, below its heading. ``abreast`` grids stand in a row.

    Raises:
        ConfigError: there is no panel, or one without images, or images are neither grey nor coloured.
    """
    if not panels:
        raise ConfigError("panels is empty, expected at least one (heading, images)")
    font = ImageFont.load_default()
    grids = [_grid(images, columns, rows) for _, images in panels]
    heading_widths = [int(font.getlength(heading)) + 1 for heading, _ in panels]
    column_numbers = range(min(abreast, len(panels)))
    # Panels are laid out row by row, so a slice in steps of `abreast` is a column of the sheet.
    widths = [max(*(grid.width for grid in grids[column::abreast]), *heading_widths[column::abreast]) for column in column_numbers]
    heights = [max(grid.height for grid in grids[start : start + abreast]) for start in range(0, len(grids), abreast)]
    # Two margins above each row of grids leave room for its headings.
    size = (sum(widths) + _MARGIN * (len(widths) + 1), sum(heights) + _MARGIN * (2 * len(heights) + 1))
    sheet = Image.new("RGB", size, (_BACKGROUND,) * 3)
    pen = ImageDraw.Draw(sheet)
    for number, ((heading, _), grid) in enumerate(zip(panels, grids, strict=True)):
        row, column = divmod(number, abreast)
        left, top = sum(widths[:column]) + _MARGIN * (column + 1), sum(heights[:row]) + 2 * _MARGIN * row
        pen.text((left, top + _MARGIN // 2), heading, fill=(0, 0, 0), font=font)
        sheet.paste(grid, (left, top + 2 * _MARGIN))
    _save_png(path, sheet)


def _grid(images: Tensor, columns: int, rows: int) -> Image.Image:
    """Return the first ``rows * columns`` of ``images`` in a grid, enlarged by ``_SCALE``."""
    if images.dim() != 4 or len(images) == 0 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
        raise ConfigError(f"a grid needs images (N, 1 or 3, H, W) of uint8, got {images.dtype} {tuple(images.shape)}")
    drawn = images[: rows * columns].cpu().expand(-1, 3, -1, -1)  # grey images get three equal channels
    _, _, height, width = drawn.shape
    columns = min(columns, len(drawn))
    cell_height, cell_width = height + _GAP, width + _GAP
    needed_rows = ceil(len(drawn) / columns)
    canvas = torch.full((3, needed_rows * cell_height + _GAP, columns * cell_width + _GAP), _GAP_GRAY, dtype=torch.uint8)
    for number, image in enumerate(drawn):
        top, left = number // columns * cell_height + _GAP, number % columns * cell_width + _GAP
        canvas[:, top : top + height, left : left + width] = image
    picture = Image.fromarray(canvas.permute(1, 2, 0).contiguous().numpy())
    return picture.resize((picture.width * _SCALE, picture.height * _SCALE), Image.Resampling.NEAREST)


def _save_png(path: Path, picture: Image.Image) -> None:
    with replace_atomically(path) as temporary:
        picture.save(temporary, format="PNG")
