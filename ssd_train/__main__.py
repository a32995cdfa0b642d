"""python -m ssd_train +model=<name>: checks everything, then runs ``cfg.stages`` in order."""

import logging
import sys
import warnings

import hydra
from omegaconf import OmegaConf

from ssd_train import config

config.register()


@hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")
def main(cfg: config.Config) -> float | None:
    """Returns the metric that sweeps optimise, the mean validation acceptance rate, if this run trained heads."""
    if OmegaConf.is_missing(cfg, "model"):
        raise SystemExit(f"no model: add +model=<name>, one of {', '.join(config.choices('model'))}")
    from ssd_train.run import Run
    from ssd_train.stages import STAGES

    for pattern in ".*does not have many workers.*", ".*exists and is not empty.*", ".*LeafSpec.*":
        warnings.filterwarnings("ignore", message=pattern)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    try:
        config.check(cfg)
        run = Run(cfg)
        results = {stage.name: STAGES[stage.name](run) for stage in cfg.stages}
    except (ValueError, OSError, RuntimeError) as error:
        # Our own errors say what to do; a traceback would bury that. hydra.verbose=true shows it.
        if logging.getLogger().isEnabledFor(logging.DEBUG) or not str(error):
            raise
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    return results.get("train")


if __name__ == "__main__":
    sys.exit(main() and 0)
