"""Several processes, kills and full disks: files that are there whole or not at all, ranks, signals."""
