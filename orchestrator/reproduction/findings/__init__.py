"""What the papers claim, and whether it holds in our results. One file per kind of claim."""

from collections.abc import Sequence

from orchestrator.reproduction.findings.ablation import preconditioner, update_direction
from orchestrator.reproduction.findings.adaptive_baselines import adaptive_baselines
from orchestrator.reproduction.findings.convergence import early_rounds, fednew_speed, final_accuracy
from orchestrator.reproduction.findings.evidence import Evidence
from orchestrator.reproduction.findings.finding import Finding
from orchestrator.reproduction.findings.medical_images import medical_images
from orchestrator.reproduction.findings.partition_draws import partition_draws
from orchestrator.reproduction.findings.privacy_claims import privacy_claims
from orchestrator.reproduction.findings.selection import one_seed, tuned_on_test_rows
from orchestrator.reproduction.findings.tight_budgets import ftrl, scaffold
from orchestrator.reproduction.matching import Match
from orchestrator.reproduction.our_results import OurResults

FINDINGS = (
    *(early_rounds, final_accuracy, adaptive_baselines, scaffold, ftrl, medical_images, preconditioner),
    *(update_direction, privacy_claims, one_seed, tuned_on_test_rows, fednew_speed, partition_draws),
)
"""Functions of the evidence. Each returns a finding, or None if no result bears on its claim."""


def all_findings(results: OurResults, matches: Sequence[Match]) -> list[Finding]:
    evidence = Evidence(results, matches)
    return [finding for find in FINDINGS if (finding := find(evidence)) is not None]


def findings_page(findings: Sequence[Finding]) -> str:
    head = (
        "# Findings\n\nWhat the papers claim, and whether it holds in our results. Accuracies are means over the "
        "confirm seeds, in percent of the test rows. Unless stated otherwise, the actual ε of every method is at most "
        "the ε at which it is compared. A regime is one setting at one ε.\n\n"
        "The papers' search: one seed and the papers' grids. Our search: several seeds, grids that refine, and a "
        "contest between the best configurations on fresh seeds.\n"
    )
    return "\n".join([head, *(finding.markdown() for finding in findings)])


__all__ = ["Finding", "all_findings", "findings_page"]
