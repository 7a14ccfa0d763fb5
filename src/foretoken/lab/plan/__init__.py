"""Formulas for the gain of speculation from acceptance and costs, without a model."""
