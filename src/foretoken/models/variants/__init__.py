"""Models made from another model's network: inflated, with few of its slots, with its weights in few bits."""
