"""Models derived from another model's network: inflated, with few of its slots, or with quantised weights."""
