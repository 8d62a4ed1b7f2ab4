"""The slow twin: one trial of differentially private federated learning in plain loops, float64, nothing clever.

It is written from the methods' formulas, not from the fast code, and serves as documentation and as the oracle of the
tests. One trial at a time; every per-example gradient is a matrix that is really there. From the fast path it takes
only the addressed noise (so that both see the same random numbers) and the privacy plan's noise scale.

    for every round t = 1, 2, ..., T:
        every client i:  u_i = (sum over its rows of clip_C(gradient) + E_i) / |D_i|
        server:          G = mean of the u_i,  W = step(W, G)
"""

import math
from dataclasses import dataclass, field

import numpy as np

from trainables.privacy.noise import Address

SERVER = -1  # who "holds" the address of the initial weights


# ---- the model: softmax of W^T x, where x has a constant 1 appended


def with_constant(x):
    """One row of features, as the model sees it."""
    return np.append(np.asarray(x, dtype=np.float64), 1.0)


def probabilities(W, x):
    scores = W.T @ x
    e = np.exp(scores - scores.max())
    return e / e.sum()


def gradient(W, x, label):
    """Gradient of the cross-entropy of one example: x (p - y)^T."""
    y = np.zeros(W.shape[1])
    y[label] = 1.0
    return np.outer(x, probabilities(W, x) - y)


def loss(W, x, label):
    """-ln p_label, in the form that does not overflow."""
    scores = W.T @ x
    highest = scores.max()
    return highest + math.log(np.exp(scores - highest).sum()) - scores[label]


def clipped(g, C):
    """g, scaled down to norm C where it is longer."""
    return g / max(1.0, np.linalg.norm(g) / C)


def accuracy(W, rows, labels):
    """Percent of rows whose label has the highest score, and no other class the same."""
    hits = 0
    for x, label in zip(rows, labels, strict=True):
        scores = W.T @ with_constant(x)
        others = np.delete(scores, label)
        hits += bool(scores[label] > others.max())
    return 100.0 * hits / len(labels)


def mean_loss(W, rows, labels):
    return sum(loss(W, with_constant(x), label) for x, label in zip(rows, labels, strict=True)) / len(labels)


def initial_weights(q, c, seed):
    """W ~ N(0, s^2) with s = 0.5 sqrt(2 / (q + c))."""
    s = 0.5 * math.sqrt(2.0 / (q + c))
    return s * Address(seed, SERVER, 0, 0, "initial weights").normal(q * c).astype(np.float64).reshape(q, c)


# ---- the methods: each takes the weights, the mean release G, the round t = 1, 2, ... and its state


def dp_fedgd(W, G, t, state, *, learning_rate):
    return W - learning_rate * G


def dp_fedadam(W, G, t, state, *, learning_rate, beta1, beta2, tau):
    m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * G
    v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * G**2
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    return W - learning_rate * m_hat / (np.sqrt(v_hat) + tau)


def dp_fedyogi(W, G, t, state, *, learning_rate, beta1, beta2, tau):
    v = state.get("v", np.full_like(W, tau**2))
    m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * G
    v = state["v"] = v - (1 - beta2) * np.sign(v - G**2) * G**2
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    return W - learning_rate * m_hat / (np.sqrt(v_hat) + tau)


def dp_fedsofim(
    W,
    G,
    t,
    state,
    *,
    learning_rate,
    rho,
    beta,
    weight_decay,
    direction,
    bias_correction,
    warmup_rounds,
    blend_rounds,
    variant,
):
    """H is the inverse of rho I + M M^T by Sherman and Morrison; what it is applied to is a matter of `direction`."""
    M = state["M"] = beta * state.get("M", 0.0) + (1 - beta) * G
    if bias_correction:
        M = M / (1 - beta**t)

    def preconditioned(A):
        return A / rho - M * np.vdot(M, A) / (rho**2 + rho * np.vdot(M, M))

    A = {"momentum": M, "gradient": G}[direction]
    share = min(1.0, t / blend_rounds) if blend_rounds else 1.0
    step = (1 - share) * A / rho + share * preconditioned(A)
    if t <= warmup_rounds:
        step = M
    if variant == "ema_only":
        step = M
    if variant == "grad_only":
        step = G
    return W - learning_rate * (step + weight_decay * W)


METHODS = {
    "dp-fedgd": dp_fedgd,
    "dp-fedadam": dp_fedadam,
    "dp-fedyogi": dp_fedyogi,
    "dp-fedsofim": dp_fedsofim,
}


# ---- the federation


@dataclass
class Client:
    """One client's rows and how much noise it adds to its sum of clipped gradients."""

    number: int
    rows: np.ndarray
    labels: np.ndarray
    noise_std: float


@dataclass
class Report:
    """What came of a run: the weights after every round, and the experimenter's diagnostics of every round."""

    weights: list = field(default_factory=list)
    train_loss: list = field(default_factory=list)
    clipped_share: list = field(default_factory=list)
    signal_norm: list = field(default_factory=list)
    noise_norm: list = field(default_factory=list)


def train(clients, classes, method, hypers, *, clip, seed, rounds):
    """The whole of a trial. Diagnostics are taken at the weights a round starts from, as means over clients."""
    q = clients[0].rows.shape[1] + 1
    W = initial_weights(q, classes, seed)
    report, state = Report(), {}
    for t in range(1, rounds + 1):
        signals, noises, losses, shares = [], [], [], []
        for client in clients:
            total = np.zeros_like(W)
            client_loss, too_long = 0.0, 0
            for x, label in zip(client.rows, client.labels, strict=True):
                x = with_constant(x)
                g = gradient(W, x, label)
                total += clipped(g, clip)
                too_long += bool(np.linalg.norm(g) > clip)
                client_loss += loss(W, x, label)
            noise = Address(seed, client.number, t, 0, "gradient").normal(W.size).astype(np.float64).reshape(W.shape)
            size = len(client.labels)
            signals.append(total / size)
            noises.append(client.noise_std * noise / size)
            losses.append(client_loss / size)
            shares.append(100.0 * too_long / size)
        signal, noise = np.mean(signals, axis=0), np.mean(noises, axis=0)
        W = METHODS[method](W, signal + noise, t, state, **hypers)
        report.weights.append(W)
        report.train_loss.append(np.mean(losses))
        report.clipped_share.append(np.mean(shares))
        report.signal_norm.append(np.linalg.norm(signal))
        report.noise_norm.append(np.linalg.norm(noise))
    return report
