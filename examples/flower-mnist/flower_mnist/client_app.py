"""The client: ldpfl's own, for its recipes. Nothing but a private report comes out of it.

For a model and training of your own, write a Flower ClientApp as usual, and wrap it by its import path:

    from ldpfl.flower import LdpClientApp

    app = LdpClientApp("my_app.training:app")

For a model of your own whose records are protected one by one, see ``examples/flower-hospitals``.
"""

from ldpfl.flower.apps import client_app as app

__all__ = ["app"]
