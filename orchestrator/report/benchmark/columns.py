"""The columns of an exported table, with their types and what they mean."""

COLUMNS = {
    "study": ("string", "the study that ran the trial"),
    "setting": ("string", "data set, backbone and partition"),
    "dataset": ("string", "the data set"),
    "partition": ("string", "how the train rows were dealt out to the clients"),
    "clients": ("int64", "how many clients"),
    "model": ("string", "the head that was trained"),
    "method": ("string", "the method, as `fedsweep methods` names it"),
    "label": ("string", "what tables call it; tells variants of a method apart"),
    "epsilon": ("double", "the privacy budget that was claimed"),
    "delta": ("double", "its delta"),
    "clip": ("double", "bound on a gradient (or, at user level, on a client's update)"),
    "release": ("string", "who is not trusted: local or secure-aggregation"),
    "adjacency": ("string", "what neighbouring data sets differ in"),
    "level": ("string", "whose privacy: a record's or a user's"),
    "precision": ("string", "of the products that gradients were made of: float32, tf32 or bf16"),
    "epsilon_local": ("double", "what the noise buys against one who sees every client's release"),
    "epsilon_secure": ("double", "what it buys against one who sees only their sum"),
    "configuration": ("string", "all hyperparameters, as JSON with sorted keys"),
    "seed": ("int64", "of the initial weights and the noise"),
    "stages": ("string", "the stages the trial belongs to, with +"),
    "split": ("string", "what it is judged on: validation (train rows held out) or test"),
    "state": ("string", "done, diverged or failed"),
    "rounds": ("int64", "how many rounds it ran"),
    "of_rounds": ("int64", "how many it was calibrated for: more where successive halving ended it"),
    "round": ("int64", "after which round the metrics of this row were taken"),
    "accuracy": ("double", "percent of the judged rows"),
    "loss": ("double", "mean loss on the judged rows"),
    "seconds_per_round": ("double", "its share of its pack's time; depends on the machine"),
    "key": ("string", "the hash of everything that can change the trial's result"),
}
HYPER = "hp_"
"""What the columns of single hyperparameters begin with: numbers where all values are, else text."""
FILE = "trials.parquet"
