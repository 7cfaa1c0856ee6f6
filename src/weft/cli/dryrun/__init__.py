"""`weft dryrun`: the verb, its question, the sweep over values, the view; and the dry run beside a training."""
