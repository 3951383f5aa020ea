"""A second opinion: checks a certificate by accountants of its own, which share no line with those of ``ldpfl.privacy``.

``certificate`` is what is read and signed; ``charged`` holds it against a ledger; ``exact`` computes to fifty digits what has a closed
form; ``laws`` are single releases, and ``composition`` many of them; ``verdicts`` says of each line whether it is confirmed.
"""
