"""Planning: what a setting guarantees, and what a guarantee asks of a setting."""
