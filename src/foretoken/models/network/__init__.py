"""Transformers networks: their properties, layers and hidden states, and temporary changes for one call."""
