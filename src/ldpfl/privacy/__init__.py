"""What a release costs, to whom, and under which assumptions."""

from ldpfl.privacy.guarantee import Guarantee

__all__ = ["Guarantee"]
