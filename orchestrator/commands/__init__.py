"""One file per command. Heavy modules are imported inside functions, so that help and bad options are fast."""
