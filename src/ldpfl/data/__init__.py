"""Images from the Hugging Face layout, and their division over clients."""

from ldpfl.data.images import Images, ImageTask
from ldpfl.data.loading import load, names
from ldpfl.data.partition import CURIOUS_CLIENT, Isolation, partition

__all__ = ["CURIOUS_CLIENT", "ImageTask", "Images", "Isolation", "load", "names", "partition"]
