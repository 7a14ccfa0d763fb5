"""Cards: a benchmark as a small file that anyone can hand in, and the page that a folder of them becomes."""
