"""Tables, figures, the HTML report and exports, all read from the ledger."""
