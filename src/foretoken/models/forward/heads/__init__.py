"""Small networks over hidden states of a target, and their draft vocabulary."""
