"""The server: ldpfl's own, for its recipes."""

from ldpfl.flower.apps import server_app as app

__all__ = ["app"]
