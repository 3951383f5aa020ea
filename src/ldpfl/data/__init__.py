"""Images from the Hugging Face layout, and their division over clients."""

from ldpfl.data.images import Images, ImageTask
from ldpfl.data.loading import load, names
from ldpfl.data.partition import partition

__all__ = ["ImageTask", "Images", "load", "names", "partition"]
