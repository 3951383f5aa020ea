"""Gaussian noise on a client's update, by a schedule over rounds, clients and layers: LaDP-FL and what it is compared with."""

from ldpfl.mechanisms.gaussian.fixed import Dpa, FullDP, NbAFL, SensitivitySchedule, TimeVarying
from ldpfl.mechanisms.gaussian.history import AdapLDP, SensitiveDP
from ldpfl.mechanisms.gaussian.ladp import LadpPaper, LadpSound, LayerSelection
from ldpfl.mechanisms.gaussian.mechanism import Gaussian, NoisyReports
from ldpfl.mechanisms.gaussian.schedule import ClientState, NoiseSchedule, PublicSchedule
from ldpfl.mechanisms.gaussian.sensitivity import LocalSteps, Sensitivity

__all__ = [
    "AdapLDP",
    "ClientState",
    "Dpa",
    "FullDP",
    "Gaussian",
    "LadpPaper",
    "LadpSound",
    "LayerSelection",
    "LocalSteps",
    "NbAFL",
    "NoiseSchedule",
    "NoisyReports",
    "PublicSchedule",
    "SensitiveDP",
    "Sensitivity",
    "SensitivitySchedule",
    "TimeVarying",
]
