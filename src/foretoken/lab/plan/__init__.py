"""Formulas: what speculation promises from acceptance and cost. Pure, no model."""
