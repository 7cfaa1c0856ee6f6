"""`weft doctor`: what is wrong with this machine, or with several hosts together, before a job finds out.

    machine -> probes read facts -> probes judge facts -> record per host -> comparison of records

Standard library only, so that `python -m weft.doctor` answers where the installation itself is broken.
"""
