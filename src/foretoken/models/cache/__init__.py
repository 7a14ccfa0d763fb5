"""Keys, values and states of committed tokens and a scratch tree, and which of their slots a row sees."""
