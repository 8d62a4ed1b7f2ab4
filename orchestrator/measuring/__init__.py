"""What `fedsweep bench` measures: this machine, and the ways to search."""
