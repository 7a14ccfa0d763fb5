"""Online learning of draft models."""
