"""Pictures of a real run: rounds, token trees, where every token came from, and why drafts were rejected."""
