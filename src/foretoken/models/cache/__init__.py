"""Caches (keys, values and states of committed tokens and a scratch tree) and their attention masks."""
