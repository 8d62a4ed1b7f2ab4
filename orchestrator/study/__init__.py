"""What to sweep over: the study file, its cells and their trials."""
