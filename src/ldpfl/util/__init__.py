"""Helpers without any knowledge of federated learning: files, keys, random words, imports, text."""
