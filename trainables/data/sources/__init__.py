"""Data sets from where they are published: catalogue, downloads, readers of their formats, feature files."""
