"""What is tried on a model when it is loaded, and what is remembered of it."""
