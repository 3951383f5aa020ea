"""A second opinion: checks a certificate by accountants of its own, which share no line with those of ``ldpfl.privacy``.

``certificate_file`` is the form, which ``signature`` reads and signs; ``charged_rounds`` holds it against a ledger; ``exact`` computes to
fifty digits what has a closed form; ``laws`` are single releases, ``composition`` many of them, and ``hidden`` many behind a shuffler;
``verdicts`` says of each line whether it is confirmed.
"""
