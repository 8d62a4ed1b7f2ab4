"""`python -m fedsweep` is the command `fedsweep`."""

from orchestrator.cli import main

if __name__ == "__main__":
    main()
