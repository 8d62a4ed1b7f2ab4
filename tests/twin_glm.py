"""The slow twin of generalised linear models: one client's rows in plain loops, float64, every Hessian really there.

Written from the formulas: eta = W^T x, gradient x (mean(eta) - y)^T, Hessian (x x^T) (x) A in the order in which the
weights lie in memory. From the fast path it takes the addressed noise and the privacy plan's scales, as twin.py does.
"""

import math

import numpy as np
import twin
from twin import clipped, with_constant

# ---- the families: mean and variance of the response given eta, and what the label is compared as


def mean(task, eta):
    if task == "poisson":
        return np.exp(eta)
    odds = np.exp(eta)
    return odds / (1 + odds.sum())


def response(task, label, columns):
    if task == "poisson":
        return np.array([float(label)])
    return np.array([float(label == j) for j in range(1, columns + 1)])


def variance(task, eta):
    m = mean(task, eta)
    return np.diag(m) if task == "poisson" else np.diag(m) - np.outer(m, m)


def loss(task, W, x, label):
    eta = W.T @ x
    if task == "poisson":
        return math.exp(eta[0]) - label * eta[0] + math.lgamma(label + 1)
    return math.log(1 + np.exp(eta).sum()) - np.append(0.0, eta)[label]


def gradient(task, W, x, label):
    eta = W.T @ x
    return np.outer(x, mean(task, eta) - response(task, label, W.shape[1]))


def hessian(task, W, x):
    return np.kron(np.outer(x, x), variance(task, W.T @ x))


# ---- the clients


class Client(twin.Client):
    task = "logistic"

    def clipped_gradient_sum(self, W):
        total = np.zeros_like(W)
        for x, label in zip(self.rows, self.labels, strict=True):
            total += clipped(gradient(self.task, W, with_constant(x), label), self.clip)
        return total

    def clipped_hessian_sum(self, W, bound):
        total = np.zeros((W.size, W.size))
        for x in self.rows:
            total += clipped(hessian(self.task, W, with_constant(x)), bound)
        return total


def newton_step(client, W, t, hypers, server):
    """-H^-1 g, both noisy; H made symmetric, its eigenvalues raised to the smallest that is allowed."""
    if t <= hypers["fedavg_rounds"]:
        return twin.local_steps(client, W, t, hypers, server, purpose="start")
    g = client.noisy_gradient(W, t)
    noise = client.noise((W.size, W.size), t, purpose="hessian")
    H = (client.clipped_hessian_sum(W, hypers["hessian_clip"]) + noise) / len(client)
    values, vectors = np.linalg.eigh((H + H.T) / 2)
    raised = np.maximum(values, hypers["smallest_eigenvalue"])
    return -(vectors @ ((vectors.T @ g.flatten()) / raised)).reshape(W.shape)


def dp_fednewton(W, G, t, state, **client_side):
    return W + G


METHODS = {"dp-fednewton": (newton_step, dp_fednewton)}


def train(clients, columns, method, hypers, *, rounds):
    """The weights after every round, from zero."""
    release, step = METHODS.get(method) or twin.METHODS[method]
    W, state, found = np.zeros((clients[0].rows.shape[1] + 1, columns)), {}, []
    for t in range(1, rounds + 1):
        G = np.mean([release(client, W, t, hypers, state) for client in clients], axis=0)
        W = step(W, G, t, state, **hypers)
        found.append(W)
    return found
