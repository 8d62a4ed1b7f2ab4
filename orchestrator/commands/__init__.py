"""One file per command. Heavy modules are imported inside functions, so that help and errors in options appear fast."""
