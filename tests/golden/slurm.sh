#!/usr/bin/env bash
# Run 0123abcd on 4 nodes with 8 ranks each, written by Diptych.
# It can be submitted again by hand, and then goes on from the newest checkpoint:
#   sbatch data/06_models/runs/0123abcd/slurm.sh

# What is asked of Slurm: train.launch in the parameters. After a lost node or a preemption the job
# is queued again and appends to its log; the signal comes so long before the time limit.
#SBATCH --job-name=diptych-0123abcd
#SBATCH --chdir="/projects/a folder"
#SBATCH --output=data/06_models/runs/0123abcd/logs/attempt-000/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --account=vlm
#SBATCH --partition=gpu
#SBATCH --time=04:00:00
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --qos=high
#SBATCH --exclusive
#SBATCH --mail-type=FAIL

# Exit code: 0 the run is finished, 75 it was stopped after a checkpoint, else it failed.
: "${SLURM_JOB_ID:?submit this file with sbatch}"

run=data/06_models/runs/0123abcd
logs=data/06_models/runs/0123abcd/logs/attempt-000
say() { echo "slurm.sh: $*"; }

# Modules and lines of your own.
set -e
trap 'say "failed with exit code $?: $BASH_COMMAND" >&2' ERR
command -v module >/dev/null || source /etc/profile
module load cuda/12.8
module load apptainer
export HF_HOME=/scratch/hf
trap - ERR
set +e

# Whether a person asked to stop, by a file that is empty or newer than Slurm's last warning.
asked() {
    [ -e "$run/stop" ] || return 1
    case $(<"$run/stop") in
        slurm:*) [ -e "$logs/warned" ] && [ "$run/stop" -nt "$logs/warned" ] ;;
        *) return 0 ;;
    esac
}
newest() { ls "$run/checkpoints" 2>/dev/null | grep '^step-' | tail -n 1; }
state() { scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p'; }

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
printf '{"state": "starting", "time_s": %s}
' "$(date +%s)" >"$run/status.partial"
mv "$run/status.partial" "$run/status.json"
before=$(newest)

# Nodes meet on the first of them, by its name, or by the address that Slurm has for it.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if ! getent hosts "$first" >/dev/null; then
    first=$(scontrol show node -o "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
fi
# A port of this job and this start of it, that nobody listens on.
port=$((20000 + (SLURM_JOB_ID + 1000 * ${SLURM_RESTART_COUNT:-0}) % 10000))
while (: <"/dev/tcp/$first/$port") 2>/dev/null; do port=$((port + 1)); done

requeue=yes
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

# One process on every node, which starts that node's ranks and ends with them.
srun --export=ALL --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=120 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    bash -c 'exec "$@" --node "$SLURM_NODEID"' node \
    apptainer exec --nv 'an image.sif' python3 -m diptych.launch.node \
    "$run" "$logs" --meet "$first:$port" &
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
        printf '{"state": "stopped", "time_s": %s, "step": 0}\n' "$(date +%s)" >"$run/status.json"
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
