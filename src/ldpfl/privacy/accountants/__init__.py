"""Accountants: the privacy cost of releases, by mechanism and trust model. Each module is one family of pure functions.

Interface: ``base``. ``local`` composes everything a client sends; ``behind_shuffler`` composes what a shuffler or sum reveals of it. A new
accountant is registered in ``registry``.

Families: ``randomized_response``: any number of pure reports without a shuffler. ``shuffled`` and ``shuffled_composition``: shuffled bits
of which only the count is seen. ``blanket``: shuffled reports with a known privacy blanket, such as linked bits. ``shuffled_gaussian``:
shuffled vectors with Gaussian noise. ``clones``: any other shuffled report. ``participation``: secret participation. ``poisson``: Poisson
batches. ``gaussian``: Gaussian noise. ``adaptive``: lifetime budgets. ``closed_forms``: an estimate.

Tools: ``binomial``, ``losses``, ``moments`` and ``roots``.
"""
