"""What is computed, and in which order."""
