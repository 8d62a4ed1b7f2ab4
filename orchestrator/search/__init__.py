"""What to run next, and which configuration wins. Knows nothing of Ray."""
