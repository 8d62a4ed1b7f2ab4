"""Undoes what plug-ins register."""

import contextlib
import sys

from orchestrator.search.strategies import STRATEGIES
from trainables import methods, models, plugins
from trainables.data import features, partition
from trainables.metrics import METRICS

REGISTRIES = (
    methods.METHODS,
    STRATEGIES,
    METRICS,
    models.HEADS,
    features.PLUGIN_SOURCES,
    partition.PLUGIN_PARTITIONS,
    plugins._loaded,
    plugins._requested,
)


@contextlib.contextmanager
def temporary_plugins():
    """Unload the plug-ins that were loaded in the block, and remove what they registered."""
    before = [dict(registry) for registry in REGISTRIES]
    yield
    added = [registry.keys() - known.keys() for registry, known in zip(REGISTRIES, before, strict=True)]
    for registry, names in zip(REGISTRIES, added, strict=True):
        for name in names:
            if registry is plugins._loaded:
                sys.modules.pop(name, None)
            del registry[name]
    plugins.code_hash.cache_clear()
