"""Where a job runs: one file per place, each a pure function from a `LaunchRequest` to the text that the place takes.

    local      the command line itself
    slurm      a batch script
    jobset     Kubernetes: a JobSet         trainjob   Kubernetes: Kubeflow's TrainJob and its runtime

`submit` hands a text over. No torch here.
"""
