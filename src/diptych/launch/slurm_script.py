"""Write the batch script of a run on Slurm: a spec in, text that a person can read and submit out.

Knows sbatch's options and what the script does as the job's first process; starts nothing.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from diptych.core.errors import ConfigError
from diptych.core.records import RunSpec, SlurmSpec

_OWN_OPTIONS = {
    *("array", "chdir", "error", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
    *("output", "parsable", "requeue", "signal", "test-only", "wait", "wrap"),
}
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_END_TOGETHER_S = 120
"""So long after one node has ended the others are ended, unless fewer will do."""

_HEADER = """\
#!/usr/bin/env bash
# {title}, written by Diptych.
# It can be submitted again by hand, and then goes on from the newest checkpoint:
#   sbatch {path}

# What is asked of Slurm: train.launch in the parameters. After a lost node or a preemption the job
# is queued again and appends to its log; the signal comes so long before the time limit.
{directives}

# Exit code: 0 the run is finished, 75 it was stopped after a checkpoint, else it failed.
: "${SLURM_JOB_ID:?submit this file with sbatch}"

{place}
say() { echo "slurm.sh: $*"; }
"""

_BODY = """\

# Whether a person asked to stop, by a file that is empty or newer than Slurm's last warning.
asked() {
    [ -e "$run/stop" ] || return 1
    case $(<"$run/stop") in
        slurm:*) [ -e "$logs/warned" ] && [ "$run/stop" -nt "$logs/warned" ] ;;
        *) return 0 ;;
    esac
}
newest() { ls "$run/checkpoints" 2>/dev/null | grep '^step-' | tail -n 1; }
state() { scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* JobState=\\([A-Z_]*\\).*/\\1/p'; }

if [ -e "$run/run.json" ]; then
    say "the run is finished already"
    exit 0
fi
# What an earlier start of this job has left to stop itself is over; what a person wants is not.
if asked; then
    rm -f "$run/stop"
    say "there was a request to stop, so nothing is started; to go on, submit it again"
    exit 75
fi
rm -f "$run/stop" "$logs/warned"
# So is what its nodes and ranks have said of themselves.
rm -rf "$run/nodes"
printf '{"state": "starting", "time_s": %s}\n' "$(date +%s)" >"$run/status.partial"
mv "$run/status.partial" "$run/status.json"
before=$(newest)
"""

_MEET = """\

# Nodes meet on the first of them, by its name, or by the address that Slurm has for it.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if ! getent hosts "$first" >/dev/null; then
    first=$(scontrol show node -o "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
fi
"""

_FREE_PORT = """\
# A port of this job and this start of it, that nobody listens on.
port=$((20000 + (SLURM_JOB_ID + 1000 * ${SLURM_RESTART_COUNT:-0}) % 10000))
while (: <"/dev/tcp/$first/$port") 2>/dev/null; do port=$((port + 1)); done
"""

_WARN = """\

# Slurm warns of the time limit or of a preemption: the ranks see the file, save and stop.
warn() {
    say "Slurm warned at $(date +%T): the ranks save a checkpoint and stop"
    warned=yes
    asked || { echo "slurm: warned" >"$run/stop"; touch "$logs/warned"; }
}
# Slurm ends the job: its signal reaches the ranks too, and they save if they have the time.
end() {
    say "Slurm ends the job at $(date +%T): the ranks save if they have the time"
    warned=yes
    # At the time limit nobody else queues it again, and soon all is killed.
    [ "$(state)" != TIMEOUT ] || again
}
again() {
    [ "$requeue" = yes ] || return
    if [ "$(newest)" = "$before" ]; then
        say "no checkpoint was gained since the start, so the job is not queued again"
        return
    fi
    say "the job is queued again, to go on from $(newest)"
    trap 'exit 75' TERM
    scontrol requeue "$SLURM_JOB_ID" || return
    sleep 600 & # Slurm ends this process
    wait
}
warned=no
trap warn USR1
trap end TERM
"""

_WAIT = """\
step=$!
# A signal interrupts a wait.
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?

if [ -e "$run/run.json" ]; then
    say "the run is finished"
    exit 0
fi
if asked; then
    say "stopped on request (exit code $code)"
    # Before a rank has said anything of itself.
    if grep -qs '"state": "starting"' "$run/status.json"; then
        printf '{"state": "stopped", "time_s": %s, "step": 0}\\n' "$(date +%s)" >"$run/status.json"
    fi
    rm -f "$run/stop"
    exit "$code"
fi
# Stopped by a warning. Of a job that Slurm itself has ended, Slurm says what follows.
if [ "$warned" = yes ] && [ "$code" = 75 ] && [ "$(state)" = RUNNING ]; then
    rm -f "$run/stop"
    again
fi
exit "$code"
"""


@dataclass(frozen=True)
class Place:
    """Where a script lies, and whose it is.

    `path` and `output` (with sbatch's patterns) are relative to `project` or absolute. `lines` set
    the shell's variables `run` and `logs`.
    """

    path: Path
    output: str
    project: Path
    title: str
    job_name: str
    lines: tuple[str, ...]
    array: str | None = None


def place_of_run(run: Path, *, logs: Path, project: Path) -> Place:
    """Return the place of a script that runs one run."""
    return Place(
        path=run / "slurm.sh",
        output=f"{_escaped(logs)}/slurm-%j.log",
        project=project,
        title=f"Run {run.name}",
        job_name=job_name(run.name),
        lines=(f"run={shlex.quote(str(run))}", f"logs={shlex.quote(str(logs))}"),
    )


def place_of_array(
    folder: Path, *, runs: Path, num_runs: int, at_once: int | None, project: Path
) -> Place:
    """Return the place of a script whose task i runs the run that line i of a file names.

    Args:
        folder: of the script.
        runs: the file; each line has a run's folder, a tab, and the folder of its logs.
        num_runs: the number of its lines.
        at_once: how many of them run at the same time; None leaves that to Slurm.
        project: the project's folder.
    """
    limit = "" if at_once is None else f"%{at_once}"
    return Place(
        path=folder / "slurm.sh",
        output=f"{_escaped(folder)}/slurm-%A_%a.log",
        project=project,
        title=f"{num_runs} runs, a task of the job each",
        job_name=job_name(folder.name),
        lines=(
            f"# Task i runs what line i of {runs.name} names: a run's folder, and its logs'.",
            f"list={shlex.quote(str(runs))}",
            'IFS=$\'\\t\' read -r run logs < <(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$list")',
            'exec >>"$logs/slurm-$SLURM_JOB_ID.log" 2>&1',
        ),
        array=f"0-{num_runs - 1}{limit}",
    )


def job_name(run: str) -> str:
    """Return the name of a run's jobs."""
    return f"diptych-{run}"


def script(spec: RunSpec, *, place: Place) -> str:
    """Return the whole script.

    Raises:
        ConfigError: an option is none, or the launcher's own; or a value cannot stand in a script.
    """
    slurm = spec.placement.launch.slurm
    options = filter(None, (_directive(*option) for option in _options(spec, place=place)))
    header = _HEADER
    for name, text in {
        "title": f"{place.title} on {_described(spec)}",
        "path": shlex.quote(str(place.path)),
        "directives": "\n".join(f"#SBATCH {option}" for option in options),
        "place": "\n".join(place.lines),
    }.items():
        header = header.replace(f"{{{name}}}", text)
    port = _FREE_PORT if slurm.port is None else f"port={slurm.port}\n"
    requeue = f"\nrequeue={'yes' if slurm.requeue else 'no'}"
    parts = [header, _prepared(slurm), _BODY, _MEET, port, requeue, _WARN]
    return "".join([*parts, _step(spec, project=place.project), _WAIT])


def ranks_per_node(spec: RunSpec) -> int:
    """Return how many ranks each node has."""
    return spec.placement.layout.world_size // (spec.placement.launch.num_nodes or 1)


def _described(spec: RunSpec) -> str:
    nodes, ranks = spec.placement.launch.num_nodes or 1, ranks_per_node(spec)
    return f"{nodes} node{'s' * (nodes > 1)} with {ranks} rank{'s' * (ranks > 1)} each"


def _options(spec: RunSpec, *, place: Place) -> Iterator[tuple[str, str | int | bool | None]]:
    """Yield what is asked of sbatch; None and False are left out."""
    slurm, launch = spec.placement.launch.slurm, spec.placement.launch
    yield "job-name", place.job_name
    yield "chdir", str(place.project)
    yield "output", place.output
    yield "open-mode", "append"
    yield "array", place.array
    yield "account", slurm.account
    yield "partition", slurm.partition
    yield "constraint", slurm.constraint
    yield "time", slurm.time
    yield "nodes", launch.num_nodes or 1
    yield "ntasks-per-node", 1
    yield "gpus-per-node", _gpus(spec) or None
    yield "cpus-per-task", slurm.cpus_per_node or _cpus(spec)
    yield "mem", slurm.memory
    yield "no-kill", _is_elastic(spec)
    yield ("requeue" if slurm.requeue else "no-requeue"), True
    yield "signal", f"B:USR1@{slurm.warn_s}" if slurm.warn_s else None
    yield from checked_options(slurm.options).items()


def checked_options(options: Mapping[str, str | int | bool]) -> dict[str, str | int | bool]:
    """Return further options by sbatch's names.

    Raises:
        ConfigError: one is no option's name, or is the launcher's own.
    """
    named = {name.lstrip("-").replace("_", "-"): value for name, value in options.items()}
    for name in named:
        if not _OPTION.fullmatch(name):
            raise ConfigError(
                f"train.launch.slurm.options has '{name}', which is no option of sbatch",
                allowed="Long names without dashes in front, such as {qos: high, exclusive: true}",
            )
        if name in _OWN_OPTIONS:
            raise ConfigError(
                f"train.launch.slurm.options has '{name}', which the launcher itself sets",
                allowed=f"All options of sbatch but {', '.join(sorted(_OWN_OPTIONS))}",
                cure=f"Take {name} out; train.launch says how many nodes, requeue and warn_s",
            )
    return named


def _is_elastic(spec: RunSpec) -> bool:
    launch = spec.placement.launch
    return launch.min_nodes is not None and launch.min_nodes < (launch.num_nodes or 1)


def _gpus(spec: RunSpec) -> int:
    asked = spec.placement.launch.slurm.gpus_per_node
    on_gpus = spec.placement.layout.device != "cpu"
    return asked if asked is not None else ranks_per_node(spec) * on_gpus


def _cpus(spec: RunSpec) -> int:
    """Ask for the threads of a node's ranks, which compose has taken from the node's cores."""
    return spec.placement.threads_per_rank * ranks_per_node(spec)


def _directive(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return f"--{name}"
    text = str(value)
    if re.search(r'["\\\n]', text):
        raise ConfigError(
            f"{text!r} cannot stand in a batch script (--{name})",
            allowed="No quotation mark, backslash or line break",
            cure="Name another folder, or correct train.launch.slurm",
        )
    return f'--{name}="{text}"' if re.search(r"[\s#']", text) else f"--{name}={text}"


def _prepared(slurm: SlurmSpec) -> str:
    """Return the lines that load modules and a person's own, each of which must succeed."""
    modules = [f"module load {shlex.quote(module)}" for module in slurm.modules]
    if modules:
        modules.insert(0, "command -v module >/dev/null || source /etc/profile")
    lines = [*modules, *slurm.setup]
    if not lines:
        return ""
    failed = 'say "failed with exit code $?: $BASH_COMMAND" >&2'
    before = ["", "# Modules and lines of your own.", "set -e", f"trap '{failed}' ERR"]
    return "\n".join([*before, *lines, "trap - ERR", "set +e", ""])


def _step(spec: RunSpec, *, project: Path) -> str:
    slurm = spec.placement.launch.slurm
    wait_s = 0 if _is_elastic(spec) else _END_TOGETHER_S
    options = ["--export=ALL", "--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--wait={wait_s}"]
    options += ["--no-kill"] * _is_elastic(spec)
    container = shlex.split(slurm.container or "")
    python = slurm.python or ("python3" if container else sys.executable)
    command = shlex.join([*container, python, "-m", "diptych.launch.node"])
    lines = [
        "\n# One process on every node, which starts that node's ranks and ends with them.",
        *_python_path(project, is_foreign=bool(container or slurm.python)),
        f"srun {' '.join(options)} \\",
        "    ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\",
        '    bash -c \'exec "$@" --node "$SLURM_NODEID"\' node \\',
        f"    {command} \\",
        '    "$run" "$logs" --meet "$first:$port" &',
    ]
    return "\n".join(lines) + "\n"


def _python_path(project: Path, *, is_foreign: bool) -> list[str]:
    """Put the project's sources in front, unless another Python has its own packages."""
    source = Path(__file__).resolve().parents[2]
    if source.name.endswith("-packages") and is_foreign:
        return []
    if source == project / "src":
        return ['export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"']
    return [f"export PYTHONPATH={shlex.quote(str(source))}${{PYTHONPATH:+:$PYTHONPATH}}"]


def _escaped(path: Path) -> str:
    """Write a path for --output, where a percent sign begins a pattern."""
    return str(path).replace("%", "%%")
