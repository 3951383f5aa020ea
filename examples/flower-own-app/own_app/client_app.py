"""The wrapper, by which only a private report leaves a node."""

from ldpfl.flower import LdpClientApp

app = LdpClientApp("own_app.training:app")
