"""Headers that the relay and its callers agree on."""

OFFSET = "Upload-Offset"
"""How many bytes of an upload the relay has, or after how many these bytes come."""

COMPLETE = "Upload-Complete"
"""``?1`` if the relay has all bytes of an upload, else ``?0``."""

LENGTH = "Upload-Length"
"""How many bytes an upload will have."""

PARTS = "Relay-Parts"
"""How many parts the mixed records have."""
