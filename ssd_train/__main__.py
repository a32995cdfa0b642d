"""python -m ssd_train +model=<name>: checks everything, then runs ``cfg.stages`` in order."""

import ast
import logging
import os
import re
import sys
import warnings
from pathlib import Path

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
        print(overview())
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


HELP = """\
python -m ssd_train +model=<name> [setting=value ...]

  Trains drafting heads for an autoregressive image model, exports them, and compares decoders that use them. Pictures
  of your own prompts: python -m ssd_train.draw "two red squares"

Examples
  python -m ssd_train +model=tiny
  python -m ssd_train +model=tiny 'stages=[decode]' 'decoder=[ar,ssd_corrected]' 'decode.heads=${{shipped:tiny}}/heads'
  python -m ssd_train -m +model=lumina head.k_horizontal=3,5

Stages, stages=[cache,train,export,decode] unless named
{stages}

Models, +model=
{models}

Decoders, decoder=[...]
{decoders}

--cfg job prints every setting, --info what Hydra found, --hydra-help Hydra's own page."""


def overview() -> str:
    """What there is, a line each."""
    stages = {stage.name: Path(__file__).parent / "stages" / f"{stage.name}.py" for stage in config.Stage}
    rows = {"stages": {name: ast.get_docstring(ast.parse(path.read_text())) for name, path in stages.items()}}
    for group in "model", "decoder":
        yamls = {name: (config.conf_dir() / group / f"{name}.yaml").read_text() for name in config.choices(group)}
        rows[f"{group}s"] = {name: _comment(text) for name, text in yamls.items()}
    return HELP.format(**{kind: "\n".join(_line(*row) for row in found.items()) for kind, found in rows.items()})


def _comment(text: str) -> str:
    """That a yaml begins with."""
    return " ".join(line[2:] for line in text.split("_target_")[0].splitlines() if re.match("# (?!@)", line))


def _line(name: str, text: str) -> str:
    sentence = re.split(r"\. (?=[A-Z\d])|\.$", " ".join(text.split()))[0]
    return f"  {name:<22} {sentence if len(sentence) <= 95 else sentence[:92].rsplit(' ', 1)[0] + ' ...'}"


if __name__ == "__main__":
    if {"--help", "-h"}.intersection(sys.argv[1:]):
        print(overview())
        sys.exit()
    try:
        config.explain_typos(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"{error}")
    main()
