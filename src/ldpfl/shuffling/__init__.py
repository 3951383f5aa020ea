"""Take reports apart and mix them, so that the server learns values but not who sent them."""

from ldpfl.shuffling.partial import PartialPool, RefusedRecords
from ldpfl.shuffling.pool import Aggregate, ReportPool, mix
from ldpfl.shuffling.records import Joined, RecordPlan

__all__ = ["Aggregate", "Joined", "PartialPool", "RecordPlan", "RefusedRecords", "ReportPool", "mix"]
