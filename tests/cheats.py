"""Methods that leak more than they claim, each in another way. `fedsweep check-method` must catch all of them."""

from dataclasses import replace

import numpy as np
import torch

from fedsweep.plugins import ClientProgram, Event, Method, State, learning_rate
from trainables.methods.base import NoisyGradient, UserGradient, clip_norm
from trainables.methods.local_steps import LocalSteps
from trainables.methods.sampled_steps import SGDSteps
from trainables.privacy.noise import Address, fill_normals

LEAKED: dict[str, torch.Tensor] = {}
"""A way out of the client that is no release."""


class Honest(Method):
    """Gradient descent. Every cheat below differs from it in one point."""

    name = "dp-honest"
    title = "Honest"
    paper = "none"
    hyperparameters = (learning_rate(0.5),)
    client: type[ClientProgram] = NoisyGradient

    def program(self, hypers, level="record"):
        return self.client()

    def step(self, t, theta, G, state, hypers):
        return theta - hypers["learning_rate"] * G[:, : theta.shape[1]]


def rows_of(client):
    """The rows of the clients, whose features are not centred here."""
    ((_, rows),) = client.rows_by_centre()
    return rows


def noised(client, total, theta, noise):
    return ((total + noise) / client.size).to(theta.dtype)


def released(release, **attributes):
    """A client program with this release."""

    def round(self, client, theta):
        return release(client, theta)

    return type("Cheat", (ClientProgram,), {"name": "cheat", "round": round, **attributes})


def cheat(release, method=Honest, program=None, **attributes):
    return type("Cheat", (method,), {"client": released(release, **(program or {})), "name": "dp-cheat", **attributes})


def wider(by):
    return {"release_size": lambda self, model: model.dimension + by}


def gradients(client, theta):
    return client.clipped_gradient_sum(theta)


