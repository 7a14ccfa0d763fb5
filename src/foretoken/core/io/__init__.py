"""Files: text documents in folders."""
