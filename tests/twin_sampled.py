"""The slow twin of the methods that sample: Poisson samples of rows, some of the clients each round, a cosine.

As in twin.py: plain loops in float64, one trial, written from the formulas.

    round t = 1, ..., T:   eta = eta_1 (1 + cos(pi (t-1)/T)) / 2
        S of the n clients take part
        each takes K steps from y = W; a gradient is (sum over a sample of clip_C(g) + E) / (q |D_i|)
        server: W + mean of what the S clients release
"""

import math

import numpy as np
import twin

from trainables.privacy.noise import Address


def who_takes_part(seed, t, clients, share):
    size = max(1, round(share * clients))
    if size == clients:
        return list(range(clients))
    return Address(seed, twin.SERVER, t, 0, "participants").generator().permutation(clients)[:size].tolist()


def sampled_gradient(client, y, t, step, q):
    drawn = Address(client.seed, client.number, t, step, "sample").generator().random(len(client)) < q
    total = client.noise(y.shape, t, step)
    for x, label in zip(client.rows[drawn], client.labels[drawn], strict=True):
        total = total + twin.clipped(twin.gradient(y, twin.with_constant(x), label), client.clip)
    return total / (q * len(client))


def plain_steps(client, W, t, eta, h, server):
    y = W
    for k in range(h["local_steps"]):
        y = y - eta * (sampled_gradient(client, y, t, k, h["sampling_rate"]) + h["weight_decay"] * y)
    return y - W


def sharpness_aware_steps(client, W, t, eta, h, server):
    y = W
    for k in range(h["local_steps"]):
        u = sampled_gradient(client, y, t, 2 * k, h["sampling_rate"])
        there = y + h["rho"] * u / np.linalg.norm(u)
        y = y - eta * (sampled_gradient(client, there, t, 2 * k + 1, h["sampling_rate"]) + h["weight_decay"] * y)
    return y - W


def adamw(client, W, t, eta, h, v, before, own=1.0, other=0.0, corrected=False):
    """K steps; v is a mean over `before` earlier squares. A step is own x AdamW's direction + other. `corrected`: the
    noise's variance is subtracted from every square, and the root has a lower bound."""
    s = client.noise_std["gradient"] / (h["sampling_rate"] * len(client)) if corrected else 0.0
    y, m = W, np.zeros_like(W)
    for k in range(1, h["local_steps"] + 1):
        g = sampled_gradient(client, y, t, k - 1, h["sampling_rate"])
        m = h["beta1"] * m + (1 - h["beta1"]) * g
        v = h["beta2"] * v + (1 - h["beta2"]) * (g * g - s * s)
        mhat, vhat = m / (1 - h["beta1"] ** k), v / (1 - h["beta2"] ** (before + k))
        root = np.maximum(np.sqrt(np.maximum(vhat, 0)), h["noise_floor"] * s if corrected else 0.0)
        direction = own * mhat / (root + h["tau"]) + other
        y = y - eta * (direction + h["weight_decay"] * y)
    return y - W, v


def local_adamw(client, W, t, eta, h, server):
    return adamw(client, W, t, eta, h, np.zeros_like(W), before=0)[0]


def fed_adamw(client, W, t, eta, h, server):
    v = np.full_like(W, server.get("v", 0.0))
    other = (1 - h["gamma"]) * server.get("direction", np.zeros_like(W))
    move, v = adamw(client, W, t, eta, h, v, (t - 1) * h["local_steps"], h["gamma"], other, corrected=True)
    return move, v.mean()


def average(W, released, eta, h, server):
    return W + np.mean(released, axis=0)


def smooth_average(W, released, eta, h, server):
    """(I + s L)^-1 of the mean move, L a matrix: 2 on the diagonal, -1 beside it, around a circle."""
    move = np.mean(released, axis=0).reshape(-1)
    eye = np.eye(len(move))
    L = 2 * eye - np.roll(eye, 1, axis=0) - np.roll(eye, -1, axis=0)
    return W + np.linalg.solve(eye + h["smoothing"] * L, move).reshape(W.shape)


def average_and_align(W, released, eta, h, server):
    move = np.mean([move for move, _ in released], axis=0)
    server["v"] = np.mean([v for _, v in released])
    server["direction"] = -move / (h["local_steps"] * eta)
    return W + move


METHODS = {
    "dp-fedavg-ls": (plain_steps, smooth_average),
    "dp-fedsam": (sharpness_aware_steps, average),
    "dp-localadamw": (local_adamw, average),
    "dp-fedadamw": (fed_adamw, average_and_align),
}


def diagnose(clients, W, t, hypers):
    """As twin.diagnose, of the first step's samples and of those who take part."""
    q, found = hypers["sampling_rate"], []
    for client in clients:
        drawn = Address(client.seed, client.number, t, 0, "sample").generator().random(len(client)) < q
        part = twin.Client(client.number, client.rows[drawn], client.labels[drawn], {}, client.clip, client.seed)
        share, expected = len(part) / (q * len(client)), q * len(client)
        found.append(
            (
                part.mean_loss(W) * share if len(part) else 0.0,
                part.clipped_share(W) * share if len(part) else 0.0,
                part.clipped_gradient_sum(W) / expected,
                client.noise(W.shape, t) / expected,
            )
        )
    losses, clipped, signals, noises = zip(*found, strict=True)
    return {
        ("train_loss", t): np.mean(losses),
        ("clipped_share", t): np.mean(clipped),
        ("signal_norm", t): np.linalg.norm(np.mean(signals, axis=0)),
        ("noise_norm", t): np.linalg.norm(np.mean(noises, axis=0)),
    }


def train(clients, classes, method, hypers, *, rounds, planned, diagnose_at=()):
    """The first `rounds` of `planned` rounds."""
    release, step = METHODS[method]
    report = twin.Report()
    W, server = twin.initial_weights(clients[0].rows.shape[1] + 1, classes, clients[0].seed), {}
    for t in range(1, rounds + 1):
        eta = hypers["client_learning_rate"] * (1 + math.cos(math.pi * (t - 1) / planned)) / 2
        present = who_takes_part(clients[0].seed, t, len(clients), hypers["participation"])
        if t in diagnose_at:
            report.diagnostics |= diagnose([clients[i] for i in present], W, t, hypers)
        weights = np.array([clients[i].weight for i in present]) / np.mean([clients[i].weight for i in present])
        released = [release(clients[i], W, t, eta, hypers, server) for i in present]
        released = [
            tuple(w * part for part in sent) if isinstance(sent, tuple) else w * sent
            for w, sent in zip(weights, released, strict=True)
        ]
        W = step(W, released, eta, hypers, server)
        report.weights.append(W)
    return report
