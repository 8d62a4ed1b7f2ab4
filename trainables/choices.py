"""Literal types of settings that allow a few fixed values. Imports nothing slow: the command line reads this module."""

from typing import Literal

Release = Literal["local", "secure-aggregation"]
RELEASES: tuple[Release, ...] = ("local", "secure-aggregation")
Adjacency = Literal["replace-one", "zero-out"]
ADJACENCIES: tuple[Adjacency, ...] = ("replace-one", "zero-out")
Level = Literal["record", "user"]
LEVELS: tuple[Level, ...] = ("record", "user")
Clipping = Literal["plain", "automatic", "adaptive"]
CLIPPINGS: tuple[Clipping, ...] = ("plain", "automatic", "adaptive")
Aggregate = Literal["uniform", "size"]
AGGREGATES: tuple[Aggregate, ...] = ("uniform", "size")
Precision = Literal["float32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
TrainOn = Literal["all", "train"]
EvaluateOn = Literal["test", "validation"]
ValidationBy = Literal["row", "client"]
Defaults = Literal["adaptive", "paper"]
Clients = int | Literal["auto"]
"""Number of clients; auto: the number that the data set names."""
