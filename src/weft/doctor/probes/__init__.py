"""Probes: each module reads its facts of a machine (`read`) and judges the facts of a host (`judge`).

`read` touches the machine and returns plain JSON values; `judge` is pure, so that a record can be judged anywhere.
"""
