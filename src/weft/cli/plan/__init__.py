"""`weft plan`: the verb, its confirmation by dry run, the view on a terminal."""
