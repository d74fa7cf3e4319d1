"""Run a spec on this machine: torch elastic starts the ranks, this process follows them.

In: a run spec and the data it names. Out: the `Run` of a finished run, or an error that says how
the ranks ended and what they printed. A run that was stopped or killed goes on from its newest
checkpoint when it is launched again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.core import provenance
from diptych.core.errors import RunError
from diptych.core.records import Run, RunSpec
from diptych.data.costs import load_costs
from diptych.data.schedule.assign import assign
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.manifest import load_manifest
from diptych.launch import process
from diptych.launch.changes import tell_changes
from diptych.launch.preflight import check_machine
from diptych.launch.progress import Progress, make_progress
from diptych.model.inspect import inspect
from diptych.monitor.run_folder import RunFolder, StepTail

_LOG = logging.getLogger(__name__)
_POLL_S = 0.1
_STOP_GRACE_S = 60.0
_KILL_GRACE_S = 5.0


def launch(run_spec: RunSpec, sample_costs: Path, shards: Path, runs: str) -> Run:
    """Train a run spec to its end.

    Args:
        run_spec: What to run and where.
        sample_costs: The folder of costs; its place is in the spec, it is named here as an input.
        shards: The folder of shards; likewise.
        runs: The folder that holds a folder per run.

    Raises:
        ConfigError, DataError: no schedule can be made of this data with these settings.
        LayoutError: this machine lacks what the layout needs.
        RunError: the ranks failed, or were stopped before the last step.
    """
    spec = run_spec.model_copy(update={"provenance": provenance.read()})
    folder = RunFolder(Path(runs) / spec.run_id)
    finished = _finished(folder, spec=spec)
    if finished is not None:
        return finished
    check_machine(
        spec.placement.layout,
        num_parameters=_num_parameters(spec),
        optimizer=spec.identity.optimizer.kind,
    )
    schedule_sha256 = _check_schedule(spec)
    changes = tell_changes(spec, folder=folder, schedule_sha256=schedule_sha256)
    log = folder.logs / f"attempt-{folder.count_attempts():03d}" / "launcher.log"
    with (
        _alone(folder),
        process.stop_signals() as stops,
        make_progress(spec) as progress,
        tempfile.TemporaryDirectory(prefix="diptych-") as meeting,
    ):
        for line in changes:
            progress.say(line)
        folder.stop.unlink(missing_ok=True)
        folder.write_spec(spec)
        folder.write_status("starting", num_steps=spec.identity.num_steps)
        child = process.start(
            _command(spec, folder=folder, logs=log.parent, meeting=Path(meeting) / "store"),
            env=_env(spec),
            log=log,
        )
        from_step = folder.newest_checkpoint()
        if from_step:
            progress.say(f"goes on from step {from_step}, the newest checkpoint")
        try:
            code = _follow(
                child, folder=folder, stops=stops, progress=progress, from_step=from_step
            )
        finally:
            process.end(child, grace_s=_KILL_GRACE_S)
    run = folder.read_run()
    if run is not None:
        return run
    raise _explain(code, folder=folder, stops=stops, logs=log.parent)


def _num_parameters(spec: RunSpec) -> int | None:
    """Count the model's parameters where a disk must hold them; torch takes seconds to import."""
    zero = spec.placement.layout.zero
    if "nvme" not in (zero.optimizer.to, zero.parameters.to):
        return None
    return inspect(spec.identity.model).num_parameters


def _check_schedule(spec: RunSpec) -> str:
    """Make the schedule once and deal out a batch, so that what cannot work starts no rank.

    Returns:
        The schedule's hash.
    """
    identity, placement = spec.identity, spec.placement
    costs = load_costs(
        Path(placement.sample_costs),
        manifest=load_manifest(Path(placement.manifest)),
        split="train",
        processor_sha256=identity.processor_sha256,
    )
    schedule = Schedule(costs, buckets=identity.buckets, spec=identity.schedule)
    rows = schedule.rows(0, 0)
    assign(
        rows,
        costs=schedule.weigh(rows),
        world_size=placement.layout.world_size,
        rank=0,
        micro_batch=placement.layout.micro_batch,
        group=schedule.group,
    )
    return schedule.sha256


