"""The batch scripts: well-formed, and with stand-ins for SLURM's commands they call what they should."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[1] / "slurm"
SCRIPTS = sorted(path.name for path in SLURM.iterdir())
JOBS = {"cache.sbatch": "[cache]", "train.sbatch": "[cache,train,export]", "decode.sbatch": "[decode]"}

RECORDER = r"""#!/usr/bin/env python3
# Notes how it was called, in the order of the calls; exits and prints as it is told.
import json, os, sys
name = os.path.basename(sys.argv[0])
kept = {key: os.environ.get(key) for key in ("SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS")}
with open(os.environ["CALLS"], "a+") as calls:
    calls.write(json.dumps([name, *sys.argv[1:]]) + "\n")
    calls.seek(0)
    number = sum(json.loads(line)[0] == name for line in calls)
if name == "sbatch":
    print(f"{100 + number};cluster")
with open(os.environ["CALLS"] + ".environment", "w") as file:
    json.dump(kept, file)
sys.exit(int(os.environ.get(f"EXIT_{name}", 0)))
"""


@pytest.fixture
def call(tmp_path):
    """(script, its arguments, environment) -> (exit status, what was called, stdout and stderr), in a folder with
    slurm/, a .venv whose activation puts the stand-ins first, and nothing else."""
    (tmp_path / "slurm").symlink_to(SLURM)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "activate").write_text(f"PATH={binaries}:$PATH\n")
    for name in "srun", "scontrol", "sbatch", "python":
        (binaries / name).write_text(RECORDER)
        (binaries / name).chmod(0o755)

    def run(script, *arguments, model="tiny", **environment):
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "CALLS": str(calls)}
        if model:
            environment["MODEL"] = model
        done = subprocess.run(
            ["bash", f"slurm/{script}", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        made = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
        return done.returncode, made, done.stdout + done.stderr

    return run


def directives(script):
    """{option: value} of its #SBATCH lines."""
    lines = [line for line in (SLURM / script).read_text().splitlines() if line.startswith("#SBATCH ")]
    return dict((line.removeprefix("#SBATCH --") + "=").split("=")[:2] for line in lines)


def test_all_scripts_are_looked_at():
    assert set(SCRIPTS) == {*JOBS, "srun.sh", "pipeline.sh", "sweep.sh"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_executable_bash_without_findings(script):
    path = SLURM / script
    assert path.stat().st_mode & stat.S_IXUSR
    assert "# Change:" in path.read_text()
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=places)
    assert shellcheck, "shellcheck is missing; install the project's test extra"
    done = subprocess.run([shellcheck, path], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("script", JOBS)
def test_a_job_is_told_in_time_and_may_be_requeued(script):
    """A task a GPU; the signal goes to the tasks, not (B:) to the batch shell; logs of later attempts are appended."""
    asked = directives(script)
    assert asked["signal"] == "USR1@180"
    assert "requeue" in asked
    assert asked["open-mode"] == "append"
    assert asked["gres"] == f"gpu:{asked['ntasks-per-node']}"


@pytest.mark.parametrize("script, stages", JOBS.items())
def test_a_job_runs_its_stages_in_every_task(call, script, stages, tmp_path):
    status, calls, output = call(script, "a=1", "b='x y'", SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="3")
    assert (status, output) == (0, "")
    command = ["python", "-m", "ssd_train", "+model=tiny", f"stages={stages}", "a=1", "b='x y'"]
    assert calls == [["srun", "--kill-on-bad-exit=1", *command]]
    environment = json.loads((tmp_path / "calls.environment").read_text())
    assert environment == {"SRUN_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize("script", JOBS)
def test_only_a_job_that_a_signal_ended_is_requeued(call, script):
    for status in 1, 75, 143:
        exited, calls, _ = call(script, SLURM_JOB_ID="7", EXIT_srun=str(status))
        assert exited == status
        assert calls[1:] == ([["scontrol", "requeue", "7"]] if status == 75 else [])


@pytest.mark.parametrize("script", [*JOBS, "pipeline.sh", "sweep.sh"])
def test_without_a_model_nothing_is_called(call, script):
    status, calls, output = call(script, model=None, SLURM_JOB_ID="7")
    assert status != 0
    assert calls == []
    assert "set MODEL to a yaml of conf/model" in output


def test_the_pipeline_chains_its_jobs(call):
    """Each waits for the one before it; all get the same settings."""
    status, calls, output = call("pipeline.sh", "seed=3", ARRAY="0-1")
    assert (status, output) == (0, "cache 101, train 102, decode 103\n")
    after = ["sbatch", "--parsable", "--kill-on-invalid-dep=yes"]
    assert calls == [
        ["sbatch", "--parsable", "--array=0-1", "slurm/cache.sbatch", "seed=3"],
        [*after, "--dependency=afterok:101", "slurm/train.sbatch", "seed=3"],
        [*after, "--dependency=afterok:102", "slurm/decode.sbatch", "seed=3"],
    ]


def test_a_refused_job_ends_the_pipeline(call):
    status, calls, _ = call("pipeline.sh", EXIT_sbatch="1")
    assert status == 1
    assert len(calls) == 1


def test_the_sweep_asks_the_launcher_for_jobs(call):
    """Settings of the launcher that it has, and the user's last, so that they win."""
    status, calls, _ = call("sweep.sh", "head.lr=1e-4,3e-4", "hydra.launcher.gpus_per_node=null")
    assert status == 0
    (command,) = calls
    assert command[:5] == ["python", "-m", "ssd_train", "--multirun", "+model=tiny"]
    assert "hydra/launcher=submitit_slurm" in command
    assert command[-2:] == ["head.lr=1e-4,3e-4", "hydra.launcher.gpus_per_node=null"]
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

    asked = [part.split("=")[0] for part in command if part.startswith("hydra.launcher.")]
    assert {name.removeprefix("hydra.launcher.") for name in asked} <= set(SlurmQueueConf.__dataclass_fields__)
