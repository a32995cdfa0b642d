"""A run's memory, disk and hours on paper, before anything is loaded: plan.json, and a table in plan.md."""

import logging

from ssd_train.backbones.sketches import sketch
from ssd_train.processes.files import write_atomically, write_json
from ssd_train.runs import plan
from ssd_train.runs.run import Run

log = logging.getLogger(__name__)


def check(run: Run) -> None:
    """Nothing can be known to be wrong that :func:`run` does not say at once."""


def run(run: Run) -> None:
    if run.world.rank > 0:
        return
    run.remove_strays()
    sizes = plan.Sizes.of(sketch(run.cfg.model))
    plan.require_reach(run.cfg, sizes.grid)
    contents = plan.plan(run.cfg, sizes, run.world.size)
    write_json(run.output / "plan.json", contents)
    table = plan.markdown(contents)
    write_atomically(run.output / "plan.md", f"{table}\n".encode())
    log.info("plan in %s\n%s", run.output / "plan.md", table)
