"""The batch script as a text, and by running it with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import LaunchSpec, Layout
from diptych.launch.slurm_script import place_of_array, place_of_run, script
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm.sh"
H100 = {
    "account": "vlm",
    "partition": "gpu",
    "time": "04:00:00",
    "memory": "0",
    "warn_s": 300,
    "modules": ("cuda/12.8", "apptainer"),
    "container": "apptainer exec --nv 'an image.sif'",
    "setup": ("export HF_HOME=/scratch/hf",),
    "options": {"qos": "high", "exclusive": True, "contiguous": False, "mail_type": "FAIL"},
}


@pytest.fixture
def make(corpus):
    def spec(*, device="cuda", ranks=32, nodes=4, min_nodes=None, **slurm):
        layout = Layout(shard=ranks, engine="fsdp2", device=device)
        made = make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=TINY_SCHEDULE)
        launch = LaunchSpec(kind="slurm", num_nodes=nodes, min_nodes=min_nodes, slurm=slurm)
        placement = made.placement.model_copy(update={"launch": launch, "threads_per_rank": 12})
        return made.model_copy(update={"placement": placement})

    return spec


def _text(spec, *, run="data/06_models/runs/0123abcd", project="/projects/a folder"):
    run = Path(run)
    return script(
        spec, place=place_of_run(run, logs=run / "logs/attempt-000", project=Path(project))
    )


def _asked(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def test_the_script_is_the_golden_one(make, monkeypatch, request):
    monkeypatch.setattr("diptych.launch.slurm_script._python_path", lambda *_, **__: [])
    text = _text(make(**H100))
    if request.config.getoption("--write-tables"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_what_is_asked_of_slurm(make):
    assert _asked(_text(make(**H100))) == [
        "--job-name=diptych-0123abcd",
        '--chdir="/projects/a folder"',
        "--output=data/06_models/runs/0123abcd/logs/attempt-000/slurm-%j.log",
        "--open-mode=append",
        "--account=vlm",
        "--partition=gpu",
        "--time=04:00:00",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=96",
        "--mem=0",
        "--requeue",
        "--signal=B:USR1@300",
        "--qos=high",
        "--exclusive",
        "--mail-type=FAIL",
    ]


def test_what_is_not_set_is_not_asked_for(make):
    asked = _asked(_text(make(device="cpu", warn_s=0, requeue=False)))
    assert not any(each.startswith(("--gpus", "--signal", "--time", "--mem")) for each in asked)
    assert "--no-requeue" in asked


def test_fewer_nodes_than_asked_for_keep_the_job(make):
    text = _text(make(min_nodes=2))
    assert "--no-kill" in _asked(text)
    assert "--wait=0 --no-kill" in text
    assert "--no-kill" not in _text(make(min_nodes=4))


def test_a_percent_sign_of_a_folder_is_no_pattern(make):
    text = _text(make(), run="runs/50%j/0123abcd")
    assert "--output=runs/50%%j/0123abcd/logs/attempt-000/slurm-%j.log" in _asked(text)


def test_no_value_of_the_environment_is_in_the_script(make, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-0f9e8d7c")
    assert "planted" not in _text(make(**H100))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 3}, "'nodes', which the launcher itself sets"),
        ({"--no_requeue": True}, "'no-requeue', which the launcher itself sets"),
        ({"x; rm -rf": 1}, "no option of sbatch"),
        ({"comment": 'a"b'}, "cannot stand in a batch script"),
        ({"comment": "a\n#SBATCH --uid=0"}, "cannot stand in a batch script"),
    ],
)
def test_an_option_that_cannot_be_is_refused(make, options, words):
    with pytest.raises(ConfigError, match=words):
        _text(make(options=options))


def test_an_array_has_a_task_for_each_run(make):
    folder = Path("data/06_models/sweeps/9f")
    place = place_of_array(
        folder, runs=folder / "runs.tsv", num_runs=6, at_once=2, project=Path("/p")
    )
    text = script(make(), place=place)
    assert "--array=0-5%2" in _asked(text)
    assert "--output=data/06_models/sweeps/9f/slurm-%A_%a.log" in _asked(text)


# What the script sees of Slurm here. `srun` stands for the ranks: it does what RANKS says.
STANDINS = {
    "scontrol": """
case "$*" in
    "show hostnames"*) echo localhost ;;
    "show job"*) echo "JobId=7 JobState=${STATE:-RUNNING} Reason=None" ;;
    requeue*) echo "$*" >>"$HERE/requeued"; kill -TERM $PPID ;;
