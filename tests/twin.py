"""The slow twin: one trial of differentially private federated learning in plain loops, float64, nothing clever.

It is written from the methods' formulas, not from the fast code, and serves as documentation and as the oracle of the
tests. One trial at a time; every per-example gradient is a matrix that is really there. From the fast path it takes
only the addressed noise (so that both see the same random numbers) and the privacy plan's noise scale.

    for every round t = 1, 2, ..., T:
        every client i:  releases u_i(W) = (sum over its rows of clip_C(gradient) + E_i) / |D_i|,
                         or, after local steps, the update y - W
        server:          G = mean of the releases,  W = step(W, G)
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from trainables.privacy.noise import Address

SERVER = -1  # who "holds" the address of the initial weights


# ---- the model: softmax of W^T x, where x has a constant 1 appended


def with_constant(x):
    """One row of features, as the model sees it."""
    return np.concatenate((x, [1.0]), dtype=np.float64)


def probabilities(W, x):
    scores = W.T @ x
    e = np.exp(scores - scores.max())
    return e / e.sum()


def gradient(W, x, label):
    """Gradient of the cross-entropy of one example: x (p - y)^T."""
    y = np.zeros(W.shape[1])
    y[label] = 1.0
    return x[:, None] * (probabilities(W, x) - y)


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


# ---- the clients: each holds its rows, and adds noise of the scale that the privacy plan says


@dataclass
class Client:
    number: int
    rows: np.ndarray
    labels: np.ndarray
    noise_std: dict
    """By purpose: the standard deviation of what is added to a sum."""
    clip: float
    seed: int
    level: str = "record"
    weight: float = 1.0
    """In the mean over clients, against the others'."""
    state: dict = field(default_factory=dict)
    """What stays with the client from round to round."""

    def __len__(self):
        return len(self.labels)

    def noise(self, shape, t, step=0, purpose="gradient"):
        """The noise at an address, in the shape of what it is added to."""
        z = Address(self.seed, self.number, t, step, purpose).normal(math.prod(shape)).astype(np.float64)
        return self.noise_std[purpose] * z.reshape(shape)

    def clipped_gradient_sum(self, W):
        total = np.zeros_like(W)
        for x, label in zip(self.rows, self.labels, strict=True):
            total += clipped(gradient(W, with_constant(x), label), self.clip)
        return total

    def noisy_gradient(self, W, t, step=0, purpose="gradient"):
        """u_i(W)."""
        return (self.clipped_gradient_sum(W) + self.noise(W.shape, t, step, purpose)) / len(self)

    def mean_loss(self, W):
        return mean_loss(W, self.rows, self.labels)

    def clipped_share(self, W):
        """Percent of rows whose gradient is longer than the clip."""
        norms = [np.linalg.norm(gradient(W, with_constant(x), y)) for x, y in zip(self.rows, self.labels, strict=True)]
        return 100.0 * sum(norm > self.clip for norm in norms) / len(self)


def mean(values, clients):
    return np.average(np.array(values), axis=0, weights=[client.weight for client in clients])


# ---- before the first round, where features are centred


def centred(clients, bound):
    """The same clients with a private mean subtracted: all clients' noisy sums of rows clipped to `bound`, over
    how many rows there are; of users, the mean of their noisy means."""
    released = []
    for client in clients:
        total = sum(clipped(np.asarray(x, dtype=np.float64), bound) for x in client.rows)
        noise = client.noise(total.shape, 0, purpose="centre")
        released.append(total / len(client) + noise if client.level == "user" else total + noise)
    rows = sum(len(client) for client in clients)
    m = np.mean(released, axis=0) if clients[0].level == "user" else np.sum(released, axis=0) / rows
    return [replace(client, rows=client.rows - m) for client in clients], m


# ---- what a client releases in round t


def one_gradient(client, W, t, hypers, server):
    return client.noisy_gradient(W, t)


