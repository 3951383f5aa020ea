"""Data sets that come in the Hugging Face layout, tables and images of one's own, and how samples are divided over clients."""

from ldpfl.data.holding_out import held_out, held_out_by_person
from ldpfl.data.loading import load, names
from ldpfl.data.partition import CURIOUS_CLIENT, Isolation, partition
from ldpfl.data.samples import Dataset, Samples

__all__ = ["CURIOUS_CLIENT", "Dataset", "Isolation", "Samples", "held_out", "held_out_by_person", "load", "names", "partition"]
