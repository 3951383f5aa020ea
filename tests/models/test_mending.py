"""What keeps a module from private training is found and replaced; the module itself stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ldpfl import PrivacyError, validate_module
from ldpfl.models.mending import mended

IMAGES = torch.zeros(2, 1, 8, 8)


def _placed_thrice(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), part, nn.Sequential(nn.Linear(4, 4), part), part)


BROKEN = {
    "batch normalisation": (nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12)), IMAGES, "GroupNorm(6, 12"),
    "within another": (nn.Sequential(nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7))), torch.zeros(2, 4), "GroupNorm(1, 7"),
    "instance statistics": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)),
        torch.zeros(2, 1, 8, 8),
        "InstanceNorm2d",
    ),
    "dropout": (nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), torch.zeros(2, 4), "Dropout(p=0.0, inplace=False)"),
    "recurrent dropout": (nn.LSTM(4, 3, 2, dropout=0.5), torch.zeros(2, 5, 4), "LSTM(4, 3, num_layers=2)"),
    "random slope": (nn.Sequential(nn.Linear(4, 2), nn.RReLU()), torch.zeros(2, 4), "LeakyReLU"),
    "batch normalisation in three places": (_placed_thrice(nn.BatchNorm1d(4)), torch.zeros(2, 4), "GroupNorm(1, 4"),
    "dropout in three places": (_placed_thrice(nn.Dropout(0.5)), torch.zeros(2, 4), "Dropout(p=0.0, inplace=False)"),
    "double precision": (nn.Linear(4, 2).double(), torch.zeros(2, 4), "torch.float32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_replaced(name: str) -> None:
    module, sample, after = BROKEN[name]
    with pytest.raises(PrivacyError):
        validate_module(module)
    before = str(module)
    right, (change, *others) = mended(module)
    assert len({other.after for other in (change, *others)}) == 1
    validate_module(right)
    right(sample)
    assert after in change.after
    assert str(module) == before
    with pytest.raises(PrivacyError):
        validate_module(module)


def test_the_whole_module_may_be_what_is_replaced() -> None:
    right, (change,) = mended(nn.BatchNorm2d(8))
    assert isinstance(right, nn.GroupNorm)
    assert change.place == ""


def test_what_is_right_stays_as_it_is_and_what_is_beyond_help_is_left() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.GroupNorm(1, 2), nn.Dropout(0.0))
    right, changes = mended(module)
    assert changes == ()
    assert all(torch.equal(one, other) for one, other in zip(module.parameters(), right.parameters(), strict=True))
    odd = nn.Linear(3, 2)
    odd.register_buffer("seen", torch.zeros(1))
    still, changes = mended(odd)
    assert changes == ()
    with pytest.raises(PrivacyError, match="seen"):
        validate_module(still)
