"""The networks of trained drafters, shared by drafting and training; one method = one file."""
