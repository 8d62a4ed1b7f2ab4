"""How much the draw of the partition changes the result."""

import math
from statistics import fmean

from orchestrator.reproduction.findings.evidence import OTHER_DRAW, PER_SEED, Evidence
from orchestrator.reproduction.findings.finding import FAILS, HOLDS, IN_PART, Finding


def partition_draws(evidence: Evidence) -> Finding | None:
    """The same method on several draws of the same partition."""
    plain = evidence.results.select(plain=True, paper_search=True, finished=True)
    sentences, wide = [], 0
    for ours in plain:
        draws = [ours] + [
            other
            for other in plain
            if (other.method, other.epsilon) == (ours.method, ours.epsilon)
            and OTHER_DRAW in other.dataset
            and PER_SEED not in other.dataset
            and other.setting.replace(other.dataset, other.dataset.split(OTHER_DRAW)[0], 1) == ours.setting
        ]
        if OTHER_DRAW in ours.setting or len(draws) < 2:
            continue
        means, deviation = [draw.mean() for draw in draws], max(draw.std() for draw in draws)
        wide += max(means) - min(means) > 2 * deviation
        sentences.append(
            f"{ours.label} at ε = {ours.epsilon:g}: {min(means):.2f} to {max(means):.2f} over {len(means)} draws; the "
            f"standard deviation over the noise seeds of one draw is at most {deviation:.2f}."
        )
    if not sentences:
        return None
    return Finding(
        "The draw of the partition changes the result more than the noise does",
        HOLDS if wide > len(sentences) / 2 else IN_PART if wide else FAILS,
        (
            f"In {wide} of {len(sentences)} cells the draws differ by more than two standard deviations over noise "
            "seeds. Every draw was tuned separately, which is part of the effect.",
            *sentences,
            *_one_partition_per_seed(evidence),
        ),
    )


def _one_partition_per_seed(evidence: Evidence) -> list[str]:
    """The authors' program uses one seed for everything, so its deviation over seeds includes the partition's."""
    pairs = []
    for match in evidence.matches:
        ours = match.ours
        if match.final and ours.plain and ours.paper_search and not math.isnan(match.paper_std):
            setting = ours.setting.replace(ours.dataset, ours.dataset + PER_SEED, 1)
            same = evidence.results.select(setting=setting, label=ours.label, epsilon=ours.epsilon, finished=True)
            pairs += [(match, per_seed) for per_seed in same]
    if not pairs:
        return []
    return [
        "With a new partition for every seed, as in the authors' program, the standard deviation over seeds is "
        f"{fmean(per_seed.std() for _, per_seed in pairs):.2f} on average over {len(pairs)} cells, "
        f"{fmean(match.our_std for match, _ in pairs):.2f} with one partition, "
        f"{fmean(match.paper_std for match, _ in pairs):.2f} in the paper; the means move by "
        f"{fmean(per_seed.mean() - match.our_mean for match, per_seed in pairs):+.2f}."
    ]
