"""Networks that would break the clip or the saved file are refused before anything trains (network_check.py)."""

import numpy as np
import pytest
import torch
from plugin_registry import temporary_plugins
from torch import nn

from trainables import models
from trainables.audit import model_contract
from trainables.errors import UserError
from trainables.models import network_check, safetensors
from trainables.models.network_settings import NETWORKS, NetworkSettings
from trainables.models.shard import Shard
from trainables.models.tail import Tail

FEATURES, CLASSES = 8, 3
POSITIONS, WIDTH = 16, 4


@pytest.fixture(autouse=True)
def no_other_plugins():
    with temporary_plugins():
        yield


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Average(nn.Module):
    """Subtracts a moving average of the rows seen."""

    def __init__(self, seen=lambda x: x):
        super().__init__()
        self.seen = seen
        self.register_buffer("average", torch.zeros(FEATURES))

    def forward(self, x):
        self.average += 1e-3 * (self.seen(x).mean(0) - self.average)
        return x - self.average


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, FEATURES)

    def forward(self, x):
        return self.embedding(x.long())


class AtFirstCall(nn.Module):
    """Remembers the first rows."""

    def __init__(self, persistent=None):
        super().__init__()
        self.average = None
        if persistent is not None:
            del self.average
            self.register_buffer("average", None, persistent=persistent)

    def forward(self, x):
        if self.average is None:
            self.average = x.mean(0)
        return x - self.average


class ByLength(nn.Module):
    """Sorts rows by their lengths for a trained layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)

    def forward(self, x):
        order = (x != 0).sum(1).argsort(descending=True, stable=True)
        return self.norm(x[order])[order.argsort()]


class ScaledGradients(torch.autograd.Function):
    """The derivatives of all rows together have at most norm 1."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, derivative):
        return derivative / max(1.0, float(derivative.norm()))


def trimmed(x):
    longest = int((x != 0).any(0).nonzero().max()) + 1
    return x[:, :longest].mean(1, keepdim=True).expand(-1, FEATURES)


class NormAndActivation(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x).relu()