def local_steps(client, W, t, hypers, server, correction=lambda y: 0.0, purpose="gradient"):
    """K steps y -= eta_c (u_i(y) + correction) from y = W, fresh noise in every step."""
    y = W
    for step in range(hypers["local_steps"]):
        y = y - hypers["client_learning_rate"] * (client.noisy_gradient(y, t, step, purpose) + correction(y))
    return y - W


def proximal_steps(client, W, t, hypers, server):
    """Every step is drawn back to W, with mu_t = max(mu_0 / sqrt(t), mu_0 / 10)."""
    mu = max(hypers["mu0"] / math.sqrt(t), hypers["mu0"] / 10)
    return local_steps(client, W, t, hypers, server, lambda y: mu * (y - W))


def controlled_steps(client, W, t, hypers, server):
    """y -= eta_c (u_i(y) - c_i + c), then c_i' = c_i - c + (W - y) / (K eta_c)."""
    c, c_i = server.get("c", np.zeros_like(W)), client.state.get("c_i", np.zeros_like(W))
    move = local_steps(client, W, t, hypers, server, lambda y: c - c_i)
    client.state["c_i"] = c_i - c - move / (hypers["local_steps"] * hypers["client_learning_rate"])
    client.state["change of c_i"] = client.state["c_i"] - c_i
    return move


def prefix(t):
    """The nodes of a binary tree over rounds that make up the prefix 1..t, each (last round, level), by the binary
    digits of t: 6 = 4 + 2 is (4, level 2) and (6, level 1)."""
    nodes, end = [], 0
    for level in reversed(range(t.bit_length())):
        if t & 2**level:
            end += 2**level
            nodes.append((end, level))
    return nodes


def prefix_sum(client, W, t, hypers, server):
    """The sum of all the client's gradients so far, with the noise of the tree's nodes: one noise per node, however
    many prefixes it is part of. With restarts every tree that is full adds the noise of its own last prefix."""
    client.state["sum"] = client.state.get("sum", np.zeros_like(W)) + client.clipped_gradient_sum(W)
    span = hypers["restart_every"] or t
    noise = np.zeros_like(W)
    for start in range(0, t, span):
        for end, level in prefix(min(span, t - start)):
            noise += client.noise(W.shape, start + end, level, "tree")
    return (client.state["sum"] + noise) / len(client)


def ftrl_release(client, W, t, hypers, server):
    return (
        one_gradient(client, W, t, hypers, server)
        if hypers["as_released"] or hypers["noise"] == "independent"
        else prefix_sum(client, W, t, hypers, server)
    )


def banded_release(client, W, t, hypers, server):
    """(C^-1 z)_t, with C^-1 the first `bands` diagonals of the root of 1 - x, and the gradient if it is the client's
    turn; times `every`, which the mean over clients takes away again."""
    every, bands = hypers["every"], hypers["bands"] or hypers["every"]
    total = client.clipped_gradient_sum(W) if (t - 1) % every == client.number % every else np.zeros_like(W)
    for back in range(min(bands, t)):
        root = (-1) ** back * math.gamma(1.5) / (math.factorial(back) * math.gamma(1.5 - back))  # binomial(1/2, back)
        total = total + root * client.noise(W.shape, t - back, 0, "banded")
    return every * total / len(client)


def hessian(W, x):
    """Of the cross-entropy of one example, for the weights row by row: a matrix that is really there."""
    p = probabilities(W, x)
    return np.kron(np.outer(x, x), np.diag(p) - np.outer(p, p))


def covariance_for_hessian(W, x):
    """x x^T for every class, and nothing between classes."""
    return np.kron(np.outer(x, x), np.eye(W.shape[1]))


