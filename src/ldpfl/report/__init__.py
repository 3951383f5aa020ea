"""What a person looks at: tables and progress in a terminal, plots, pages, and what TensorBoard shows."""
