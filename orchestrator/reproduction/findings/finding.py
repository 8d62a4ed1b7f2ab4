"""A finding and its verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

HOLDS, IN_PART, FAILS, UNDECIDED = "holds", "holds in part", "does not hold", "undecided"


@dataclass(frozen=True)
class Finding:
    claim: str
    verdict: str
    """One of the constants above, or a phrase that combines them."""
    evidence: tuple[str, ...]
    """Sentences; the first is the summary."""

    @property
    def bold_verdict(self) -> str:
        return f"**{self.verdict[0].upper()}{self.verdict[1:]}.**"

    def markdown(self) -> str:
        return f"## {self.claim}\n\n{self.bold_verdict}\n\n" + "".join(f"- {text}\n" for text in self.evidence)


def majority(count: int, total: int) -> str:
    """Verdict on a claim about most regimes."""
    if not total:
        return UNDECIDED
    return HOLDS if count > total / 2 else IN_PART if count > total / 4 else FAILS


def both(first: str, second: str) -> str:
    """Verdict on a claim with two parts."""
    return first if first == second else IN_PART


def by_search(papers: str, ours: str) -> str:
    """One verdict, or one per search if they differ."""
    return papers if ours in (papers, UNDECIDED) else f"{papers} with the papers' search, {ours} with ours"


def listed(items: Sequence[str], limit: int = 4) -> str:
    text = "; ".join(items[:limit])
    return f"{text}; and {len(items) - limit} more" if len(items) > limit else text
