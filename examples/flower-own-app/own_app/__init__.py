"""Three nodes fit a line to their tables, by a ClientApp and a ServerApp of your own."""
