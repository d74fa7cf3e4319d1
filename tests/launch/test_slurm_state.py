"""What Slurm says of a job, read and put into words; the lines are of Slurm 22.05."""

from __future__ import annotations

import pytest

from diptych.core.errors import LayoutError
from diptych.core.records import LaunchSpec
from diptych.launch import slurm, slurm_client
from diptych.launch.slurm_state import (
    JobState,
    accounted,
    cause,
    changes,
    parse,
    script_words,
    seconds,
    state_of,
)
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec

RUNNING = (
    "JobId=12 JobName=diptych-0123abcd UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A "
    "Priority=4294901757 Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:41 "
    "TimeLimit=04:00:00 TimeMin=N/A StartTime=2026-11-30T21:12:30 Partition=main "
    "AllocNode:Sid=vm:1 ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-4] BatchHost=n1 "
    "NumNodes=4 NumCPUs=4 NumTasks=4 WorkDir=/projects/a folder Comment=JobState=FAILED "
    "StdOut=/projects/a folder/x.log"
)


def test_a_job_s_record_is_read():
    (record,) = parse(RUNNING + "\n")
    assert record["WorkDir"] == "/projects/a folder"
    assert state_of(record) == JobState(
        name="RUNNING", nodes="n[1-4]", num_nodes=4, num_restarts=2, time_limit="04:00:00"
    )


@pytest.mark.parametrize(
    ("record", "has_ended", "code"),
    [
        ({"JobState": "COMPLETED", "ExitCode": "0:0"}, True, 0),
        ({"JobState": "FAILED", "ExitCode": "75:0"}, True, 75),
        ({"JobState": "FAILED", "ExitCode": "0:9"}, True, 137),
        ({"JobState": "CANCELLED", "ExitCode": "0:0"}, True, 1),
        ({"JobState": "TIMEOUT", "ExitCode": "0:0"}, True, 1),
        ({"JobState": "PENDING", "ExitCode": "75:0"}, False, 75),
        ({"JobState": "REQUEUED", "ExitCode": "0:0"}, False, 1),
        ({"JobState": "COMPLETING", "ExitCode": "0:0"}, False, 1),
    ],
)
def test_only_what_is_final_is_an_end(record, has_ended, code):
    state = state_of(record)
    assert (state.has_ended, state.code) == (has_ended, code)


def test_a_job_s_way_is_told_once():
    way = [
        JobState("PENDING", reason="Priority"),
        JobState("PENDING", reason="Priority"),
        JobState("PENDING", reason="AssocGrpGRES"),
        JobState("RUNNING", nodes="n[1-2]", num_nodes=2),
        JobState("COMPLETING", nodes="n[1-2]", num_nodes=2),
        JobState("PENDING", reason="BeginTime", num_restarts=1),
        JobState("PENDING", reason="launch_failed_requeued_held", num_restarts=1),
        JobState("RUNNING", nodes="n3", num_nodes=1, num_restarts=2),
    ]
    said = [
        line
        for before, now in zip([None, *way], way, strict=False)
        for line in changes(before, now, job_id="12")
    ]
    assert said == [
        "job 12 is pending: Priority (others come first)",
        "job 12 is pending: AssocGrpGRES",
        "job 12 is running on n[1-2] (2 nodes)",
        "job 12 was queued again (restart 1)",
        "job 12 is pending: BeginTime (it was just queued again, or is to begin later)",
        "job 12 is pending: it could not be started; `scontrol release 12` lets it start",
        "job 12 was queued again (restart 2)",
        "job 12 is running on n3",
    ]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (JobState("TIMEOUT", time_limit="01:00:00"), "reached its time limit (01:00:00)"),
        (JobState("OUT_OF_MEMORY", nodes="n7"), "ran out of memory on n7"),
        (JobState("NODE_FAIL", nodes="n7"), "lost a node on n7"),
        (JobState("CANCELLED"), "was cancelled by ada"),
        (JobState("PREEMPTED"), "was preempted"),
        (JobState("DEADLINE"), "before its deadline"),
        (JobState("FAILED", exit_code=75), "was stopped and not queued again"),
        (JobState("FAILED", exit_code=3), "ended with exit code 3"),
        (JobState("FAILED", signal=9), "ended with signal 9"),
        (JobState("COMPLETED"), "does not say that the run is finished"),
    ],
)
def test_the_cause_of_an_end_is_told(state, words):
    assert words in cause(state, job_id="12", by="ada")