class SharedChain(nn.Module):
    """The chain of stages is an attribute, so every array has two names."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, CLASSES)
        self.chain = nn.Sequential(self.norm, self.head)

    def stages(self):
        return self.chain

    def forward(self, x):
        return self.chain(x)


class OtherForward(SharedChain):
    def forward(self, x):
        return self.chain(x.flip(1))


class NewHead(SharedChain):
    def stages(self):
        return nn.Sequential(self.norm, nn.Linear(FEATURES, CLASSES))


class WithStages(nn.Module):
    def __init__(self, stages):
        super().__init__()
        self.stages = stages


class Unused(nn.Sequential):
    def __init__(self):
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.unused = nn.LayerNorm(FEATURES)

            def forward(self, x):
                self.unused(x)
                return x

        super().__init__(Part(), nn.Linear(FEATURES, CLASSES))


class Stateful(nn.Sequential):
    def __init__(self):
        class Part(nn.Identity):
            def get_extra_state(self):
                return {"step": 1}

        super().__init__(Part(), nn.Linear(FEATURES, CLASSES))


def chain(*stages, width=FEATURES):
    return nn.Sequential(*stages, nn.LayerNorm(width), nn.Linear(width, CLASSES))


def tied():
    module = chain(nn.LayerNorm(FEATURES), nn.ReLU())
    module[0].weight, module[0].bias = module[2].weight, module[2].bias
    return module


def pool():
    """Layers that a row reaches at several positions, whose gradients may cancel."""
    return nn.Sequential(
        nn.Unflatten(1, (POSITIONS, WIDTH)),
        nn.Linear(WIDTH, 4),
        Function(lambda x: x.mean(1)),
        nn.Linear(4, CLASSES),
    )


def parsed(make, settings="cut=none,train=norm+head", features=FEATURES):
    def seeded(features, classes):
        torch.manual_seed(0)
        return make()

    NETWORKS["own"] = seeded
    return models.parse(f"network:own,{settings}", features=features, classes=CLASSES)


ROWS_DEPEND = {
    "mean": lambda: chain(Function(lambda x: x - 1e-4 * x.mean(0))),
    "batch norm": lambda: chain(nn.BatchNorm1d(FEATURES, track_running_stats=False)),
    "attention over the rows": lambda: chain(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 1, 8), nn.Flatten()
    ),
    "only far outside": lambda: chain(Function(lambda x: x / (1 + x.abs().amax(0).floor()))),
    "the next row": lambda: chain(Function(lambda x: x + torch.cat([x[1:], x[:1]]))),
    "numbers of words": lambda: chain(
        Words(), nn.TransformerEncoderLayer(FEATURES, 1, 8), nn.Flatten(), width=FEATURES**2
    ),
    "state": lambda: chain(Average()),
    "state that only words change": lambda: chain(Average(torch.floor)),
    "chance": lambda: chain(Function(lambda x: x + torch.rand_like(x))),
    "the longest row": lambda: chain(Function(trimmed), nn.Linear(FEATURES, FEATURES)),
    "the range of all values": lambda: chain(
        Function(lambda x: (x + 1) / 2 if x.min() < 0 else x), nn.Linear(FEATURES, FEATURES)
    ),
    "the first rows": lambda: chain(AtFirstCall()),
    "the first rows, as a hidden buffer": lambda: chain(AtFirstCall(persistent=False)),
    "the first rows, as a buffer": lambda: chain(AtFirstCall(persistent=True)),
}


@pytest.mark.parametrize("cut", ["none", "last"])
@pytest.mark.parametrize("name", ROWS_DEPEND)
def test_rows_that_depend_on_one_another_are_refused(name, cut):
    """Also in the frozen stages before the cut."""
    if cut == "last":
        cut = str(len(ROWS_DEPEND[name]()) - 2)
    with pytest.raises(
        UserError, match=r"^(network 'own': (its rows|the network changes|two calls)|layer '0' has no run)"
    ):
        parsed(ROWS_DEPEND[name], f"cut={cut},train=norm+head")


def test_gradients_that_depend_on_other_rows_are_refused():
    for make in (
        lambda: chain(ByLength()),
        lambda: chain(nn.BatchNorm1d(FEATURES), Function(ScaledGradients.apply), Function(lambda x: x**3)),
    ):
        with pytest.raises(UserError, match="its rows depend on one another: replacing a row changes the gradients"):
            parsed(make)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_checks_do_not_depend_on_the_scales(scale):
    with pytest.raises(UserError, match="may share parameters"):
        parsed(tied, f"cut=none,train=norm+head,norm_scale={scale}")


@pytest.mark.parametrize(
    ("make", "train", "error"),
    [
        (
            lambda: chain(Function(lambda x: x.unflatten(1, (2, 4)).flatten(0, 1)), width=4),
            "norm+head",
            "layer '1' gives 10 rows for 5",
        ),
        (
            lambda: chain(NormAndActivation(FEATURES)),
            "norm+head",
            "layer '0' is a NormAndActivation with its own `forward`",
        ),
        (tied, "norm+head", "may share parameters"),
        (OtherForward, "norm+head", "the module with the trained values computes scores that differ"),
        (NewHead, "norm+head", "its last stage '1' is not a part of the module"),
        (nn.Sequential, "norm+head", "has no stages"),
        (lambda: None, "norm+head", "must be a torch.nn.Sequential"),
        (lambda: WithStages(nn.ModuleList([nn.LayerNorm(4)])), "norm+head", "must be a torch.nn.Sequential, or have"),
        (lambda: WithStages(lambda: [nn.LayerNorm(4)]), "norm+head", "must be a torch.nn.Sequential, or have"),
        (Stateful, "norm+head", "cannot hold '0._extra_state' of type dict"),
        (Unused, "norm+head", "layer '0.unused' cannot train: its output is not used"),
        (
            lambda: chain(nn.LayerNorm(FEATURES), Function(lambda x: x.relu_())),
            "norm+head",
            "or an operation changes the output of a trained layer in place; use one that",
        ),
        (
            lambda: chain(nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, FEATURES))),
            "lora+head",
            "cannot be written into it: `weight`",
        ),
        (
            lambda: chain(nn.Linear(FEATURES, 5), nn.Linear(5, FEATURES)),
            "lora+head,rank=9",
            "rank = 9: layer '0' has a rank of at most 5",
        ),
        (lambda: chain(), "lora+head", r"train = lora matches no layer .*, but only: none"),
        (lambda: chain(), "norm:x+head", r"train = norm:x matches no layer .*, but only: 0"),
        (
            lambda: chain(Function(lambda x: x.log().log())),
            "norm+head",
            "its outputs for rows between 0 and 1 are not all finite",
        ),
        (lambda: chain(nn.Unflatten(1, (3, 3))), "norm+head", "for rows of 8 features raised RuntimeError: unflatten"),
    ],
)
def test_other_networks_that_are_refused(make, train, error):
    with pytest.raises(UserError, match=error):
        parsed(make, f"cut=none,train={train}")


def test_a_layer_that_is_called_with_a_keyword():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(FEATURES)

        def forward(self, x):
            return self.norm(input=x)

    assert parsed(lambda: nn.Sequential(Named(), nn.Linear(FEATURES, CLASSES))).dimension > 0


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return chain(nn.Unflatten(1, (2, 4)), nn.TransformerEncoder(layer, 2), nn.Flatten())


def shared_activation():
    activation = nn.ReLU()
    return chain(nn.Linear(FEATURES, FEATURES), activation, nn.Linear(FEATURES, FEATURES), activation)


@pytest.mark.parametrize(
    ("make", "train"),
    [
        *((make, train) for make in (encoder, shared_activation) for train in ("norm+head", "bias+lora+head")),
        (lambda: chain(nn.RMSNorm(FEATURES)), "norm+head"),
    ],
)
def test_the_saved_network_computes_what_was_trained(make, train):
    model = parsed(make, f"cut=none,train={train}")
    weights, x = model.initial(0) + 0.3, torch.randn(5, FEATURES)
    plain = make().eval()
    plain.load_state_dict(model.state_dict(weights))
    torch.testing.assert_close(plain(x), model.scores(torch.cat([x, torch.ones(5, 1)], 1), weights))


def test_packaged_networks_pass_all_checks(shared_data):
    weights = shared_data("backbones/cifar100_resnet20.pth")
    model = models.parse(f"network:resnet20,train=norm+head,weights={weights}", features=3072, classes=CLASSES)
    tail = Tail(model.settings, model.network)
    network_check.checked(tail, model.arrays(model.initial(0) + 0.03), model.features)


@pytest.mark.parametrize("present", [4, 5])
def test_absent_records_add_nothing_to_the_private_mean(present):
    """Their rows are zeros, for which the network may compute anything."""
    model = parsed(lambda: chain(Function(lambda x: 10 * (x - 1))), "cut=none,train=norm+head")
    x = np.ones((5, FEATURES), np.float32) * np.arange(1, 6)[:, None]
    shard = Shard.build([(x[:present], np.zeros(present, dtype=np.int64))], rows=5, sizes=[5])
    alone = [Shard.build([(row[None], np.zeros(1, dtype=np.int64))]) for row in x[:present]]
    expected = sum(model.feature_sum(one, 1.0) for one in alone)
    torch.testing.assert_close(model.feature_sum(shard, 1.0), expected, atol=1e-6, rtol=1e-6)


def test_stages_before_the_cut_are_computed_with_a_public_number_of_rows():
    model, seen = parsed(lambda: chain(nn.Linear(FEATURES, FEATURES)), "cut=1,train=norm+head"), []
    tail = model._tail("cpu", torch.float32)
    tail.prefix.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    found = models.at_cut(model, np.ones((3, FEATURES), np.float32), public_size=10)
    assert (len(found), seen) == (3, [10])


def rows_of(count, spread=1.0):
    return (30 + spread * np.random.default_rng(0).normal(size=(count, POSITIONS * WIDTH))).astype(np.float32)


@pytest.mark.parametrize("magnitude", [1e6, 1e14, 1e17])
def test_a_row_whose_terms_cancel_moves_the_sum_by_no_more_than_two_clips(magnitude):
    """Its terms are as large as the features, and their sum is small: they must not round the sums of other rows."""
    model = parsed(pool, "cut=none,train=lora+head,rank=2", features=POSITIONS * WIDTH)
    theta, clip, count = (model.initial(0) + 0.1)[None], 0.01, 300
    x, y = rows_of(count), np.zeros(count, dtype=np.int64)

    def total(x):
        return model.clipped_gradient_sum(Shard.build([(models.at_cut(model, x), y)]), theta, torch.tensor([clip]))[0]

    before = total(x)
    for row in (count // 2, count - 1):
        other = x.copy()
        half = magnitude * (1 + np.random.default_rng(1).random((POSITIONS // 2, WIDTH)))
        other[row] = np.stack([half, -half], 1).reshape(-1)
        assert float((total(other) - before).norm()) <= 2 * clip


def test_a_row_whose_norm_overflows_leaves_the_other_rows():
    model = parsed(lambda: chain(nn.Linear(FEATURES, FEATURES)))
    x, y = np.random.default_rng(0).normal(size=(9, FEATURES)).astype(np.float32), np.arange(9) % CLASSES
    x[4, 0] = 1e20
    theta, clip = (model.initial(0) + 0.1)[None], torch.tensor([1.0])
    found = model.clipped_gradient_sum(Shard.build([(x, y)]), theta, clip)[0]
    kept = [row for row in range(9) if row != 4]
    expected = model.clipped_gradient_sum(Shard.build([(x[kept], y[kept])]), theta, clip)[0]
    torch.testing.assert_close(found, expected)


def test_other_weights_have_another_hash():
    def hash_of(make):
        return models.weights_hash(parsed(make).settings.text, features=FEATURES, classes=CLASSES)

    def shifted():
        module = chain()
        module[0].bias.data += 1
        return module

    def other_head():
        module = chain()
        module[-1].bias.data += 1
        return module

    assert hash_of(chain) == hash_of(lambda: chain())
    assert hash_of(chain) != hash_of(shifted)
    assert hash_of(chain) == hash_of(other_head)  # the head is replaced


def test_weights_that_differ_at_every_call_are_refused():
    NETWORKS["own"] = lambda features, classes: chain(nn.Linear(features, features))
    with pytest.raises(UserError, match=r"network 'own' has other weights each time .* torch\.manual_seed"):
        models.parse("network:own,train=norm+head", features=FEATURES, classes=CLASSES)
    NETWORKS["own"] = lambda features, classes: nn.Sequential(nn.LayerNorm(features), nn.Linear(features, classes))
    models.parse("network:own,train=norm+head", features=FEATURES, classes=CLASSES)


def test_every_name_of_an_array_is_saved_with_the_trained_values(tmp_path):
    model = parsed(SharedChain)
    weights = model.initial(0) + 0.3
    plain = SharedChain()
    plain.load_state_dict(model.state_dict(weights))
    x = torch.randn(5, FEATURES)
    expected = model.scores(torch.cat([x, torch.ones(5, 1)], 1), weights)
    torch.testing.assert_close(plain(x), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bool])
def test_buffers_of_any_kind_are_saved(dtype, tmp_path):
    def make():
        module = chain(nn.Identity())
        module[0].register_buffer("ids", torch.ones(3).to(dtype))
        return module.half() if dtype == torch.float16 else module

    model = parsed(make, "cut=1,train=norm+head")
    state = model.state_dict(model.initial(0))
    safetensors.write(tmp_path / "model.safetensors", state, {}, private=False)
    assert state["0.ids"].dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert models.at_cut(model, np.zeros((2, FEATURES), np.float32)).dtype == np.float32


def test_blocks_of_rows_count_the_outputs_of_frozen_layers():
    def wide():
        return nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 1 << 14, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(1 << 14, CLASSES),
        )  # fmt: skip

    rows = np.zeros((2000, FEATURES), np.float32)
    for cut in ("none", "4"):
        seen = []
        model = parsed(wide, f"cut={cut},train=head")
        tail = model._tail("cpu", torch.float32)
        for part in (tail.prefix, tail.body):
            for stage in part:
                stage.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output.numel()))
        shard = Shard.build([(models.at_cut(model, rows), np.zeros(2000, dtype=np.int64))])
        model.clipped_gradient_sum(shard, model.initial(0)[None], torch.tensor([1.0]))
        assert max(seen) <= 1 << 25


def test_the_model_contract_covers_networks_with_a_cut_and_a_fixed_width():
    def fixed():
        return chain(nn.Linear(20, 6), nn.Linear(6, FEATURES))

    parsed(fixed, features=20)
    results = list(model_contract.run_checks("network:own,cut=1,train=norm+head", features=20))
    assert [result.failure for result in results] == [""] * 5


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"rank": float("inf"), "train": ["lora", "head"]}, "rank = inf is not a whole number"),
        ({"rank": float("nan"), "train": ["lora", "head"]}, "rank = nan is not a whole number"),
        ({"train": 5}, r"train = 5 is not a list of kinds"),
        ({"train": ["head:*", "head"]}, "takes no pattern"),
        ({"network": None}, "names no network"),
        ({"lora_scale": 2.0}, "trains no lora parameters"),
    ],
)
def test_settings_that_are_refused(given, error):
    with pytest.raises(UserError, match=error):
        NetworkSettings.from_mapping({"network": "own", **given})


def test_settings_keep_all_digits():
    settings = NetworkSettings("own", norm_scale=0.12345678)
    assert NetworkSettings.parse(settings.text) == settings
