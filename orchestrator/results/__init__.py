"""The ledger, the folder or URL that holds it, and queries."""
