"""Networks whose norm layers, biases and LoRA factors train next to the head."""

import copy
import json
import re
import struct
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from every_kernel import on_a_gpu
from plugin_registry import temporary_plugins
from repository_files import DOCS, REPOSITORY, blocks
from small import run, trial
from torch import nn
from torch.func import functional_call, grad, vmap

from benchmarks import tail as tail_benchmark
from orchestrator.execution import study_run
from orchestrator.execution.pack_cost import LAYER_S, NOISE_S, PackCost
from orchestrator.execution.packing import passes
from orchestrator.execution.progress import View
from orchestrator.execution.training import from_best, saved_model, set_up, train
from orchestrator.execution.training_options import TrainingOptions
from orchestrator.study.reading import parse
from trainables import methods, models, plugins
from trainables.audit import model_contract, paired
from trainables.data import features
from trainables.data import partition as partitions
from trainables.errors import UserError
from trainables.federation import pack
from trainables.federation.hosts import Hosts
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.server import Server, run_pack
from trainables.federation.trial_spec import DataSpec, ProblemSpec
from trainables.models import recorded
from trainables.models.network import NetworkModel
from trainables.models.network_settings import NETWORKS, NetworkSettings
from trainables.models.recorded import LARGE_LANES, _Recording
from trainables.models.shard import Shard
from trainables.models.tail import Tail
from trainables.privacy.plan import PrivacySettings

EXAMPLE = REPOSITORY / "examples" / "plugin" / "tiny_transformer.py"
ALL = "network:tiny-transformer,cut=1,train=norm+bias+lora+head,norm_scale=0.5,rank=2"
IMAGES = "network:images,cut=none,train=norm+bias+head,norm_scale=0.2"
PIXELS, CLASSES, ROWS = 2 * 6 * 6, 3, 40
DEVICES = ["cpu", pytest.param("cuda", marks=on_a_gpu)]


def images(features: int, classes: int) -> nn.Module:
    """Batch norm after convolutions, group norm, and a rectifier that works in place."""
    torch.manual_seed(1)
    module = nn.Sequential(
        *(nn.Unflatten(1, (2, 6, 6)), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 6, 3, bias=False), nn.GroupNorm(2, 6), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, classes)),
    )
    module.train()(torch.randn(64, features))  # sets the running statistics
    return module


@pytest.fixture(autouse=True)
def networks(monkeypatch):
    for variable in (plugins.VARIABLE, plugins.FOLDERS):
        monkeypatch.setenv(variable, "")
    with temporary_plugins():
        plugins.use(str(EXAMPLE))
        NETWORKS["images"] = images
        yield
        NETWORKS.pop("images")


def shard_of(model, count=ROWS, scale=1.0, device="cpu"):
    random = np.random.default_rng(0)
    x = (scale * random.normal(size=(count, model.features))).astype(np.float32)
    labels = np.arange(count) % model.classes
    return Shard.build([(models.at_cut(model, x), labels)], device), x, labels


def per_example_gradients(model, weights, x, labels):
    """With torch.func on the plain module: a scale s and LoRA's product enter by the chain rule."""
    module, settings = copy.deepcopy(model.network.module).eval(), model.settings
    plain = {name: value.detach() for name, value in module.state_dict().items()}
    head = list(model.network.stages)[-1]

    def loss(flat, row, label):
        arrays, state = model.arrays(flat), dict(plain)
        for name, value in arrays.items():
            layer, _, kind = name.rpartition(".")
            if name == "head":
                state |= {f"{head}.weight": value[:-1].T, f"{head}.bias": value[-1]}
            elif kind == "lora_down":
                product = arrays[f"{layer}.lora_up"] @ value
                state[f"{layer}.weight"] = plain[f"{layer}.weight"] + settings.lora_scale * product
            elif kind != "lora_up":
                norm = not isinstance(module.get_submodule(layer), nn.Linear | nn.Conv2d)
                state[name] = plain[name] + (settings.norm_scale if norm else settings.bias_scale) * value
        scores = functional_call(module, state, (row.unsqueeze(0),))
        return nn.functional.cross_entropy(scores, label.unsqueeze(0))

    return vmap(grad(loss), in_dims=(None, 0, 0))(weights, torch.from_numpy(x), torch.from_numpy(labels))


