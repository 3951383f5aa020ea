"""Accountants: what releases cost, by mechanism and trust model. Each module is one family; all are pure functions.

``base`` is their interface; ``local`` composes all that leaves a client, ``behind_shuffler`` what a shuffler lets through of it: a
new accountant is registered in one of these two, by a line of its ``ACCOUNTANTS``.
``randomized_response`` any number of pure reports without a shuffler; ``shuffled`` and ``shuffled_composition`` binary reports of
which only the count is seen; ``clones`` any shuffled report; ``sampling`` secret participation; ``gaussian`` Gaussian noise;
``closed_forms`` an estimate. ``binomial``, ``losses`` and ``moments`` are what they compute with.
"""
