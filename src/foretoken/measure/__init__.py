"""Measurements: what calls, drafts and machines cost here."""
