"""Ledgers as a tabular benchmark: every trial of a search by round, to be looked up without training anything."""
