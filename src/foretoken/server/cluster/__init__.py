"""Many replicas behind one gateway."""