def noise_of_pairs(client, theta):
    return noised(client, gradients(client, theta), theta, client.noise("gradient", t=(client.t + 1) // 2 * 2))


def noise_until_round(last):
    def release(client, theta):
        noise = client.noise("gradient") if client.t <= last else 0
        return noised(client, gradients(client, theta), theta, noise)

    return release


def no_noise_in_round(quiet):
    def release(client, theta):
        return noised(client, gradients(client, theta), theta, client.noise("gradient") * (client.t != quiet))

    return release


def noise_on_the_first_coordinates(client, theta):
    noise = client.noise("gradient").clone()
    noise[..., 8:] = 0
    return noised(client, gradients(client, theta), theta, noise)


def true_row_count(client, theta):
    total = gradients(client, theta) + client.noise("gradient")
    return (total / rows_of(client).real_rows.view(-1, 1, 1)).to(theta.dtype)


def half_noise(client, theta):
    return noised(client, gradients(client, theta), theta, 0.5 * client.noise("gradient"))


def unclipped(client, theta):
    return noised(client, client.gradient_mean(theta) * client.size, theta, client.noise("gradient"))


def noise_scaled_by_data(client, theta):
    total = gradients(client, theta)
    return noised(client, total, theta, client.noise("gradient") * (1 + 0.1 * total.norm(dim=-1, keepdim=True)))


def one_class_unclipped(client, theta):
    total = gradients(client, theta)
    rows = [np.flatnonzero((labels == 2).numpy()) for labels in rows_of(client).y]
    part, huge = rows_of(client).sample(rows), torch.full_like(client.clip.squeeze(1), 1e9)
    bounded, _ = client.model.clipped_gradient_sum(part, theta, client.clip.squeeze(1))
    unbounded, _ = client.model.clipped_gradient_sum(part, theta, huge)
    return noised(client, total - bounded + unbounded, theta, client.noise("gradient"))


def fixed_address(client, theta):
    return noised(client, gradients(client, theta), theta, client.noise("gradient", t=1))


def own_generator(client, theta):
    total = gradients(client, theta)
    client.noise("gradient")
    noise = torch.randn(total.shape, generator=torch.Generator().manual_seed(client.t)) * client.noise_std("gradient")
    return noised(client, total, theta, noise)


def state_of_the_last_round(client, theta):
    total = gradients(client, theta)
    last = client.state.get("last", torch.zeros_like(total))
    client.state["last"] = total
    return noised(client, total + 0.5 * last, theta, client.noise("gradient"))


def noise_taken_back(client, theta):
    noise = client.noise("gradient")
    if client.t > 1:
        noise = noise - client.noise("gradient", t=client.t - 1)
    return noised(client, gradients(client, theta), theta, noise)


def beside_the_release(client, theta):
    LEAKED["sum"] = gradients(client, theta)
    return noised(client, LEAKED["sum"], theta, client.noise("gradient"))


class ReadsWhatWasLeaked(Honest):
    def step(self, t, theta, G, state, hypers):
        return theta - hypers["learning_rate"] * G - 1e-3 * LEAKED["sum"][0].to(theta)


def into_the_state(method):
    class Keeps(method):
        """The weights stay clean; the server keeps the sum."""

        def initial_state(self, theta, hypers) -> State:
            return {"sum": torch.zeros_like(theta)}

        def step(self, t, theta, G, state, hypers):
            state["sum"] = LEAKED["sum"][0].to(theta)
            return super().step(t, theta, G, state, hypers)

    return Keeps


def noise_if_large(client, theta):
    total = gradients(client, theta)
    return noised(client, total, theta, client.noise("gradient") * (total.norm(dim=-1, keepdim=True) > 2))


def loss_appended(client, theta):
    release = noised(client, gradients(client, theta), theta, client.noise("gradient"))
    return torch.cat([release, 1e-6 * client.gradient_mean(theta).norm(dim=-1, keepdim=True)], dim=-1)


def size_leaked(client, theta):
    release = noised(client, gradients(client, theta), theta, client.noise("gradient"))
    return release * (rows_of(client).real_rows.view(-1, 1, 1) / client.size).to(theta.dtype)


def class_weights(client, theta):
    release = noised(client, gradients(client, theta), theta, client.noise("gradient"))
    return release * (1 + (rows_of(client).y == 0).sum(1).view(-1, 1, 1) / 1000)


def half_the_noise_twice(client, theta):
    half = client.noise("gradient", size=-(-theta.shape[-1] // 2))
    return noised(client, gradients(client, theta), theta, torch.cat([half, half], dim=-1)[..., : theta.shape[-1]])


def second_gradient_uncounted(client, theta):
    first = noised(client, gradients(client, theta), theta, client.noise("gradient"))
    second = noised(client, gradients(client, theta - 0.1 * first), theta, client.noise("gradient", 1))
    return first + second


def same_noise_in_both_steps(client, theta):
    first = noised(client, gradients(client, theta), theta, client.noise("gradient"))
    return first + noised(client, gradients(client, theta - 0.1 * first), theta, client.noise("gradient"))


def absolute_noise(client, theta):
    return noised(client, gradients(client, theta), theta, client.noise("gradient").abs())


def scaled_by_one_label(client, theta):
    flag = (rows_of(client).y[:, 0] % 2).view(-1, 1, 1)
    return noised(client, gradients(client, theta), theta, client.noise("gradient") * (1 - 1e-3 * flag))


def drawn_again(client, number):
    """The noise of a client in this round, without `client.noise`."""
    (seed,) = client._lanes.seeds
    drawn = Address(int(seed), number, client.t, 0, "gradient").normal(client.zeros().shape[-1])
    return torch.from_numpy(drawn) * client.noise_std("gradient")


def drawn_again_as_the_engine_does(client, theta):
    (seed,) = client._lanes.seeds
    drawn = np.empty((1, 1, client.zeros().shape[-1]), dtype=np.float32)
    fill_normals(drawn, client._clients, [int(seed)], client.t, 0, "gradient")
    noise = client.noise("gradient") - torch.from_numpy(drawn) * client.noise_std("gradient")
    return noised(client, gradients(client, theta), theta, noise)


def own_noise_subtracted(client, theta):
    noise = client.noise("gradient") - drawn_again(client, client._clients[0])
    return noised(client, gradients(client, theta), theta, noise)


def noise_that_cancels_in_the_sum(client, theta):
    noise = client.noise("gradient") - drawn_again(client, (client._clients[0] + 1) % 3)
    return noised(client, gradients(client, theta), theta, noise)


def seed_told(client, theta):
    (LEAKED["seed"],) = client._lanes.seeds
    LEAKED["std"] = client.noise_std("gradient")
    return noised(client, gradients(client, theta), theta, client.noise("gradient"))


class SubtractsNoise(Honest):
    def step(self, t, theta, G, state, hypers):
        drawn = Address(int(LEAKED["seed"]), 0, t, 0, "gradient").normal(theta.shape[1])
        return theta - hypers["learning_rate"] * (G - LEAKED["std"] * torch.from_numpy(drawn))


class InfiniteBroadcast(Honest):
    """The audit must not take it for a run that has diverged."""

    client = released(noise_on_the_first_coordinates)

    def initial_state(self, theta, hypers) -> State:
        return {"largest": torch.full_like(theta, torch.inf)}

    def broadcast(self, state, hypers):
        return dict(state)


class HugeNumber(Honest):
    """The audit must not take what differs elsewhere for the rounding of the huge number."""

    HUGE = 1e8

    def program(self, hypers, level="record"):
        def release(client, theta):
            noise = client.noise("gradient").clone()
            if theta.shape[-1] > 8:  # a small model is audited by statistics
                noise[..., 0] *= 300
                noise[..., 8:] *= 1e-3
            found = noised(client, gradients(client, theta), theta, noise)
            found[..., 0] += self.HUGE
            return found

        return released(release)()

    def releases(self, run):
        return (Event("gradient", run.rounds, run.privacy.sensitivity, aggregated=False),)

    def step(self, t, theta, G, state, hypers):
        G = G.clone()
        G[:, 0] -= self.HUGE
        return super().step(t, theta, G, state, hypers)


class HugeConstant(Honest):
    """The audit must not take what has hardly any noise for the rounding of the constant. Releases are float64."""

    constant, scale, quiet = 1e12, 1.0, 1e-6

    def program(self, hypers, level="record"):
        def release(client, theta):
            noise = client.noise("gradient").double()
            if theta.shape[-1] > 8:  # a small model is audited by statistics
                noise[..., 0] *= 1000
                noise[..., 8:] *= self.quiet
            found = (gradients(client, theta).double() + noise) / client.size
            return self.constant_of(client.t) + self.scale * found

        return released(release)()

    def constant_of(self, t):
        return self.constant

    def releases(self, run):
        return (Event("gradient", run.rounds, run.privacy.sensitivity, aggregated=False),)

    def step(self, t, theta, G, state, hypers):
        return super().step(t, theta, (G.double() - self.constant_of(t)) / self.scale, state, hypers).to(theta.dtype)


class CancellingConstant(HugeConstant):
    """Added in one round and subtracted in the next."""

    constant = 1e9

    def constant_of(self, t):
        return self.constant * (-1) ** t

    def initial_state(self, theta, hypers) -> State:
        return {"last": torch.zeros_like(theta, dtype=torch.float64)}

    def step(self, t, theta, G, state, hypers):
        last, state["last"] = state["last"], G.double()
        return Honest.step(self, t, theta, G + last, state, hypers).to(theta.dtype) if t > 1 else theta


class TinyRelease(HugeConstant):
    """What a record changes is a few steps of the grid to which releases are rounded."""

    constant, scale, quiet = 0.0, 1e-9, 1e-2


class InfiniteWeights(Honest):
    """Infinite in all rounds but the last."""

    client = released(noise_until_round(1))

    def step(self, t, theta, G, state, hypers):
        finite = super().step(t, theta.nan_to_num(posinf=0), G.nan_to_num(), state, hypers)
        return finite if t == hypers["rounds"] else torch.full_like(theta, torch.inf)


def into_the_state_of_round(number):
    class Keeps(Honest):
        """A checkpoint of this round has the sum."""

        def initial_state(self, theta, hypers) -> State:
            return {"sum": torch.zeros_like(theta)}

        def step(self, t, theta, G, state, hypers):
            state["sum"] = LEAKED["sum"][0].to(theta) * (t == number)
            return super().step(t, theta, G, state, hypers)

    return Keeps


def one_client_unclipped(client, theta):
    """The one of middle size."""
    total = gradients(client, theta)
    unclipped = client.gradient_mean(theta) * client.size
    return noised(client, unclipped if client._clients[0] == 1 else total, theta, client.noise("gradient"))


def sampled_unseen(*samples):
    """Draws these samples, each a rate and a step, where one of 0.3 of the rows is accounted. All rows are summed,
    without `clipped_gradient_sum`, which would notice."""

    def release(client, theta):
        for rate, step in samples:
            client.sample(rate, step)
        total, _ = client.model.clipped_gradient_sum(rows_of(client), theta, client.clip.squeeze(1))
        return noised(client, total, theta, client.noise("gradient"))

    class SampleUnused(Honest):
        def program(self, hypers, level="record"):
            return released(release, samples=True)()

        def releases(self, run):
            return (Event("gradient", run.rounds, run.privacy.sensitivity, sampling=0.3, aggregated=False),)

    return SampleUnused


class LargeBudgets(Honest):
    """The sensitivity is right up to eps 3."""

    def releases(self, run):
        sensitivity = run.privacy.sensitivity * (0.5 if run.privacy.epsilon > 3 else 1)
        return (Event("gradient", run.rounds, sensitivity),)


class FilledSample(Honest):
    """All rows are put into a sample after it was drawn, beside a release that is not sampled."""

    def program(self, hypers, level="record"):
        def release(client, theta):
            sample = client.sample(0.3)
            sample.parts[:] = [(slice(None), rows_of(client))]
            gradient = client.clipped_gradient_sum(theta, sample) + client.noise("gradient")
            return (torch.cat([gradient, client.noise("extra", size=1)], dim=-1) / client.size).to(theta.dtype)

        return released(release, samples=True, **wider(1))()

    def releases(self, run):
        gradient = Event("gradient", run.rounds, run.privacy.sensitivity, share=0.9, sampling=0.3, aggregated=False)
        return gradient, Event("extra", run.rounds, run.privacy.sensitivity, share=0.1, aggregated=False)


class UserLevel(Honest):
    levels = ("record", "user")
    user: type[ClientProgram] = UserGradient

    def program(self, hypers, level="record"):
        return self.user() if level == "user" else NoisyGradient()


def user_without_noise(client, theta):
    return clip_norm(client.gradient_mean(theta), client.clip)


def user_without_clip(client, theta):
    return client.gradient_mean(theta) + client.noise("gradient")


def user_row_count(client, theta):
    mean = client.gradient_mean(theta)
    return (clip_norm(mean, client.clip) + client.noise("gradient")) * (rows_of(client).real_rows.view(-1, 1, 1) / 20)


def coin_ignored(client, theta):
    update = clip_norm(client.gradient_mean(theta), client.clip)
    client.noised_update(update)
    return (update + client.noise("gradient")) / client._secret


class CoinIgnored(UserLevel):
    """All users take part in all rounds, which is not what is accounted."""

    user = released(coin_ignored, allows_secret_participation=True)

    def releases(self, run):
        q = run.privacy.secret_participation
        return (Event("gradient", run.rounds, run.privacy.sensitivity, sampling=q, hidden_by_sum=True),)


class OneEvent(Honest):
    def releases(self, run):
        return (Event("gradient", 1, run.privacy.sensitivity),)


class HalfSensitivity(Honest):
    """Right under zero-out only."""

    def releases(self, run):
        return (Event("gradient", run.rounds, run.privacy.clip),)


class CreditedSteps(Honest):
    client = type("Two", (LocalSteps,), {})

    def program(self, hypers, level="record"):
        return LocalSteps(2)

    hyperparameters = (learning_rate(0.5), replace(learning_rate(0.1), name="client_learning_rate"))

    def releases(self, run):
        return (Event("gradient", 2 * run.rounds, run.privacy.sensitivity, aggregated=True),)


class SampledOnPaper(Honest):
    def releases(self, run):
        return (Event("gradient", run.rounds, run.privacy.sensitivity, sampling=0.1),)


class OneSample(Honest):
    """Every step of a round uses the sample of the first."""

    hyperparameters = (
        replace(learning_rate(0.1), name="client_learning_rate"),
        replace(learning_rate(0.1), name="weight_decay"),
    )

    def program(self, hypers, level="record"):
        class Steps(SGDSteps):
            def sampled_gradient(self, client, y, step):
                total = client.clipped_gradient_sum(y, client.sample(self.rate)) + client.noise("gradient", step)
                return (total / (self.rate * client.size)).to(y.dtype)

        return Steps(2, 0.3, 1.0)

    def releases(self, run):
        return (Event("gradient", 2 * run.rounds, run.privacy.sensitivity, sampling=0.3, aggregated=False),)

    def step(self, t, theta, G, state, hypers):
        return theta + G


class BareCovariance(Honest):
    """A second release before the first round, without noise."""

    def program(self, hypers, level="record"):
        class Prepares(NoisyGradient):
            name = "prepares"
            prepares = True

            def prepare(self, client):
                gram = rows_of(client).gram(1.0).unsqueeze(1)
                return (gram + 0 * client.distinct_noise("gradient", gram.shape[-1])) / client.size

        return Prepares()

    def receive(self, prepared, which, state, hypers):
        pass


STATEFUL = {"stateful": True}

CHEATS = {
    "noise reused in pairs of rounds": cheat(noise_of_pairs),
    "no noise after round 3": cheat(noise_until_round(3)),
    "no noise in round 29": cheat(no_noise_in_round(29)),
    "noise on the first 8 coordinates": cheat(noise_on_the_first_coordinates),
    "users without noise": type("Cheat", (UserLevel,), {"user": released(user_without_noise)}),
    "users without clip": type("Cheat", (UserLevel,), {"user": released(user_without_clip)}),
    "users weighted by their rows": type("Cheat", (UserLevel,), {"user": released(user_row_count)}),
    "division by the true row count": cheat(true_row_count),
    "local steps credited to the sum": CreditedSteps,
    "one release declared": OneEvent,
    "half the sensitivity": HalfSensitivity,
    "half the sensitivity at large eps": LargeBudgets,
    "half the noise": cheat(half_noise),
    "no clipping": cheat(unclipped),
    "one class is not clipped": cheat(one_class_unclipped),
    "noise scaled by the data": cheat(noise_scaled_by_data),
    "noise scaled by one label": cheat(scaled_by_one_label),
    "noise from one address": cheat(fixed_address),
    "noise from its own generator": cheat(own_generator),
    "noise only if gradients are large": cheat(noise_if_large),
    "noise taken back in the next round": cheat(noise_taken_back),
    "the same noise in two halves": cheat(half_the_noise_twice),
    "the same noise in two steps": cheat(same_noise_in_both_steps),
    "absolute values of the noise": cheat(absolute_noise),
    "a second gradient, not counted": cheat(second_gradient_uncounted),
    "the last round's sum again": cheat(state_of_the_last_round, program=STATEFUL),
    "a norm without noise appended": cheat(loss_appended, program=wider(1)),
    "release scaled by the true size": cheat(size_leaked),
    "release scaled by the size of a class": cheat(class_weights),
    "a sum that reaches the weights beside the release": cheat(beside_the_release, ReadsWhatWasLeaked),
    "a sum that reaches the server's state": cheat(beside_the_release, into_the_state(Honest)),
    "samples on paper": SampledOnPaper,
    "one sample for two steps": OneSample,
    "a covariance without noise": BareCovariance,
    "noise that the client draws again and subtracts": cheat(own_noise_subtracted),
    "noise that the client draws again with the engine's function": cheat(drawn_again_as_the_engine_does),
    "noise of another client, so that the sum has none": cheat(noise_that_cancels_in_the_sum),
    "noise that the server draws again and subtracts": cheat(seed_told, SubtractsNoise),
    "noise on some coordinates beside an infinite broadcast": InfiniteBroadcast,
    "hardly any noise on some coordinates beside a huge number": HugeNumber,
    "hardly any noise beside a huge constant in all coordinates": HugeConstant,
    "a huge constant that cancels in the next round": CancellingConstant,
    "a release as small as the grid": TinyRelease,
    "no noise while the weights are infinite": InfiniteWeights,
    "a sum in the server's state of round 5 only": cheat(beside_the_release, into_the_state_of_round(5)),
    "one client is not clipped": cheat(one_client_unclipped),
    "a sample that is drawn and not used": sampled_unseen((0.3, 0)),
    "a sample larger than accounted": sampled_unseen((1.0, 0)),
    "a sample that is filled up": FilledSample,
    "more samples than the account has, with every record in one": sampled_unseen(*((0.3, step) for step in range(20))),
    "secret participation ignored": CoinIgnored,
}
