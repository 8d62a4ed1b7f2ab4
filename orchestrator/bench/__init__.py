"""`fedsweep bench`: how fast this machine sweeps, and how good each search strategy is."""