def primal_update(client, W, t, hypers, server, curvature=hessian, classes_counted=1):
    """y~_i = (H_i + gamma I)^-1 (g_i - lambda_i + rho y) with noise. `classes_counted`: how often x x^T stands in the
    curvature's norm, of which only one counts."""
    rho, y, user = hypers["rho"], server.get("y", np.zeros_like(W)), client.level == "user"
    bound = math.inf if user else hypers["hessian_clip"] * math.sqrt(classes_counted)
    examples = [(with_constant(x), label) for x, label in zip(client.rows, client.labels, strict=True)]
    H = sum(clipped(curvature(W, x), bound) for x, _ in examples) / len(client)
    g = sum(clipped(gradient(W, x, label), math.inf if user else client.clip) for x, label in examples) / len(client)
    dual = np.zeros_like(W)
    if hypers["duals"] or hypers["as_released"]:
        dual = client.state.get("dual", dual) + rho * (client.state.get("y~", y) - y)
    total, C2 = g - dual + rho * y, hypers["sum_clip"]
    if not user and hypers["as_released"] and np.linalg.norm(total) > C2:
        b = rho * y - dual
        total = g + max(np.roots([np.vdot(b, b), 2 * np.vdot(g, b), np.vdot(g, g) - C2**2])) * b
    elif not user:
        total = clipped(total, C2)
    found = np.linalg.solve(H + (hypers["alpha"] + rho) * np.eye(W.size), total.flatten()).reshape(W.shape)
    noise = client.noise(W.shape, t, purpose="primal")
    client.state["dual"] = dual
    client.state["y~"] = clipped(found, client.clip) + noise if user else found + noise / len(client)
    return client.state["y~"]


def primal_update_with_covariance(client, W, t, hypers, server):
    return primal_update(client, W, t, hypers, server, covariance_for_hessian, W.shape[1])


def covariance(client, bound, as_released):
    """Once, before the first gradient: the sum of x x^T over rows clipped to `bound`, with noise, over |D_i|.
    As released nothing is clipped, and the noise is not divided."""
    q = client.rows.shape[1] + 1
    total, noise = np.zeros((q, q)), client.noise((q, q), 0, purpose="covariance")
    for x in client.rows:
        x = with_constant(x) if as_released else clipped(with_constant(x), bound)
        total += np.outer(x, x)
    return total / len(client) + noise if as_released else (total + noise) / len(client)


def positive_part(matrix):
    """A noisy covariance made symmetric, and its negative eigenvalues zero."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return vectors @ np.diag(np.maximum(values, 0)) @ vectors.T


# ---- what the server makes of the mean release G in round t = 1, 2, ...


def dp_fedgd(W, G, t, state, *, learning_rate):
    return W - learning_rate * G


def dp_fedavg(W, G, t, state, *, server_learning_rate, **client_side):
    return W + server_learning_rate * G


def dp_scaffold(W, G, t, state, *, server_learning_rate, clients, **client_side):
    """c moves by the mean of the clients' changes (which the server can tell from G, so this is no further release)."""
    state["c"] = state.get("c", 0.0) + mean([client.state["change of c_i"] for client in clients], clients)
    return W + server_learning_rate * G


def dp_bandmf(W, G, t, state, *, learning_rate, **client_side):
    return W - learning_rate * G


def dp_ftrl(W, G, t, state, *, learning_rate, as_released, restart_every, noise):
    """W_0 - eta * prefix sum / t. In the honest mode the clients release prefix sums, as released single gradients."""
    start = state.setdefault("W_0", W)
    single = as_released or noise == "independent"
    total = state["sum"] = state.get("sum", 0.0) + G if single else G
    return start - learning_rate * total / t


def dp_fedfc(W, G, t, state, *, learning_rate, gamma, feature_clip, covariance_share, as_released, clients):
    """(Cov + gamma I)^-1 G."""
    if t == 1:
        state["Cov"] = positive_part(mean([covariance(c, feature_clip, as_released) for c in clients], clients))
    return W - learning_rate * np.linalg.solve(state["Cov"] + gamma * np.eye(len(W)), G)


def gradient_from_zero(client, W, t, hypers, server):
    """In the first round at zero weights, not at the initial ones."""
    return client.noisy_gradient(np.zeros_like(W) if t == 1 else W, t)


