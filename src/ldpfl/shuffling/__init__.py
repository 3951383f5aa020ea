"""Take reports apart and mix them, so that the server learns values but not who sent them."""

from ldpfl.shuffling.chunks import ChunkPlan, Joined
from ldpfl.shuffling.partial import PartialPool, RefusedRecords
from ldpfl.shuffling.pool import Aggregate, ReportPool, mix

__all__ = ["Aggregate", "ChunkPlan", "Joined", "PartialPool", "RefusedRecords", "ReportPool", "mix"]
