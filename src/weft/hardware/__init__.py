"""Devices, nodes and links as sourced data, and the one function that turns `4x8xH100-80GB` into a `Cluster`.

Nothing here inspects the machine it runs on. Figures come from data/*.toml, each with a source and
a date, and from a calibration file if there is one. Adding a GPU takes one file in data/devices.
"""

from weft.hardware.catalogue import device_names, fabric_names, find_device
from weft.hardware.parse import cluster

__all__ = ["cluster", "device_names", "fabric_names", "find_device"]
