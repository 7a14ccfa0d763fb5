"""A network of Transformers: what it is, its layers and hidden states, and what is switched inside it for one call."""
