"""The columns of an exported table with their types and meanings."""

COLUMNS = {
    "study": ("string", "the study that ran the trial"),
    "setting": ("string", "data set, backbone and partition"),
    "dataset": ("string", "the data set"),
    "partition": ("string", "the partition of the train rows over the clients"),
    "clients": ("int64", "number of clients"),
    "model": ("string", "the trained head"),
    "method": ("string", "the method, as `fedsweep methods` names it"),
    "label": ("string", "its name in tables, which distinguishes variants of a method"),
    "epsilon": ("double", "the claimed privacy budget"),
    "delta": ("double", "its delta"),
    "clip": ("double", "bound on a gradient (or, at user level, on a client's update)"),
    "release": ("string", "release model: local or secure-aggregation"),
    "adjacency": ("string", "what neighbouring data sets differ in"),
    "level": ("string", "privacy unit: record or user"),
    "precision": ("string", "of the matrix products in gradients: float32, tf32 or bf16"),
    "epsilon_local": ("double", "actual eps against an observer of every client's release"),
    "epsilon_secure": ("double", "actual eps against an observer of their sum only"),
    "configuration": ("string", "all hyperparameters except clip and rounds, as JSON with sorted keys"),
    "seed": ("int64", "seed of the initial weights and the noise"),
    "stages": ("string", "the stages the trial belongs to, joined by +"),
    "split": ("string", "evaluation rows: validation (held-out train rows) or test"),
    "state": ("string", "done, diverged or failed"),
    "rounds": ("int64", "number of rounds run"),
    "of_rounds": ("int64", "number of rounds its noise is calibrated for: more if successive halving stopped it"),
    "round": ("int64", "the round of this row's metrics"),
    "accuracy": ("double", "percent of the evaluated rows"),
    "loss": ("double", "mean loss on the evaluated rows"),
    "seconds_per_round": ("double", "the trial's share of its pack's time; depends on the machine"),
    "key": ("string", "hash of everything that can change the trial's result"),
}
HYPER = "hp_"
"""Prefix of the hyperparameter columns, which are numeric if all values are numbers and text otherwise."""
FILE = "trials.parquet"
