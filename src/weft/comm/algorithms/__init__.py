"""Collectives as data: who sends which elements to whom, round by round. Neither torch nor a network is needed."""
