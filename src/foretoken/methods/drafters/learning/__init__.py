"""Learning while serving: what a draft model is taught, and how."""