@contextmanager
def _alone(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock, so that two launchers never write one run."""
    folder.path.mkdir(parents=True, exist_ok=True)
    with (folder.path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"Run {folder.path.name} is being trained by another process",
                cure=f"Wait for it, or stop it: touch {folder.stop}",
            ) from None
        yield


def _finished(folder: RunFolder, *, spec: RunSpec) -> Run | None:
    """Return a finished run if the same sources trained it; else move it aside."""
    run = folder.read_run()
    if run is None:
        return None
    if run.source_sha256 == spec.provenance.source_sha256:
        layout = folder.read_spec().placement.layout
        how = f"{layout.engine} on {layout.world_size} x {layout.device}"
        _LOG.info("run %s was finished with %s: nothing to train", run.run_id, how)
        return run
    number = 1
    while (aside := folder.path.with_name(f"{folder.path.name}.old-{number}")).exists():
        number += 1
    folder.path.rename(aside)
    _LOG.info("the training code has changed: training anew, the former run is in %s", aside)
    return None


def _command(spec: RunSpec, *, folder: RunFolder, logs: Path, meeting: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={spec.placement.layout.world_size}",
        # Through a file: as a server, torch's store would listen on every address.
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={meeting}",
        f"--rdzv-id={spec.run_id}",
        "--local-addr=127.0.0.1",
        f"--max-restarts={spec.placement.max_restarts}",
        "--monitor-interval=0.5",
        f"--log-dir={logs}",
        "--redirects=3",
        "--module",
        "diptych.worker",
        "train",
        str(folder.path),
    ]


def _env(spec: RunSpec) -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(spec.placement.threads_per_rank),
        "MKL_NUM_THREADS": str(spec.placement.threads_per_rank),
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        # Large blocks come in huge pages: touching a fresh 59 MB tensor took 8 ms instead of 38.
        "THP_MEM_ALLOC_ENABLE": "1",
        **_allocator(spec),
        **_loopback(),
        # A restarted generation must not dial the store of the one before it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _loopback() -> dict[str, str]:
    """Have the ranks of one machine talk over loopback, unless a person chose another interface."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    chosen = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: names.copy().pop() for name in chosen if names and name not in os.environ}


def _allocator(spec: RunSpec) -> dict[str, str]:
    """Hand the allocator's settings to torch, under its present name and its former one."""
    settings = spec.placement.layout.memory.allocator
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return dict.fromkeys(names, settings) if settings else {}


def _follow(
    child: subprocess.Popen[bytes],
    *,
    folder: RunFolder,
    stops: process.StopSignals,
    progress: Progress,
    from_step: int,
) -> int:
    """Show progress until the child ends; a stop signal lets the ranks save, a second kills."""
    tail = StepTail(folder.steps)
    deadline: float | None = None
    while True:
        code = child.poll()
        for record in tail.read():
            # A resumed log is cut, and what it holds up to there was shown before.
            if record.step > from_step:
                progress.show(record)
        if code is not None:
            return code
        if stops.count and deadline is None:
            progress.say(
                f"{stops.name}: the ranks save a checkpoint and stop; once more to kill them"
            )
            folder.stop.touch()
            deadline = time.monotonic() + _STOP_GRACE_S
        if deadline is not None and (stops.count > 1 or time.monotonic() > deadline):
            return -1
        time.sleep(_POLL_S)


def _explain(code: int, *, folder: RunFolder, stops: process.StopSignals, logs: Path) -> RunError:
    status = folder.read_status()
    place = f"step {status.get('step', 0)} of {status.get('num_steps', '?')}"
    if stops.count or status.get("state") == "stopped":
        saved = "saved" if status.get("state") == "stopped" else "killed before it could save"
        why = stops.name or "on request"
        return RunError(
            f"Run {folder.path.name} was stopped ({why}) and {saved} at {place}",
            cure="The same command goes on from its newest checkpoint",
        )
    folder.write_status("failed", step=status.get("step", 0), exit_code=code)
    return RunError(
        f"The ranks of run {folder.path.name} failed (exit code {code}) after {place}.\n"
        f"{_last_words(logs)}",
        cure=f"\nAll they printed is in {logs}; {_what_next(folder)}",
    )


def _last_words(logs: Path, *, num_lines: int = 12) -> str:
    """Say which rank failed first and how: its signal or exit code, and its traceback if any."""
    launcher = _read(logs / "launcher.log")
    cause = launcher.rpartition("Root Cause")[2]
    rank = re.search(r"rank\s*: (\d+)", cause)
    ended = re.search(r"exitcode\s*: (-?\d+).*?(?:\((SIG\w+)\))?$", cause, flags=re.MULTILINE)
    if rank is None or ended is None:
        return "\n".join(launcher.strip().splitlines()[-num_lines:])
    how = f"was killed by {ended[2]}" if ended[2] else f"ended with exit code {ended[1]}"
    newest = sorted(logs.glob(f"*/attempt_*/{rank[1]}/stderr.log"))[-1:]
    _, found, traceback = _read(*newest).rpartition("Traceback (most recent call last):")
    lines = traceback.strip().splitlines()[-num_lines:] if found else []
    return "\n".join([f"Rank {rank[1]} {how} first.", *lines])


def _read(*paths: Path) -> str:
    return "".join(path.read_text("utf-8", errors="replace") for path in paths if path.exists())


def _what_next(folder: RunFolder) -> str:
    if folder.newest_checkpoint():
        return "the same command goes on from the last checkpoint"
    return "there is no checkpoint yet, so the same command begins anew"
