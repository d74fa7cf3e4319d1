"""Start a run's ranks only to look around: a run spec in, what they found out.

They are started as for training, in a folder `preflight` of the run's own, which they have to
themselves.
"""

from __future__ import annotations

import json
import shutil
import time

from diptych.core.errors import DiptychError
from diptych.core.records import Check, Preflight, RunSpec
from diptych.core.units import format_bytes
from diptych.launch import local, process
from diptych.launch.checks import attempt, check_run, keep
from diptych.launch.corpus import Depth
from diptych.launch.elastic import ANSWER
from diptych.launch.ready import alone, check_schedule
from diptych.launch.words import last_words
from diptych.monitor.run_folder import RunFolder

_POLL_S = 0.1
_LIMIT_S = 600.0


def rehearse(
    spec: RunSpec,
    *,
    folder: RunFolder,
    depth: Depth,
    with_ranks: bool,
    link_bytes_per_s: float | None = None,
) -> Preflight:
    """Look at everything that a run would meet, and keep what was found in its folder.

    Args:
        spec: what would run.
        folder: its folder, which need not be there yet.
        depth: how closely data is looked at.
        with_ranks: whether ranks are started to look, too.
        link_bytes_per_s: what `plan.cluster` says of the links between ranks.
    """
    preflight = check_run(spec, folder=folder, depth=depth)
    mode = spec.identity.schedule.mode
    schedule = attempt("schedule", lambda: check_schedule(spec), found=f"{mode}, can be dealt out")
    checks = [*preflight.checks, schedule]
    if with_ranks and not any(check.status == "fail" for check in checks):
        checks += check_on_ranks(spec, folder=folder, link_bytes_per_s=link_bytes_per_s)
    elif with_ranks:
        found = "not started, for what failed comes first"
        checks.append(Check(name="ranks", status="skip", found=found, where="ranks"))
    return keep(preflight.model_copy(update={"checks": tuple(checks)}), folder=folder)


def check_on_ranks(
    spec: RunSpec, *, folder: RunFolder, link_bytes_per_s: float | None
) -> list[Check]:
    """Start the ranks to look around, and return what they found."""
    kind = spec.placement.launch.kind
    if kind != "local":
        found = f"with {kind} they compare code, packages, clocks and folder as training begins"
        return [Check(name="ranks", status="skip", found=found, where="ranks")]
    place = RunFolder(folder.path / "preflight")
    try:
        with alone(folder), process.stop_signals() as stops:
            shutil.rmtree(place.path, ignore_errors=True)
            place.logs.mkdir(parents=True)
            place.write_spec(spec)
            job = local.start(spec, folder=place, logs=place.logs, mode="preflight")
            try:
                code = _wait(job, stops=stops)
            finally:
                job.end()
    except DiptychError as error:
        return [Check(name="ranks", status="warn", found=error.found, cure=error.cure)]
    answer = place.logs / ANSWER
    if code != 0 or not answer.is_file():
        why = "were stopped" if stops.count else f"ended with exit code {code}"
        return [
            Check(
                name="ranks",
                status="fail",
                found=f"{why}. {last_words(place.logs, num_lines=4)}",
                cure=f"All they printed is in {place.logs}",
                where="ranks",
            )
        ]
    told = json.loads(answer.read_text("utf-8"))
    checks = [Check.model_validate(each) for each in told["checks"]]
    return [*checks, judge_link(told["bytes_per_s"], expected=link_bytes_per_s)]


def judge_link(bytes_per_s: float | None, *, expected: float | None) -> Check:
    """Hold the all-reduce's rate against the link's."""
    if bytes_per_s is None:
        return Check(name="all-reduce", status="skip", found="one rank", where="ranks")
    told = f"{format_bytes(bytes_per_s)}/s over each link"
    if expected is None:
        return Check(name="all-reduce", status="pass", found=told, where="ranks")
    told = f"{told}, of {format_bytes(expected)}/s that plan.cluster says"
    if bytes_per_s < expected / 2:
        return Check(
            name="all-reduce",
            status="warn",
            found=told,
            cure="See which way NCCL takes (train.launch.network.debug: info), or correct "
            "plan.cluster.link_bytes_per_s",
            where="ranks",
        )
    return Check(name="all-reduce", status="pass", found=told, where="ranks")


def _wait(job: local.LocalJob, *, stops: process.StopSignals) -> int | None:
    deadline = time.monotonic() + _LIMIT_S
    while (code := job.poll()) is None:
        if stops.count or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return code
