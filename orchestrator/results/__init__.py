"""What has been done: the ledger, and the folder or URL it lives in."""
