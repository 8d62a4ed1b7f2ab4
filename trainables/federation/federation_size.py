"""How much of a cluster a federation takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FederationSize:
    """The processes of a federation and their resources. Only the kind of device can change a result."""

    hosts: int = 1
    cpus_per_host: float = 1.0
    gpus_per_host: float = 0.0
    memory_per_host: int = 0
    """Bytes that Ray reserves."""
    accelerator: str = ""
    """The GPU model, by Ray's name for it."""

    @property
    def device(self) -> str:
        return "cuda" if self.gpus_per_host > 0 else "cpu"

    @property
    def one_process(self) -> bool:
        """Whether server and host share a process: with one host on a GPU, so that all tensors stay on the device."""
        return self.gpus_per_host > 0 and self.hosts == 1

    @property
    def server_gpus(self) -> float:
        """The server shares its first host's GPU: a small part of that GPU is reserved for the server."""
        return round(self.gpus_per_host * 0.1, 4)

    @property
    def host_bundle(self) -> dict[str, float]:
        bundle = {
            "CPU": self.cpus_per_host,
            "GPU": self.gpus_per_host,
            "memory": self.memory_per_host,
            f"accelerator_type:{self.accelerator}": 0.001 if self.accelerator else 0.0,  # a node with such GPUs has 1
        }
        return {name: amount for name, amount in bundle.items() if amount}

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [self.host_bundle] * self.hosts
