"""fedsweep from Python: run a study, look at its results as data frames, train one model.

    import fedsweep

    results = fedsweep.run_study("quickstart", results="results/quickstart")
    results.cells          # a pandas DataFrame: one line a cell
    model = fedsweep.train("features.npz", method="dp-fedgd", epsilon=1, hyperparameters={"learning_rate": 2})
    model.weights, model.account

Everything that the commands do, with the same words; what is wrong with an argument is a `UserError` of one sentence.
"""

from importlib.metadata import PackageNotFoundError, version

from fedsweep import plugins as plugins
from fedsweep.results import Results, load_results
from fedsweep.studies import plan_study, run_study
from fedsweep.training import Account, Model, SavedModel, load_model, train
from orchestrator.report.benchmark.lookup import Task
from orchestrator.study.settings import Study
from trainables.errors import UserError

try:
    __version__ = version("fedsweep")
except PackageNotFoundError:  # run from a folder that nobody has installed
    __version__ = "unknown"

__all__ = [
    "Account",
    "Model",
    "Results",
    "SavedModel",
    "Study",
    "Task",
    "UserError",
    "__version__",
    "load_model",
    "load_results",
    "plan_study",
    "run_study",
    "train",
]
