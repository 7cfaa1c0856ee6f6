"""Where a job runs: one file per place, each a pure function from a `LaunchRequest` to the text that the place takes.

    local      the command line itself
    slurm      a batch script

`submit` hands a text over. No torch here.
"""
