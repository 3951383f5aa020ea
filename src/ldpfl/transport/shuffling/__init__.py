"""Take reports apart and mix them, so that the server learns values but not who sent them."""

from ldpfl.transport.shuffling.partial import PartialPool, RefusedRecords
from ldpfl.transport.shuffling.pool import Aggregate, ReportPool, mix
from ldpfl.transport.shuffling.records import Joined, RecordPlan

__all__ = ["Aggregate", "Joined", "PartialPool", "RecordPlan", "RefusedRecords", "ReportPool", "mix"]
