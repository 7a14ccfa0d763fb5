"""Cards: a benchmark as a small file that anyone can contribute, and a page made from a folder of them."""
