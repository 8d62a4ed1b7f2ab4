"""Turns tables of users (CSV, Parquet, JSON lines, NumPy, SVMlight) into the arrays of a feature file."""
