"""Rows in memory: index, records, update kernels, admission, eviction. No sockets, no threads, no torch.

Read table.py first; rows.py holds the two fused passes (pull, push) that everything else serves.
"""
