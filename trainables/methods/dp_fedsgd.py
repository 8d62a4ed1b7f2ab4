"""DP-FedSGD: the same mechanism as DP-FedGD, under the name and the default step size of the M-estimation paper."""

from __future__ import annotations

from trainables.methods.base import learning_rate
from trainables.methods.dp_fedgd import DPFedGD


class DPFedSGD(DPFedGD):
    name = "dp-fedsgd"
    title = "DP-FedSGD"
    paper = "McMahan et al. 2017; for M-estimation Auddy, Paul and Peng 2026, arXiv:2605.18656"
    hyperparameters = (learning_rate(1.0),)
