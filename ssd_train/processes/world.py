"""Which of how many processes this is: started by torchrun, by srun, or alone.

Processes share a stage's work through files (:mod:`ssd_train.processes.files`), meet when it is done, and exchange
messages only in training.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(days=30)
"""Of a process that waits for another: as long as the scheduler's, which ends them all if one fails."""


@dataclass(frozen=True)
class World:
    """``local`` counts the processes of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "World":
        """torchrun's variables, else those of an srun step. A batch script's own process is in no step: it is alone,
        however many tasks its allocation has. Raises ValueError for nodes with different numbers of processes."""
        if "LOCAL_WORLD_SIZE" in environment:
            names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
            return cls(*(int(environment[name]) for name in names))
        size = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
        if size == 1:
            return cls()
        per_node = environment["SLURM_STEP_TASKS_PER_NODE"]  # "4", "4(x2)", or "4,3" where nodes differ
        local_size = per_node.split("(")[0]
        if "," in per_node or size % int(local_size):
            raise ValueError(
                f"this srun step has {per_node} tasks on its nodes; expected the same number on each: use "
                "--ntasks-per-node"
            )
        return cls(int(environment["SLURM_PROCID"]), size, int(environment["SLURM_LOCALID"]), int(local_size))

    def meet(self, backend: str) -> None:
        """Waits for the other processes."""
        if self.size > 1:
            if not dist.is_initialized():
                self.export()
                dist.init_process_group(backend, timeout=PATIENCE)
            dist.barrier()

    def part(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def export(self) -> None:
        """Sets torchrun's variables for this process, so that what trains need not know how it was started."""
        names = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank}
        names |= {"LOCAL_WORLD_SIZE": self.local_size, "GROUP_RANK": self.rank // self.local_size}
        if "MASTER_ADDR" not in os.environ and self.size > 1:
            from lightning.fabric.plugins.environments import SLURMEnvironment  # seconds, for whoever runs alone

            address = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"])
            names |= {"MASTER_ADDR": address, "MASTER_PORT": SLURMEnvironment(auto_requeue=False).main_port}
        os.environ.update({name: str(value) for name, value in names.items()})


ALONE = World()
