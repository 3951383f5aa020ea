"""Attacks on what a federation publishes or sends: they measure what a protection is worth; they prove nothing.

``gan`` reconstructs images of a class from a global model, ``frechet`` and ``extractor`` measure how near they come,
``on_run`` does both for a simulation's run folder, ``on_sweep`` and ``compare`` for many. ``linkage`` ties reports together by when they
arrive. ``canary`` looks for one client in a round's pool.
"""

from ldpfl.attacks.gan import GanConfig, Generator, Target, attack, generate, train_generator

__all__ = ["GanConfig", "Generator", "Target", "attack", "generate", "train_generator"]
