"""OpenAI-compatible serving of one engine."""
