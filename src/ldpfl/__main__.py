"""``python -m ldpfl``."""

from ldpfl.cli import main

main()
