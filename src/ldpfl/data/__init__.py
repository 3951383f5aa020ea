"""Built-in and hub data sets, the user's own tables and images, and the division of samples over clients."""

from ldpfl.data.dataset import Dataset
from ldpfl.data.holding_out import held_out, held_out_by_person
from ldpfl.data.loading import load, names
from ldpfl.data.partition import CURIOUS_CLIENT, Isolation, partition
from ldpfl.data.samples import Samples

__all__ = ["CURIOUS_CLIENT", "Dataset", "Isolation", "Samples", "held_out", "held_out_by_person", "load", "names", "partition"]
