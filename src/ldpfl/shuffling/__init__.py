"""Take reports apart and mix them, so that the server learns values but not who sent them."""

from ldpfl.shuffling.pool import ReportPool, mix

__all__ = ["ReportPool", "mix"]
