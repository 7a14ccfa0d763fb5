"""The README of a trained model or drafter: what it was made from, how, and what it cannot do."""
