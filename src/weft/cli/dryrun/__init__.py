"""`weft dryrun`: the verb, the question it asks, the sweep over values, the view; and the dry run beside a training."""
