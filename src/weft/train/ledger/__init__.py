"""ledger.json: predicted, dry-run and measured terms of a run, and the bounds on their differences."""
