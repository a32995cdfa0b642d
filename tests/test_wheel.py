"""The wheel is complete: it runs from another directory, with the configurations and the backbone that it brings."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ssd_train import config

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An unpacked wheel, built in isolation from the project's files."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def run(installed, cwd, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_wheel_holds_all_yamls_and_data(installed):
    for inside, outside in ("conf", config.conf_dir()), ("data", config.data_dir()):
        packed = installed / "ssd_train" / inside
        expected, found = (
            {path.relative_to(folder): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            for folder in (outside, packed)
        )
        assert found == expected
    assert not (installed / "tests").exists()


def test_help_names_the_models(installed, tmp_path):
    done = run(installed, tmp_path, "-m", "ssd_train", "--help")
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in config.choices("model"))


def test_it_decodes_with_the_backbone_it_brings(installed, tmp_path):
    """Autoregressively, two prompts: no training is needed for that."""
    sizes = ["decode.prompts=2", "decode.timed_images=1", "decode.pictures=2", "threads=1"]
    done = run(installed, tmp_path, "-m", "ssd_train", "+model=tiny", "stages=[decode]", "decoder=[ar]", *sizes)
    assert done.returncode == 0, done.stderr
    where = run(installed, tmp_path, "-c", "import ssd_train; print(ssd_train.__file__)")
    assert where.stdout.strip() == str(installed / "ssd_train/__init__.py")
    contents = json.loads((tmp_path / "runs/tiny/decode/report.json").read_text())
    assert contents["model"] == "tiny"
    assert contents["grid"] == [16, 16]
    assert contents["decoders"]["ar"]["passes"] == 256
    assert (tmp_path / "runs/tiny/decode/images.png").stat().st_size > 1000