esac
""",
    "srun": 'printf "%s\\n" "$@" >"$HERE/srun"; eval "$RANKS"',
}
SAVE = 'mkdir -p "$HERE/run/checkpoints/step-00000005"'
WARN = "kill -USR1 $PPID; while [ ! -e $HERE/run/stop ]; do sleep 0.02; done;"


class Played:
    """The script of a run, played with stand-ins."""

    def __init__(self, folder, spec):
        self.folder = folder
        self.run = folder / "run"
        self.logs = self.run / "logs"
        self.logs.mkdir(parents=True)
        place = place_of_run(self.run, logs=self.logs, project=folder)
        place.path.write_text(script(spec, place=place))
        for name, text in STANDINS.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}")
            (folder / name).chmod(0o755)

    def __call__(self, ranks, **env):
        done = subprocess.run(
            ["bash", str(self.run / "slurm.sh")],
            env={
                **os.environ,
                **env,
                "PATH": f"{self.folder}:{os.environ['PATH']}",
                "HERE": str(self.folder),
                "RANKS": ranks,
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "localhost",
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.said = done.stdout + done.stderr
        return done.returncode

    @property
    def is_requeued(self):
        return (self.folder / "requeued").exists()


@pytest.fixture
def play(make, tmp_path):
    return lambda **slurm: Played(tmp_path, make(device="cpu", ranks=2, nodes=2, **slurm))


def test_a_finished_run_ends_with_0(play):
    job = play()
    assert job("touch $HERE/run/run.json") == 0
    command = (job.folder / "srun").read_text().split("\n")
    assert command[-8:-1] == [
        *(sys.executable, "-m", "diptych.launch.node"),
        *(str(job.run), str(job.logs), "--meet", "localhost:20007"),
    ]


def test_a_failure_is_not_queued_again(play):
    job = play()
    assert job(f"{SAVE}; exit 1") == 1
    assert not job.is_requeued


def test_a_warning_that_led_to_a_checkpoint_queues_it_again(play):
    job = play()
    assert job(f"{WARN} {SAVE}; exit 75") == 75
    assert job.is_requeued
    assert not (job.run / "stop").exists()


def test_a_warning_without_a_new_checkpoint_does_not(play):
    job = play()
    (job.run / "checkpoints/step-00000005").mkdir(parents=True)
    assert job(f"{WARN} exit 75") == 75
    assert not job.is_requeued
    assert "no checkpoint was gained" in job.said


def test_without_requeue_a_warning_ends_it(play):
    job = play(requeue=False)
    assert job(f"{WARN} {SAVE}; exit 75") == 75
    assert not job.is_requeued


@pytest.mark.parametrize(
    "ranks",
    [
        "touch $HERE/run/stop;",
        f"touch $HERE/run/stop; {WARN}",  # asked, then warned
        f"{WARN} sleep 1.1; touch $HERE/run/stop;",  # warned, then asked
    ],
)
def test_what_a_person_stopped_is_not_queued_again(play, ranks):
    job = play()
    (job.run / "status.json").write_text('{"state": "starting", "time_s": 1.0}\n')
    assert job(f"{ranks} sleep 0.1; {SAVE}; exit 75") == 75
    assert not job.is_requeued
    assert "stopped on request" in job.said
    assert json.loads((job.run / "status.json").read_text())["state"] == "stopped"
    assert not (job.run / "stop").exists()


def test_a_request_that_came_while_it_waited_is_heeded(play):
    job = play()
    (job.run / "stop").touch()
    assert job("touch $HERE/began") == 75
    assert not (job.folder / "began").exists()
    assert not (job.run / "stop").exists()


def test_what_slurm_asked_of_an_earlier_start_is_over(play):
    job = play()
    (job.run / "stop").write_text("slurm: warned\n")
    (job.logs / "warned").touch()
    assert job("[ ! -e $HERE/run/stop ] && touch $HERE/run/run.json") == 0


def test_a_cancelled_job_does_not_queue_itself_again(play):
    job = play()
    ended = f"kill -TERM $PPID; sleep 0.2; {SAVE}; exit 75"
    assert job(ended, STATE="CANCELLED") == 75
    assert not job.is_requeued


def test_at_the_time_limit_it_is_queued_again_if_it_gained_something(play):
    job = play()
    assert job(f"{SAVE}; kill -TERM $PPID; sleep 0.5; exit 137", STATE="TIMEOUT") != 0
    assert job.is_requeued


def test_a_line_of_ones_own_that_fails_starts_nothing(play):
    job = play(setup=("true", "no-such-command now"))
    assert job("touch $HERE/began") == 127
    assert "failed with exit code 127: no-such-command now" in job.said
    assert not (job.folder / "began").exists()
