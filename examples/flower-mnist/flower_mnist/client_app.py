"""The client: ldpfl's own, for its recipes. Its only mod lets nothing but a private report leave.

For a model and training of your own, write a Flower app as usual, and put the mod first:

    from flwr.clientapp import ClientApp
    from ldpfl.flower import LdpMod, operator_node

    app = ClientApp(mods=[LdpMod(operator_node)])

    @app.train()
    def train(message, context): ...  # returns the trained arrays under the names that came
"""

from ldpfl.flower.apps import client_app as app

__all__ = ["app"]
