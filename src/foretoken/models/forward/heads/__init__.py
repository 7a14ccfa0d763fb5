"""Small networks that read hidden states of a target, and the vocabulary that they guess from."""
