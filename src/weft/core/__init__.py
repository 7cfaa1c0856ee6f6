"""Values that all packages share: plans, run descriptions, records, terms, errors. No torch, no input or output."""