def dp_ls(W, G, t, state, *, learning_rate, gamma, feature_clip, covariance_share, clients):
    """A Newton step from zero, where the Hessian is Gram / c; then steps with Gram / 2."""
    if t == 1:
        state["Gram"] = positive_part(mean([covariance(c, feature_clip, False) for c in clients], clients))
        W = np.zeros_like(W)
    hessian = (state["Gram"] + gamma * np.eye(len(W))) / (W.shape[1] if t == 1 else 2)
    return W - learning_rate * np.linalg.solve(hessian, G)


def dp_fednew(W, G, t, state, *, learning_rate, **client_side):
    state["y"] = G
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


def fedavg_then_gradient(client, W, t, hypers, server):
    """K noisy steps in the first rounds, with noise of their own scale, then one gradient a round."""
    if t > hypers["fedavg_rounds"]:
        return one_gradient(client, W, t, hypers, server)
    return local_steps(client, W, t, hypers, server, purpose="start")


def dp_fedhybrid(W, G, t, state, *, learning_rate, fedavg_rounds, **client_side):
    return W + G if t <= fedavg_rounds else W - learning_rate * G


# method: what a client releases, what the server does with it
METHODS = {
    "dp-fedgd": (one_gradient, dp_fedgd),
    "dp-fedsgd": (one_gradient, dp_fedgd),
    "dp-fedhybrid": (fedavg_then_gradient, dp_fedhybrid),
    "dp-fedavg": (local_steps, dp_fedavg),
    "dp-adafedprox": (proximal_steps, dp_fedavg),
    "dp-scaffold": (controlled_steps, dp_scaffold),
    "dp-fedadam": (one_gradient, dp_fedadam),
    "dp-fedyogi": (one_gradient, dp_fedyogi),
    "dp-ftrl": (ftrl_release, dp_ftrl),
    "dp-bandmf": (banded_release, dp_bandmf),
    "dp-fedfc": (one_gradient, dp_fedfc),
    "dp-ls": (gradient_from_zero, dp_ls),
    "dp-fedsofim": (one_gradient, dp_fedsofim),
    "dp-fednew": (primal_update, dp_fednew),
    "dp-fednew-fc": (primal_update_with_covariance, dp_fednew),
}


# ---- the federation


@dataclass
class Report:
    """What came of a run: the weights after every round, and diagnostics of some rounds, by name and round."""

    weights: list = field(default_factory=list)
    diagnostics: dict = field(default_factory=dict)


def diagnose(clients, W, t):
    """For the experimenter's eyes: means over clients, at the weights that round t starts from."""
    signals = [client.clipped_gradient_sum(W) / len(client) for client in clients]
    found = {
        ("train_loss", t): mean([client.mean_loss(W) for client in clients], clients),
        ("clipped_share", t): mean([client.clipped_share(W) for client in clients], clients),
        ("signal_norm", t): np.linalg.norm(mean(signals, clients)),
    }
    if "gradient" in clients[0].noise_std:  # the noise of a tree belongs to no one round
        noises = [client.noise(W.shape, t) / len(client) for client in clients]
        found["noise_norm", t] = np.linalg.norm(mean(noises, clients))
    return found


def train(clients, classes, method, hypers, *, rounds, diagnose_at=()):
    """The whole of a trial."""
    release, step = METHODS[method]
    W = initial_weights(clients[0].rows.shape[1] + 1, classes, clients[0].seed)
    everyone = {"clients": clients} if method in ("dp-scaffold", "dp-fedfc", "dp-ls") else {}
    report, state = Report(), {}
    for t in range(1, rounds + 1):
        if t in diagnose_at:
            report.diagnostics |= diagnose(clients, W, t)
        G = mean([release(client, W, t, hypers, state) for client in clients], clients)
        W = step(W, G, t, state, **hypers, **everyone)
        report.weights.append(W)
    return report
