"""The papers' published results compared with ours."""

from orchestrator.reproduction.comparison import write_comparison

__all__ = ["write_comparison"]
