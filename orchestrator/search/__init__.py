"""What to run next, and which configuration wins. Does not depend on Ray."""
