"""Data sets that come in the Hugging Face layout, tables and images of one's own, and how samples are divided over clients."""

from ldpfl.data.loading import load, names
from ldpfl.data.partition import CURIOUS_CLIENT, Isolation, partition
from ldpfl.data.samples import Dataset, Samples

__all__ = ["CURIOUS_CLIENT", "Dataset", "Isolation", "Samples", "load", "names", "partition"]
