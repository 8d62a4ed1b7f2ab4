"""fedsweep from Python: run a study, read its results as data frames, train one model.

    import fedsweep

    results = fedsweep.run_study("quickstart", results="results/quickstart")
    results.cells          # a pandas DataFrame with one row per cell
    model = fedsweep.train("features.npz", method="dp-fedgd", epsilon=1, hyperparameters={"learning_rate": 2})
    model.weights, model.account

The arguments of functions have the same names as the options of the commands. An invalid argument raises `UserError`
with one sentence that names the argument.

Stability: public; names in `__all__` change only with an entry in the changelog.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orchestrator.version import version
from trainables.errors import UserError

if TYPE_CHECKING:
    from fedsweep import plugins as plugins
    from fedsweep.results import Results, load_results
    from fedsweep.studies import plan_study, run_study
    from fedsweep.training import Account, Model, SavedModel, TrainingOptions, load_model, train
    from orchestrator.report.benchmark.lookup import Task
    from orchestrator.study.study import Study

__version__ = version()

__all__ = [
    "Account",
    "Model",
    "Results",
    "SavedModel",
    "Study",
    "Task",
    "TrainingOptions",
    "UserError",
    "__version__",
    "load_model",
    "load_results",
    "plan_study",
    "run_study",
    "train",
]

_MODULES = {
    "fedsweep.results": ("Results", "load_results"),
    "fedsweep.studies": ("plan_study", "run_study"),
    "fedsweep.training": ("Account", "Model", "SavedModel", "TrainingOptions", "load_model", "train"),
    "orchestrator.report.benchmark.lookup": ("Task",),
    "orchestrator.study.study": ("Study",),
}


def __getattr__(name: str) -> Any:
    """Modules are imported on first use: torch and pandas take seconds, and many commands need neither."""
    if name == "plugins":
        return import_module("fedsweep.plugins")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'fedsweep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "plugins"]
