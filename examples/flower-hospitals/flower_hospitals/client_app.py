"""The client: ldpfl takes the gradient of each of its records. Nothing but a private report comes out of it."""

from ldpfl.flower import LdpClientApp

app = LdpClientApp(records="flower_hospitals.patients:records")
