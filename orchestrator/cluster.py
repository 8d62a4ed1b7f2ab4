"""Starting a local Ray, or joining one."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

# Ray reads these when it is imported: no usage report, no progress tables of its own, no metrics agent
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "1")

import ray

from trainables.errors import UserError

LOCAL_OBJECT_STORE = 1 << 30  # bytes; features are megabytes, weights kilobytes


@contextlib.contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[None]:
    """A Ray to run on: the one at `address` (`auto` or HOST:PORT), else a local one that ends with the block."""
    if ray.is_initialized():
        yield
        return
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=LOCAL_OBJECT_STORE,
                _node_ip_address="127.0.0.1",
            )
        else:
            _show_token()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"no Ray cluster answers at address = {address!r}: {str(error).rstrip('.')}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _show_token() -> None:
    """Ray guards its clusters with a token in the user's home, but shows it by itself only to the address `auto`."""
    with contextlib.suppress(ImportError):
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

        logging.getLogger(maybe_enable_token_auth_if_token_available.__module__).setLevel(logging.ERROR)
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def local_resources() -> list[dict[str, float]]:
    """What a Ray started here would have, as a list of one node."""
    import torch

    gpus = {"GPU": float(torch.cuda.device_count())} if torch.cuda.is_available() else {}
    return [{"CPU": float(os.cpu_count() or 1), **gpus}]
