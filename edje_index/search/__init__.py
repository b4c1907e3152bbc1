"""Search: text embedding, nearest rows, token fetch, re-ranking."""
