"""Output for people: tables and progress in a terminal, plots, HTML pages, and TensorBoard."""
