"""The processes of a run: their ranks, process group, stop flag, watch and failure reports. Nothing here trains."""
