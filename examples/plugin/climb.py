"""Hill climbing with ask and tell (docs/write-a-strategy.md)."""

import numpy as np

from fedsweep.plugins import AskTellStrategy, Configuration, Result, SearchTask


class Climb(AskTellStrategy):
    """Random steps around the best configuration so far. They get shorter with every batch without improvement."""

    name = "climb"

    def searcher(self, task: SearchTask) -> "Climber":
        return Climber(task)


class Climber:
    def __init__(self, task: SearchTask) -> None:
        self.space = task.space
        self.random = np.random.default_rng(task.settings.seed)
        self.best: Result | None = None
        self.step = 0.5  # decades

    def ask(self, count: int) -> list[Configuration]:
        if self.best is not None:
            return [self._neighbour(self.best.configuration) for _ in range(count)]
        grid = self.space.grid(self.space.coarse)
        return [grid[index] for index in self.random.permutation(len(grid))[:count]]

    def tell(self, results: list[Result]) -> None:
        finished = [result for result in results if result.cost is not None]
        leader = min(finished, key=lambda result: result.cost, default=None)
        if leader is not None and (self.best is None or leader.cost < self.best.cost):
            self.best = leader
        else:
            self.step /= 2

    def _neighbour(self, centre: Configuration) -> Configuration:
        """Positive numbers move on a log scale within their axis; other values are drawn from their axis."""
        neighbour = dict(centre)
        for name, axis in self.space.coarse.items():
            if all(isinstance(value, float) and value > 0 for value in axis):
                moved = centre[name] * 10 ** self.random.normal(0, self.step)
                neighbour[name] = float(np.clip(moved, min(axis), max(axis)))
            else:
                neighbour[name] = axis[self.random.integers(len(axis))]
        return neighbour
