"""The batch script of a training, or of a sweep, on Slurm: one agent per node, which starts its ranks.

first start                  trains
lost node, time limit        Slurm queues the job again, and it continues from its newest checkpoint
time limit - signal_s        USR1 to this script -> SIGTERM to the ranks -> they save and end -> queued again
no newer checkpoint          not queued again: the next start would get no further
queued again after its end   `weft train --continue` finds a finished run and ends with 0
"""

from __future__ import annotations

import shlex
import sys

from weft.launch.places.request import LaunchFile, LaunchRequest, agent_command, shell, verb_words
from weft.train.ranks.environment import ATTEMPT_VARIABLE, JOB_VARIABLE

_HEADER = """\
#!/bin/bash
{directives}

# Written by `weft launch`; `sbatch FILE` submits it.
{setup}set -uo pipefail
{exports}"""

_ARRAY = """
variants=(
{variants}
)
eval "variant=(${{variants[SLURM_ARRAY_TASK_ID]}})"
"""

_ADDRESS = r"""
# The address of the first node. Its name may be unknown to the name service, or be loopback on the node itself.
address_of() {
    local host=$1 found
    found=$(getent ahostsv4 "$host" | awk '$1 !~ /^127\./ { print $1; exit }')
    [ -n "$found" ] || found=$(scontrol show node "$host" | sed -n 's/.*NodeAddr=\([0-9.:a-fA-F]*\) .*/\1/p')
    [ -n "$found" ] || found=$(hostname -I | awk '{ print $1 }')
    echo "$found"
}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(address_of "$first")
if [ -z "$address" ]; then
    echo "error: node $first has no address: its name does not resolve, and Slurm has no NodeAddr of it" >&2
    exit 2
fi
port=$((20000 + SLURM_JOB_ID % 10000))
"""

_RUN = """
newest() { ls -d "$out"/checkpoints/step-* 2> /dev/null | tail -n 1; }
before=$(newest)
stopping=
ask_to_save() {
    stopping=1
    echo "the time limit is near: the ranks save and end" >&2
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap ask_to_save USR1

__COMMAND__
step=$!
code=-1
while true; do
    wait "$step"
    code=$?
    kill -0 "$step" 2> /dev/null || break # otherwise a signal has interrupted the wait
done

if [ -n "$stopping" ]; then
    if [ "$(newest)" = "$before" ]; then
        echo "error: the time limit came before a new checkpoint, so the job is not queued again" >&2
        exit 3
    fi
    __REQUEUE__
fi
exit "$code"
"""
_AGAIN = 'scontrol requeue "$SLURM_JOB_ID" && exit 0'
_NOT_AGAIN = 'echo "saved; launch again with --out $out to continue" >&2; exit 0'


def write_slurm(request: LaunchRequest) -> list[LaunchFile]:
    """The batch script."""
    variants = "\n".join(f"    {shlex.quote(shell(variant))}" for variant in request.variants)
    header = _HEADER.format(
        directives="\n".join(f"#SBATCH {line}" for line in _directives(request)),
        setup="".join(f"{line}\n" for line in request.settings.slurm.setup),  # may read variables that are not set
        exports=_exports(request),
    )
    parts = [header, _ARRAY.format(variants=variants) if request.variants else ""]
    parts += _training(request) if request.has_agents else _own_processes(request)
    return [LaunchFile(name=f"{request.name}.sbatch", text="".join(parts))]


def _directives(request: LaunchRequest) -> list[str]:
    site = request.settings.slurm
    gpus = f"{site.gpu_type}:{request.ranks_per_node}" if site.gpu_type else str(request.ranks_per_node)
    log = site.log or ("weft-%A_%a.log" if request.variants else "weft-%j.log")
    lines = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={site.cpus_per_rank * request.ranks_per_node}",
    ]
    if request.on_gpus:
        lines.append(f"--gpus-per-node={gpus}")
    named = ("partition", "account", "qos", "constraint", "time")
    lines += [f"--{key}={getattr(site, key)}" for key in named if getattr(site, key)]
    lines += [f"--mem={site.memory}"] if site.memory else []
    lines += ["--exclusive"] if site.exclusive else []
    lines += [f"--array=0-{len(request.variants) - 1}"] if request.variants else []
    lines += [f"--chdir={request.folder}", f"--output={log}", "--open-mode=append"]
    if request.has_agents:
        lines += ["--requeue" if site.requeue else "--no-requeue", f"--signal=B:USR1@{site.signal_s}"]
    return [*lines, *site.options]


def _exports(request: LaunchRequest) -> str:
    variables = {JOB_VARIABLE: '"slurm $SLURM_JOB_ID"', ATTEMPT_VARIABLE: '"${SLURM_RESTART_COUNT:-0}"'}
    variables |= {name: shlex.quote(value) for name, value in request.settings.job.environment.items()}
    return "".join(f"export {name}={value}\n" for name, value in variables.items())


def _training(request: LaunchRequest) -> list[str]:
    site = request.settings.slurm
    sizes = shell(["--nodes", str(request.nodes), "--ranks", str(request.ranks_per_node)])
    variant = ' "${variant[@]}"' if request.variants else ""
    lines = [
        f"srun --kill-on-bad-exit=1 --ntasks={request.nodes} --ntasks-per-node=1"
        f" --cpus-per-task={site.cpus_per_rank * request.ranks_per_node}",
        f"{shell(agent_command(request, python=_python(request)))} {sizes}",
        '--address "$address" --port "$port" --id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
        f'-- {shell(verb_words(request))}{variant} --out "$out" --continue &',
    ]
    again = _AGAIN if site.requeue else _NOT_AGAIN
    run = _RUN.replace("__COMMAND__", " \\\n    ".join(lines)).replace("__REQUEUE__", again)
    return [_ADDRESS, f"out={_out(request)}\n", run]


def _out(request: LaunchRequest) -> str:
    if request.out is not None:
        folder = shlex.quote(request.out)
    else:
        folder = f'runs/{request.name}-"{"$SLURM_ARRAY_JOB_ID" if request.variants else "$SLURM_JOB_ID"}"'
    return f'{folder}/"$SLURM_ARRAY_TASK_ID"' if request.variants else folder


def _own_processes(request: LaunchRequest) -> list[str]:
    """In the shell of the batch script, not by srun, whose tasks look like ranks of a job."""
    out = ["--out", request.out] if request.out is not None else []
    variant = ' "${variant[@]}"' if request.variants else ""
    return [f"\nexec {shell([_python(request), '-m', 'weft', *verb_words(request), *out])}{variant}\n"]


def _python(request: LaunchRequest) -> str:
    return request.settings.job.python or sys.executable
