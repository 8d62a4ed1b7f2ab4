"""What is shown of it: tables, figures, status, all read from the ledger."""
