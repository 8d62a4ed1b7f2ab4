"""Problems in Ray's object store: every array once per node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ray

from trainables.data.stored import StoredRows
from trainables.federation.problem import Problem, ProblemData


@dataclass(frozen=True)
class ObjectStoreArray:
    reference: ray.ObjectRef

    def load(self) -> Any:
        return ray.get(self.reference)


class ObjectStoreProblems:
    """Puts every array into the store once: problems that differ in their partition share features and labels."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Any, ObjectStoreArray]] = {}
        """By the array's id, with the array itself: while it is referenced, its id stays unique."""
        self._data: dict[str, ProblemData] = {}
        self._references: dict[str, ray.ObjectRef] = {}

    def data(self, problem: Problem) -> ProblemData:
        key = problem.spec.key
        if key not in self._data:
            data = ProblemData.of(problem)
            in_file = isinstance(data.x, StoredRows)  # hosts read their rows from the file
            names = ("y", "rows", "x_eval", "y_eval") if in_file else ("x", "y", "rows", "x_eval", "y_eval")
            stored: dict[str, Any] = {name: self._put(getattr(data, name)) for name in names}
            self._data[key] = replace(data, **stored)
        return self._data[key]

    def reference(self, problem: Problem) -> ray.ObjectRef:
        """A reference to the `ProblemData`, for processes that only pass it on."""
        key = problem.spec.key
        if key not in self._references:
            self._references[key] = ray.put(self.data(problem))
        return self._references[key]

    def _put(self, array: Any) -> ObjectStoreArray:
        if id(array) not in self._arrays:
            self._arrays[id(array)] = (array, ObjectStoreArray(ray.put(array)))
        return self._arrays[id(array)][1]
