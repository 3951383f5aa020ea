"""Three hospitals, a network and a reader of tables of their own, and each row protected from everybody."""
