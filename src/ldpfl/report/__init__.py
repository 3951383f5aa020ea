"""What a person looks at: terminal tables and progress, and plots."""
