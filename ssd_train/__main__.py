"""python -m ssd_train +model=<name>: checks everything, then runs ``cfg.stages`` in order."""

import logging
import os
import sys
import warnings

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssd_train import config

config.register()


@hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")
def main(cfg: config.Config) -> float | None:
    """Returns the metric that sweeps optimise, the mean validation acceptance rate, if this run trained heads."""
    if OmegaConf.is_missing(cfg, "model"):
        raise SystemExit(f"no model: add +model=<name>, one of {', '.join(config.choices('model'))}")
    from ssd_train.processes import signals

    signals.install()  # before torch is imported, which can take long
    from ssd_train.processes.world import World
    from ssd_train.runs.run import Run
    from ssd_train.runs.sweep import JobError
    from ssd_train.runs.tracking import finish
    from ssd_train.stages import STAGES

    noise = "does not have many", "exists and is not empty", "LeafSpec", "Cannot dispatch to fused", "The `srun`"
    for pattern in noise:
        warnings.filterwarnings("ignore", message=f".*{pattern}")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    in_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    if in_sweep:
        cfg.output = HydraConfig.get().runtime.output_dir
    world = World.of(os.environ)
    if world.size > 1:
        world.export()
    if world.rank > 0:
        logging.getLogger().setLevel(logging.WARNING)
    try:
        config.check(cfg)
        run = Run(cfg, world)
        stages = {stage.name: STAGES[stage.name] for stage in cfg.stages}
        for stage in stages.values():
            stage.check(run)
        results = {}
        for name, stage in stages.items():
            run.meet()
            results[name] = stage.run(run)
    except (ValueError, OSError, RuntimeError, HydraException, OmegaConfBaseException) as error:
        # Our own errors say what to do; a traceback would bury that. hydra.verbose=true shows it.
        if logging.getLogger().isEnabledFor(logging.DEBUG) or not str(error):
            raise
        raise (JobError if in_sweep else SystemExit)(f"{type(error).__name__}: {error}") from error
    finally:
        finish(failed=sys.exc_info()[0] is not None)
    return results.get("train")


if __name__ == "__main__":
    try:
        config.explain_typos(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"{error}")
    main()
