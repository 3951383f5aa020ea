"""Accountants: what releases cost, by mechanism and trust model. Each module is one family; all are pure functions.

``randomized_response`` any number of pure reports without a shuffler; ``composition`` all that leaves a client, Gaussian noise
included; ``shuffled`` and ``shuffled_composition`` binary reports of
which only the count is seen; ``clones`` any shuffled report; ``sampling`` secret participation; ``gaussian`` Gaussian noise;
``closed_forms`` published formulas, for comparison. ``binomial``, ``losses`` and ``moments`` are what they compute with.
"""
