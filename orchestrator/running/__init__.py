"""How it runs: Ray, Tune, packs, progress."""
