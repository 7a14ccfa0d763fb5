"""Load test of an OpenAI-compatible server over HTTP, measured by its clients."""
