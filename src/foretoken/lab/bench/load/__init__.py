"""Load on an OpenAI-compatible server: requests over HTTP, and what a client sees of them."""
