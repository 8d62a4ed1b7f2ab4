"""Ledgers as a tabular benchmark: every trial by round, for lookups without training."""
