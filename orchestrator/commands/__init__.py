"""The commands, one small file each. Heavy imports are inside: a mistake on the command line should not cost them."""
