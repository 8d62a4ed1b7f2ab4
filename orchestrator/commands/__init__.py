"""The commands of `fedsweep`, a module for each part of the job."""
