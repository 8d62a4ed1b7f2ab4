"""Data from where its makers publish it: catalogue, fetching, reading of their formats, feature files."""