@pytest.mark.parametrize(("text", "features"), [(ALL, 24), (IMAGES, PIXELS)])
@pytest.mark.parametrize("clip", [0.7, 1e9])
@pytest.mark.parametrize("device", DEVICES)
def test_clipped_sums_are_those_of_per_example_gradients(text, features, clip, device):
    model = models.parse(text, features=features, classes=CLASSES)
    shard, x, labels = shard_of(model, device=device)
    weights = model.initial(3) + 0.1
    rows = per_example_gradients(model, weights, x, labels).double()
    norms = rows.norm(dim=1, keepdim=True)
    expected = (rows * (clip / norms).clamp(max=1)).sum(0)
    weights, clips = weights.to(device), torch.tensor([clip], device=device)
    total, seen = model.clipped_gradient_sum(shard, weights[None], clips, diagnose=True)
    assert (total[0, 0].cpu() - expected).norm() <= 1e-5 * expected.norm()
    assert int(seen.clipped) == int((norms > clip).sum())
    tail = model._tail(device, torch.float32)
    with torch.no_grad():
        parts, _ = tail.gradients(model._at_cut_shape(shard.x[0, :, :-1]), shard.y[0], model.arrays(weights))
    ours = sum(part.squared_norms() for part in parts).sqrt().cpu()
    torch.testing.assert_close(ours, norms.squeeze(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("text", "features"), [(ALL, 24), (IMAGES, PIXELS)])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_no_row_contributes_more_than_the_clip(precision, text, features, device):
    """Also where the pairs of positions nearly cancel, and where a row is not finite."""
    model = models.parse(text, features=features, classes=CLASSES)
    for scale in (1.0, 1e3, 1e30):
        shard, *_ = shard_of(model, 12, scale, device)
        weights = torch.stack([5 * model.initial(1), model.initial(2) + 0.3]).to(device)
        clip = torch.tensor([0.5, 0.01], device=device)
        for row in range(12):
            one = replace(
                shard,
                x=shard.x[:, row : row + 1],
                y=shard.y[:, row : row + 1],
                norm=shard.norm[:, row : row + 1],
                precision=precision,
            )
            total, _ = model.clipped_gradient_sum(one, weights, clip)
            assert torch.isfinite(total).all()
            assert (total[0].norm(dim=1) <= clip.double()).all()


@pytest.mark.parametrize(("text", "features"), [(ALL, 24), (IMAGES, PIXELS)])
@pytest.mark.parametrize("device", DEVICES)
def test_lanes_and_clients_do_not_change_bits(text, features, device):
    model = models.parse(text, features=features, classes=CLASSES)
    x, labels = shard_of(model)[1:]
    x = models.at_cut(model, x)
    clients = [(x[:30], labels[:30]), (x[30:], labels[30:])]
    theta = torch.stack([model.initial(seed) for seed in range(3)]).to(device)
    clip = torch.tensor([0.5, 1.0, 2.0], device=device)
    together, _ = model.clipped_gradient_sum(Shard.build(clients, device), theta, clip)
    for lane in range(3):
        for client in range(2):
            one = slice(lane, lane + 1)
            alone, _ = model.clipped_gradient_sum(Shard.build([clients[client]], device), theta[one], clip[one])
            assert torch.equal(alone[0, 0], together[client, lane])


@pytest.mark.parametrize("count", [0, 5, 6])
def test_a_sample_is_computed_with_as_many_rows_as_are_public(count, monkeypatch):
    """Algorithms are chosen by the number of rows. The padding counts nothing: the sum is that of the rows alone."""
    model = models.parse(IMAGES, features=PIXELS, classes=CLASSES)
    whole, x, labels = shard_of(model)
    theta = 0.1 * torch.randn(1, model.dimension, generator=torch.Generator().manual_seed(3))
    clip, computed, original = torch.tensor([0.7]), [], Tail.gradients
    monkeypatch.setattr(
        Tail, "gradients", lambda tail, x, *rest: (computed.append(len(x)), original(tail, x, *rest))[1]
    )
    found, diagnostics = model.clipped_gradient_sum(
        whole.sample([np.arange(count)], multiple=8), theta, clip, diagnose=True
    )
    assert computed == [8]
    if count == 0:
        assert not found.any()
        assert not diagnostics.loss.any()
        assert not diagnostics.clipped.any()
        return
    alone = Shard.build([(models.at_cut(model, x[:count]), labels[:count])])
    expected, of_alone = model.clipped_gradient_sum(alone, theta, clip, diagnose=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(diagnostics.loss, of_alone.loss)
    assert torch.equal(diagnostics.clipped, of_alone.clipped)


def test_small_clients_cost_time_per_layer():
    """Lanes and clients are computed one after the other: 5 rounds, 3 clients, 2 lanes, 8 layers behind the cut and the
    head. The noise of a seed and client takes 6 us per round."""
    problem = problem_of()
    pack = [trial(problem, "dp-fedgd", {}, rounds=5, seed=seed) for seed in (1, 2)]
    assert problem.model.layers == 8 + 1
    expected = 5 * (3 * 2 * 9 * LAYER_S + 3 * 2 * NOISE_S)
    assert PackCost.of(pack, problem, "cpu").overhead_s == pytest.approx(expected)


def test_clients_that_do_not_take_part_cost_no_time_on_a_cpu():
    """Two seeds draw different clients: at a participation of 0.1, 19% of them take part for one of the seeds."""
    problem = problem_of()

    def seconds(participation):
        hypers = {"local_steps": 1, "sampling_rate": 0.2, "participation": participation}
        pack = [trial(problem, "dp-fedadamw", hypers, rounds=5, seed=seed) for seed in (1, 2)]
        return PackCost.of(pack, problem, "cpu").overhead_s - 5 * 3 * 2 * NOISE_S

    assert seconds(0.1) == pytest.approx(0.19 * seconds(1.0))
    assert seconds(0.7) == pytest.approx(0.91 * seconds(1.0))


def test_a_layer_with_a_parametrization_counts_like_a_plain_one(monkeypatch):
    def plain(features: int, classes: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(features, 16), nn.LayerNorm(16), nn.Linear(16, classes))

    def normed(features: int, classes: int) -> nn.Module:
        module = plain(features, classes)
        nn.utils.parametrizations.weight_norm(module[0])
        return module

    monkeypatch.setitem(NETWORKS, "plain", plain)
    monkeypatch.setitem(NETWORKS, "normed", normed)
    one, other = (
        models.parse(f"network:{name},cut=none,train=norm+head", features=PIXELS, classes=CLASSES)
        for name in ("plain", "normed")
    )
    assert one.operations == other.operations
    assert one.layers == other.layers - 1, "its parametrization is a layer, too"


@pytest.mark.parametrize(
    ("clients", "memory", "network", "recorded"),
    [(2, 1 << 37, "resnet20", True), (1, 1 << 37, "resnet20", False), (2, 1 << 14, "resnet20", False),
     (2, 1 << 37, "images", False), (64, 1 << 37, "resnet20", True), (65, 1 << 37, "resnet20", False)],
)  # fmt: skip
def test_which_rounds_are_recorded(monkeypatch, clients, memory, network, recorded):
    """Rounds of packaged networks, whose activations fit, of several clients together, but not of very many."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    model = models.parse(IMAGES, features=PIXELS, classes=CLASSES)
    monkeypatch.setattr(model, "settings", replace(model.settings, network=network))
    x = models.at_cut(model, np.zeros((ROWS, PIXELS), dtype=np.float32))
    shard = Shard.build([(x, np.arange(ROWS) % CLASSES)] * clients)
    assert model.can_be_recorded(shard) == recorded


def test_the_model_contract_holds():
    text = ALL.replace("0.5", "0.3")
    assert [result.failure for result in model_contract.run_checks(text, features=24)] == [""] * 5


def problem_of(text=ALL, data="synthetic-frozen:90,40,24,3"):
    loaded = features.load(data)
    spec = ProblemSpec(
        data=DataSpec(fingerprint=loaded.fingerprint),
        partition=partitions.parse("iid", clients=3, seed=42),
        train_on="all",
        evaluate_on="test",
        model=text,
    )
    return Problem.prepare(loaded, spec)


def centred(spec, share=0.05):
    return spec.model_copy(update={"preprocess": spec.preprocess.model_copy(update={"center": share, "bound": 3.0})})


def test_a_resumed_pack_has_the_same_bits():
    """On another number of hosts, too. Centred: the centre is part of the checkpoint."""
    problem = problem_of()
    own = {"rank": 3, "norm_scale": 0.3}
    trials = [centred(trial(problem, "dp-fedadam", own, rounds=4, every=2, seed=seed)) for seed in (1, 2)]
    whole = run(trials, problem)
    assert whole == run(trials, problem, restart_at=2, hosts=3)
    assert run(trials[1:], problem) == {trials[1].key: whole[trials[1].key]}


@pytest.mark.parametrize("method", ["dp-fedgd", "dp-fedadamw", "dp-fedsofim", "dp-scaffold"])
def test_first_order_methods_train_it(method):
    problem = problem_of("network:tiny-transformer,cut=3,train=norm+lora:*.out+head")
    few = {"local_steps": 2} if "local_steps" in {h.name for h in methods.get(method).hyperparameters} else {}
    spec = trial(problem, method, few, rounds=2, every=2)
    pack.check(spec, problem)
    (result,) = run_pack([spec], ProblemData.of(problem)).values()
    assert result.state == "done"


@on_a_gpu
@pytest.mark.parametrize(("cut", "train"), [("none", "norm+head"), ("layer3", "norm+head"), ("fc", "head")])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("method", "clipping", "lanes"),
    [("dp-fedadam", "plain", 1), ("dp-fedavg", "plain", 3), ("dp-fedgd", "automatic", 5)],
)
def test_rounds_recorded_as_cuda_graphs_have_the_same_bits(
    cut, train, precision, method, clipping, lanes, tmp_path, monkeypatch
):
    """In packs with different centres, weights and seeds, one pack after another. Packs of many lanes are not
    recorded."""
    _, weights = tail_benchmark.network(tmp_path)
    data = features.from_arrays(tail_benchmark.images(600), "images")
    spec = ProblemSpec(
        data=DataSpec(fingerprint=data.fingerprint),
        partition=partitions.parse("dirichlet:1", clients=4, seed=42),
        train_on="all",
        evaluate_on="test",
        model=f"network:resnet20,cut={cut},train={train},weights={weights}",
    )
    problem = Problem.prepare(data, spec)
    monkeypatch.setattr(recorded, "SMALL_LANES", 0)  # the server's steps are not recorded
    replayed, original = [], _Recording.__call__
    monkeypatch.setattr(_Recording, "__call__", lambda self, *args: (replayed.append(1), original(self, *args))[1])

    def packs():
        for number, scale in enumerate((0.1, 0.3)):
            own = {} if train == "head" else {"norm_scale": scale}
            more = {"local_steps": 2} if method == "dp-fedavg" else {}
            pack_trials = [
                trial(problem, method, {**own, **more}, rounds=8, every=4, seed=10 * number + lane, clipping=clipping)
                for lane in range(lanes)
            ]
            made = [centred(one.model_copy(update={"precision": precision})) for one in pack_trials]
            yield run(made, problem, device="cuda")

    found = list(packs())
    assert bool(replayed) == (lanes <= LARGE_LANES)
    monkeypatch.setattr(NetworkModel, "can_be_recorded", lambda *_: False)
    replayed.clear()
    assert list(packs()) == found
    assert not replayed


def test_sampled_steps_of_a_network_on_a_gpu_count_as_steps_on_all_rows():
    """A round of two steps on a fifth of the rows of a tenth of the clients. On a CPU, all takes time in proportion to
    the rows."""
    hypers = {"local_steps": 2, "sampling_rate": 0.2, "participation": 0.1}
    of_network, of_head = (trial(problem_of(text), "dp-fedadamw", hypers) for text in (ALL, "softmax"))
    assert passes(of_network, "cuda") == pytest.approx(2 * 0.1)
    assert passes(of_network, "cpu") == passes(of_head, "cpu") == pytest.approx(2 * 0.2 * 0.1)
    assert passes(of_head, "cpu", seeds=2) == pytest.approx(2 * 0.2 * 0.19), "each seed draws its own clients"
    assert passes(of_head, "cuda") == pytest.approx(2 * 0.2), "clients are computed together"
    program, (network, head) = pack.program_of(of_head), (problem_of(text).model for text in (ALL, "softmax"))
    assert pack.is_computed_client_by_client(program, network, "cuda")
    assert pack.is_computed_client_by_client(program, head, "cpu")
    assert not pack.is_computed_client_by_client(program, head, "cuda")


@pytest.mark.parametrize("method", ["dp-fedfc", "dp-fednew", "dp-fednewton"])
def test_methods_that_need_the_closed_form_refuse_it(method):
    problem = problem_of()
    with pytest.raises(UserError, match=f"{method} cannot train it"):
        pack.check(trial(problem, method), problem)


def test_a_published_program_that_clips_by_layer_refuses_more_than_two():
    """Its privacy account holds for two layers."""
    problem = problem_of()
    spec = trial(problem, "dp-fedadamw", {"as_released": True}, rounds=2)
    with pytest.raises(UserError, match=r"^model = .* has 20 arrays .*dp-fedadamw .* at most 2$"):
        pack.check(spec, problem)


def test_training_starts_from_the_network_as_it_is(monkeypatch):
    """Also with a norm layer over two dimensions, whose scale is a matrix."""

    def planes(features: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (6, -1)), nn.LayerNorm((6, 12)), nn.Flatten(), nn.Linear(72, classes))

    monkeypatch.setitem(NETWORKS, "planes", planes)
    model = models.parse("network:planes,cut=1,train=norm+head", features=PIXELS, classes=CLASSES)
    arrays = model.arrays(model.initial(3))
    assert arrays.pop("head").any()
    assert len(arrays) == 2
    assert not any(values.any() for values in arrays.values())


def test_the_centre_of_the_head_inputs_moves_into_the_saved_constant():
    problem = problem_of()
    spec = centred(trial(problem, "dp-fedgd", rounds=2, every=2))
    server = Server(Hosts(1))
    server.open([spec], ProblemData.of(problem))
    server.advance(2)
    rows = Shard.build([(models.at_cut(problem.model, problem.x_eval), problem.y_eval)])
    weights = torch.from_numpy(server.final_weights())
    scores = problem.model.scores(rows.x[0], weights)
    accuracy = 100 * float((scores.argmax(1).numpy() == problem.y_eval).mean())
    assert accuracy == pytest.approx(server.results[spec.key].metrics["accuracy"][2])
    loss = float(nn.functional.cross_entropy(scores, rows.y[0]))
    assert loss == pytest.approx(server.results[spec.key].metrics["loss"][2], rel=1e-5)


@pytest.mark.audits
def test_the_paired_audit_passes():
    text = "network:words,cut=none,train=norm+lora+head,rank=1"

    def words(features: int, classes: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(features, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, classes))

    NETWORKS["words"] = words
    try:
        claim = PrivacySettings(epsilon=1.0)
        result = paired.audit("dp-fedgd", claim, {}, model=text, repetitions=512)
        assert not result.caught
    finally:
        NETWORKS.pop("words")


@pytest.mark.audits
def test_the_audit_passes_for_a_centred_network_that_maps_zeros_far_away(monkeypatch):
    """The row of an absent record is zeros. Its head input is not."""

    class Shift(nn.Module):
        def forward(self, x):
            return 100 * (x - 0.5)

    def shifted(features: int, classes: int) -> nn.Module:
        return nn.Sequential(Shift(), nn.Linear(features, classes))

    monkeypatch.setitem(NETWORKS, "shifted", shifted)
    claim, text = PrivacySettings(epsilon=1.0, adjacency="zero-out"), "network:shifted,cut=none,train=head"
    result = paired.audit("dp-fedgd", claim, {}, model=text, center=0.9, rounds=1, repetitions=10_000)
    assert not result.caught


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("network:nothing", "is unknown"),
        ("network:tiny-transformer,cut=9", "is no stage"),
        ("network:tiny-transformer,train=norm", "lacks the head"),
        ("network:tiny-transformer,train=lora:*.nothing+head", "matches no layer"),
        ("network:tiny-transformer,train=conv+head", "is unknown"),
        ("network:tiny-transformer,rank=0", "rank"),
        ("network:tiny-transformer,depth=2", "is unknown"),
        ("network:mixing,train=norm+head", "depend on"),
    ],
)
def test_errors_name_what_is_wrong(text, error):
    class Mixing(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    NETWORKS["mixing"] = lambda features, classes: nn.Sequential(
        nn.LayerNorm(features), Mixing(), nn.Linear(features, classes)
    )
    try:
        with pytest.raises(UserError, match=error):
            models.parse(text, features=24, classes=3)
    finally:
        NETWORKS.pop("mixing")


def test_a_hyperparameter_must_belong_to_what_trains():
    problem = problem_of("network:tiny-transformer,train=norm+head")
    with pytest.raises(UserError, match=r"rank = 2: .* trains no lora parameters"):
        pack.check(trial(problem, "dp-fedgd", {"rank": 2}), problem)


@pytest.mark.data
@pytest.mark.parametrize("cut", ["none", "layer3", "fc"])
def test_pixels_through_resnet20_give_the_paper_s_features(shared_data, cut):
    """At the cut or, from there on, at the head."""
    images, given = (np.load(shared_data(f"cifar10-{what}.npz")) for what in ("images-sample", "resnet20"))
    weights = shared_data("backbones/cifar100_resnet20.pth")
    kinds = "head" if cut == "fc" else "norm+head"
    model = models.parse(f"network:resnet20,cut={cut},train={kinds},weights={weights}", features=3072, classes=10)
    x, y = images["x_test"][:4].reshape(4, -1) / np.float32(255), np.zeros(4, dtype=np.int64)
    shard = Shard.build([(models.at_cut(model, x[i : i + 1]), y[:1]) for i in range(4)])
    found = model.feature_sum(shard, 1e9).numpy()
    np.testing.assert_allclose(found, given["x_test"][:4], atol=5e-3)


def test_text_and_mapping_are_the_same():
    mapping = {"network": "resnet20", "cut": "layer3", "train": ["norm", "head"], "norm_scale": 0.2}
    settings = NetworkSettings.from_mapping(mapping)
    assert settings.text == "network:resnet20,cut=layer3,train=norm+head,norm_scale=0.2"
    assert NetworkSettings.parse(settings.text) == settings


def test_the_page_shows_the_example_and_its_study_runs(tmp_path):
    (shown,), studies = blocks(DOCS / "train-layers.md", "python"), blocks(DOCS / "train-layers.md", "yaml")
    text = (EXAMPLE.parent / "lora.yaml").read_text()
    assert shown == EXAMPLE.read_text()
    assert studies[-1] == text
    study = parse(text, "lora.yaml", tmp_path)
    study_run.run(study, text, tmp_path / "results", View(), backend="local")
    table = (tmp_path / "results" / "tables" / "accuracy.md").read_text()
    assert "DP-FedGD, LoRA" in table
    assert "DP-FedGD, head alone" in table
    best = tmp_path / "results" / "best.yaml"
    assert from_best(best, "LoRA", 42, None).trial.code
    best.write_text(re.sub(r"code: \S+", "code: 0123", best.read_text()))
    with pytest.raises(UserError, match="the weights of the network have changed"):
        from_best(best, "LoRA", 42, None)


def read_safetensors(path):
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    metadata, kinds = header.pop("__metadata__"), {"F32": np.float32, "I64": np.int64}
    arrays = {
        name: torch.from_numpy(
            np.frombuffer(data[slice(*part["data_offsets"])], dtype=kinds[part["dtype"]]).copy()
        ).reshape(part["shape"])
        for name, part in header.items()
    }
    return arrays, metadata


@pytest.mark.parametrize(("text", "features"), [(ALL, 24), (IMAGES, PIXELS)])
def test_a_saved_network_loads_into_the_plain_module(tmp_path, text, features):
    data = f"synthetic-frozen:90,40,{features},3"
    options = TrainingOptions(
        **{"method": "dp-fedgd", "epsilon": 5.0, "model": text, "rounds": 2, "clients": 3, "center": 0.05},
        hyperparameters={"norm_scale": 0.7},
        hosts=1,
    )
    training = set_up(data, options)
    trained = train(training, address=None, hosts=1, on_round=None)
    saved_model(training, trained, secret=False).save(tmp_path / "model.safetensors")
    arrays, metadata = read_safetensors(tmp_path / "model.safetensors")
    about = json.loads(metadata["fedsweep"])
    assert "norm_scale=0.7" in about["model"], "hyperparameters of the trial take precedence"
    account = about["provenance"]
    assert account["epsilon"]["actual"]["local"] == pytest.approx(5.0, rel=1e-3)
    problem = training.problem
    module = copy.deepcopy(problem.model.network.module).eval()
    module.load_state_dict(arrays)
    with torch.no_grad():
        predicted = module(torch.from_numpy(problem.x_eval)).argmax(1).numpy()
    accuracy = trained.result.metrics["accuracy"]
    assert 100 * (predicted == problem.y_eval).mean() == pytest.approx(accuracy[max(accuracy)])
    saved, raw = saved_model(training, trained, secret=False), problem.x_eval
    assert (saved.predict(raw) == predicted).all()
    with torch.no_grad():
        assert (saved.to_torch()(torch.from_numpy(raw)).argmax(1).numpy() == predicted).all()
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        saved_model(training, trained, secret=False).save(tmp_path / "model.npz")
    with pytest.raises(UserError, match="exists already"):
        saved_model(training, trained, secret=False).save(tmp_path / "model.safetensors")