def test_accounts_say_who_cancelled():
    state, by = accounted("CANCELLED by 1000|0:15|n[1-2]|04:00:00\n")
    assert (state.name, state.signal, by) == ("CANCELLED", 15, "1000")


# From the page of sbatch, --time: its six forms.
@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("04:00:00", 14400),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:05", 217805),
        ("UNLIMITED", None),
    ],
)
def test_time_limits_are_read(limit, found):
    assert seconds(limit) == found


def test_errors_are_picked_from_a_long_log(tmp_path):
    log = tmp_path / "slurm-12.log"
    lines = ["module: loaded", "node n2: RunError: no such folder", "2026 diptych.node waits", ""]
    log.write_text("\n".join(lines))
    assert script_words(log, all_lines=False) == ["node n2: RunError: no such folder"]
    assert script_words(log, all_lines=True) == lines[:3]
    assert script_words(tmp_path / "none", all_lines=False) == []
    assert "do its nodes see that folder?" in script_words(tmp_path / "none", all_lines=True)[0]


def _spec(corpus, *, num_nodes=2, **settings):
    from diptych.core.records import Layout

    layout = Layout(dp=num_nodes)
    made = make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=TINY_SCHEDULE)
    launch = LaunchSpec(kind="slurm", num_nodes=num_nodes, slurm=settings)
    return made.model_copy(
        update={"placement": made.placement.model_copy(update={"launch": launch})}
    )


SMALL = {
    "PartitionName": "small",
    "TotalNodes": "2",
    "MaxNodes": "UNLIMITED",
    "MaxTime": "01:00:00",
}
LARGE = {"PartitionName": "large", "TotalNodes": "64", "MaxNodes": "8", "MaxTime": "UNLIMITED"}


@pytest.mark.parametrize(
    ("num_nodes", "settings", "partitions", "words"),
    [
        (3, {}, [SMALL], "small has 2 nodes"),
        (9, {}, [LARGE], "large allows a job 8 nodes"),
        (9, {}, [SMALL, LARGE], "small has 2 nodes.*large allows a job 8 nodes"),
        (2, {"time": "01:00:01"}, [SMALL], "small allows 01:00:00"),
        (2, {}, [{**SMALL, "State": "DOWN"}], "small is DOWN"),
        (2, {"time": "00:03:00"}, [SMALL], "no time is left to train"),
        (2, {"time": "1h"}, [SMALL], "time is '1h'"),
    ],
)
def test_more_than_a_partition_has_is_refused(corpus, num_nodes, settings, partitions, words):
    with pytest.raises(LayoutError, match=words):
        slurm.check_limits(_spec(corpus, num_nodes=num_nodes, **settings), partitions=partitions)


@pytest.mark.parametrize(
    ("num_nodes", "settings"),
    [(2, {}), (2, {"time": "01:00:00"}), (2, {"time": "00:03:00", "warn_s": 0})],
)
def test_what_a_partition_has_is_not_refused(corpus, num_nodes, settings):
    slurm.check_limits(_spec(corpus, num_nodes=num_nodes, **settings), partitions=[SMALL])
    slurm.check_limits(_spec(corpus, num_nodes=8, **settings), partitions=[SMALL, LARGE])


def test_a_job_is_submitted_without_another_job_s_variables():
    present = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_MEM_PER_NODE": "100",
        "SLURMD_NODENAME": "login1",
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_PARTITION": "debug",
        "SBATCH_SIGNAL": "9",
    }
    found = slurm_client.environment(present, set_here={"account": None, "partition": "gpu"})
    assert found == {k: present[k] for k in ("PATH", "SLURM_CONF", "SBATCH_ACCOUNT")}


def test_without_slurm_s_commands_it_is_refused(monkeypatch):
    from diptych.core.errors import RunError

    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match="sbatch, scontrol, squeue, scancel cannot be found"):
        slurm_client.need_slurm()
