"""Whether DP-FedSOFIM's lead lasts on medical images."""

from orchestrator.reproduction.findings.evidence import EARLY, LOOSE, Evidence, Regime, leads
from orchestrator.reproduction.findings.finding import FAILS, HOLDS, UNDECIDED, Finding, both, majority

NATURAL, MEDICAL, SUBSTITUTE = "CIFAR-10", "PathMNIST", "CRC-5"
ABOUT_SUBSTITUTE = (
    "CRC-5 replaces PathMNIST here: colorectal histology with five tissue classes, images of 32 x 32 through the same "
    "ResNet-20. `fedsweep data` cannot prepare its file. It has other images and fewer rows than PathMNIST, so the "
    "result is only an indication."
)


def medical_images(evidence: Evidence) -> Finding | None:
    """Phenomenon 5 of section 5.3 of the DP-FedSOFIM paper."""
    by_setting: dict[str, list[Regime]] = {}
    for regime, _ in leads(evidence.regimes, EARLY):
        by_setting.setdefault(regime.setting, []).append(regime)
    natural = [setting for setting in by_setting if setting.startswith(NATURAL)]
    medical = [setting for setting in by_setting if setting.startswith((MEDICAL, SUBSTITUTE))]
    if not natural or not medical:
        return None
    sentences = []
    for setting in (*natural, *medical):
        pairs = "; ".join(f"{r.lead(EARLY):+.2f} and {r.lead():+.2f} at ε = {r.epsilon:g}" for r in by_setting[setting])
        sentences.append(
            f"{setting}: DP-FedSOFIM minus the best other method, at round {EARLY} and at the end: {pairs}."
        )
    pathmnist = [regime for setting in medical if setting.startswith(MEDICAL) for regime in by_setting[setting]]
    if pathmnist:
        loose = [regime for setting in natural for regime in by_setting[setting] if regime.epsilon in LOOSE]
        narrows = sum(regime.lead() - regime.lead(EARLY) for regime in loose) < 0
        lasts = sum(regime.lead() >= 0 for regime in pathmnist)
        verdict = both(majority(lasts, len(pathmnist)), HOLDS if narrows else FAILS)
    else:
        verdict, sentences = UNDECIDED, [ABOUT_SUBSTITUTE, *sentences]
    return Finding("Phenomenon 5: the lead lasts on medical images and narrows on CIFAR-10", verdict, tuple(sentences))
