"""Where a job runs: one file per place, each a pure function from a `LaunchRequest` to the text that the place takes.

    local      the command line itself
    slurm      a batch script
    jobset     Kubernetes: a JobSet         trainjob   Kubernetes: Kubeflow's TrainJob and its runtime
    ray_job    Ray: a driver script         ray_nodes  what the script calls

`submit` hands a text over. No torch here.
"""
