"""`weft verify --script`: a training script of one's own on several ranks, against the same script on one process."""
