"""Configurations as the command line composes them."""

from hydra import compose, initialize_config_dir

from ssd_train import config


def composed(*overrides):
    config.register()
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        return compose("config", ["output=unused", "device=cpu", *overrides])
