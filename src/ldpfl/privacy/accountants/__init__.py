"""Accountants: what releases cost, by mechanism and trust model. Each module is one family; all are pure functions.

``base`` is their interface; ``local`` composes all that leaves a client, ``behind_shuffler`` what a shuffler lets through of it; a new
accountant is registered in ``registry``.
``randomized_response`` any number of pure reports without a shuffler; ``shuffled`` and ``shuffled_composition`` binary reports of
which only the count is seen; ``blanket`` reports that have a known part in common, linked bits among them; ``shuffled_gaussian`` vectors
with Gaussian noise; ``clones`` any other shuffled report; ``participation`` secret participation; ``poisson`` batches drawn by coins;
``gaussian`` Gaussian noise; ``adaptive`` budgets; ``closed_forms`` an estimate. ``binomial``, ``losses`` and ``moments`` are what they
compute with.
"""
