"""Values that every room shares: plans, run descriptions, records, terms, errors. No torch, no input or output."""
