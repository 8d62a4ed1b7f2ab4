"""The sections of a study file, one file each."""
