"""Attacks on what a federation publishes: they measure what a protection is worth; they prove nothing.

``gan`` reconstructs images of a class from a global model, ``frechet`` and ``extractor`` measure how near they come,
and ``on_run`` does both for a simulation's run folder.
"""

from ldpfl.attacks.gan import GanConfig, Generator, Target, attack, generate, train_generator

__all__ = ["GanConfig", "Generator", "Target", "attack", "generate", "train_generator"]
