"""Pictures of a run: rounds, token trees, origins of tokens, and reasons for rejections."""
