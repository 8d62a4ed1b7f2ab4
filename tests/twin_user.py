"""The slow twin at user level: the client with all it holds is the record. Algorithms 4, 6 and 8 of DP-FedNew's paper.

As in twin.py: plain loops in float64, one trial, written from the formulas. The rows' gradients are not clipped; what a
client makes of them is, as a whole, and gets noise that does not shrink with |D_i|.
"""

import numpy as np
import twin


def mean_gradient(client, W):
    examples = zip(client.rows, client.labels, strict=True)
    return sum(twin.gradient(W, twin.with_constant(x), label) for x, label in examples) / len(client)


def one_gradient(client, W, t, h, server):
    return twin.clipped(mean_gradient(client, W), client.clip) + client.noise(W.shape, t)


def local_steps(client, W, t, h, server):
    """K steps without noise; clip(y - W) + noise is released."""
    y = W
    for _ in range(h["local_steps"]):
        y = y - h["client_learning_rate"] * mean_gradient(client, y)
    return twin.clipped(y - W, client.clip) + client.noise(W.shape, t)


def adapted_steps(client, W, t, h, server):
    """Andrew et al. 2021: the update clipped to the round's clip C, and 1/3 of C behind it if it was longer. The noise
    is made for the first clip, and grows and shrinks with it."""
    y = W
    for _ in range(h["local_steps"]):
        y = y - h["client_learning_rate"] * mean_gradient(client, y)
    C = server.setdefault("C", client.clip)
    count = C / 3 if np.linalg.norm(y - W) > C else 0.0
    released = np.append(twin.clipped(y - W, C).ravel(), count)
    return released + C / client.clip * client.noise(released.shape, t)


def followed_median(W, G, t, state, *, server_learning_rate, **client_side):
    """C <- C exp(-0.2 (share of the unclipped - 1/2))."""
    clipped = min(max(G[-1] / (state["C"] / 3), 0.0), 1.0)
    state["C"] *= np.exp(-0.2 * (1 - clipped - 0.5))
    return W + server_learning_rate * G[:-1].reshape(W.shape)


def controlled_steps(client, W, t, h, server):
    """Algorithm 4: zeta = clip(W - y) + noise; c_i' = c_i - c + zeta / (K eta); -zeta is released."""
    c, c_i = server.get("c", np.zeros_like(W)), client.state.get("c_i", np.zeros_like(W))
    y = W
    for _ in range(h["local_steps"]):
        y = y - h["client_learning_rate"] * (mean_gradient(client, y) - c_i + c)
    zeta = twin.clipped(W - y, client.clip) - client.noise(W.shape, t)
    client.state["c_i"] = c_i - c + zeta / (h["local_steps"] * h["client_learning_rate"])
    client.state["change of c_i"] = client.state["c_i"] - c_i
    return -zeta


def covariance(client, bound):
    """The mean of x x^T over rows clipped to `bound`, whose norm is at most the bound's square, with noise."""
    rows = [twin.clipped(twin.with_constant(x), bound) for x in client.rows]
    q = len(rows[0])
    return sum(np.outer(x, x) for x in rows) / len(client) + client.noise((q, q), 0, purpose="covariance")


def preconditioned_gradient(client, W, t, h, server):
    """Algorithm 6: clip((Cov + gamma I)^-1 g_i) + noise, Cov being known to all."""
    step = np.linalg.solve(server["Cov"] + h["gamma"] * np.eye(len(W)), mean_gradient(client, W))
    return twin.clipped(step, client.clip) + client.noise(W.shape, t)


def follow(W, G, t, state, *, learning_rate, **client_side):
    return W - learning_rate * G


METHODS = {
    "dp-fedgd": (one_gradient, twin.dp_fedgd),
    "dp-fedadam": (one_gradient, twin.dp_fedadam),
    "dp-fedyogi": (one_gradient, twin.dp_fedyogi),
    "dp-fedsofim": (one_gradient, twin.dp_fedsofim),
    "dp-fedavg": (local_steps, twin.dp_fedavg),
    "dp-scaffold": (controlled_steps, twin.dp_scaffold),
    "dp-fedfc": (preconditioned_gradient, follow),
}


def diagnose(clients, W, t):
    """No row is clipped; the noise is that of the releases."""
    signal = np.mean([mean_gradient(client, W) for client in clients], axis=0)
    noise = np.mean([client.noise(W.shape, t) for client in clients], axis=0)
    return {
        ("train_loss", t): np.mean([client.mean_loss(W) for client in clients]),
        ("clipped_share", t): 0.0,
        ("signal_norm", t): np.linalg.norm(signal),
        ("noise_norm", t): np.linalg.norm(noise),
    }


def train(clients, classes, method, hypers, *, rounds, diagnose_at=()):
    release, step = METHODS[method]
    W = twin.initial_weights(clients[0].rows.shape[1] + 1, classes, clients[0].seed)
    everyone = {"clients": clients} if method == "dp-scaffold" else {}
    report, state = twin.Report(), {}
    if method == "dp-fedfc":
        mean = np.mean([covariance(client, hypers["feature_clip"]) for client in clients], axis=0)
        state["Cov"] = twin.positive_part(mean)
    for t in range(1, rounds + 1):
        if t in diagnose_at:
            report.diagnostics |= diagnose(clients, W, t)
        G = np.mean([release(client, W, t, hypers, state) for client in clients], axis=0)
        W = step(W, G, t, state, **hypers, **everyone)
        report.weights.append(W)
    return report
