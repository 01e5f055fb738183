"""Troubles planted in one layer of a model are found, in that layer, and change what is recommended."""

import pytest
import torch

from models import make_model, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.diagnose import diagnose

LENGTH, LAYER = 512, 1


def recommendation(change=None, layers=3):
    """Of a model whose keys of one layer are changed, before RoPE, as said."""
    model = make_model("llama", num_hidden_layers=layers, initializer_range=0.06)
    if change is not None:
        projection = model.model.layers[LAYER].self_attn.k_proj

        def hook(module, arguments, output):
            output = output.clone()
            change(output)
            return output

        projection.register_forward_hook(hook)
    ids, _ = tokens(LENGTH)
    return diagnose(model, {"input_ids": ids}).numbers


@pytest.fixture(scope="module")
def healthy():
    return recommendation()


def advice(numbers):
    return {layer["layer"]: layer for layer in numbers["recommendation"]["layers"]}


def test_a_healthy_model_gets_the_default(healthy):
    assert OscarConfig.from_report(healthy) == OscarConfig()
    assert advice(healthy) == {}
    assert healthy["verdict"]["primary"] is None


PLACES = list(range(16, LENGTH, 32))  # one token in each group


def test_tokens_of_huge_norm(healthy):
    def huge(keys):
        keys[:, PLACES] *= 40.0

    numbers = recommendation(huge)
    found = advice(numbers)
    assert list(found) == [LAYER]
    assert any("norms differ" in cause for cause in found[LAYER]["causes"])
    tokens_found = numbers["layers"][LAYER]["tokens"]
    assert {s["position"] for s in tokens_found["sinks"]} | set(tokens_found["high_norm"]) == set(PLACES)
    assert numbers["recommendation"]["preset"] != healthy["recommendation"]["preset"]
    assert OscarConfig.from_report(numbers).key_bits > 2
    reasons = numbers["recommendation"]["reasons"]
    assert any(f"layer {LAYER} " in reason and "whose norms differ" in reason for reason in reasons)


def test_one_bad_layer_among_many_gets_more_bits():
    """The others stay good at 2 bits: then it is this layer, and not all, that should take 4."""

    def huge(keys):
        keys[:, PLACES] *= 20.0

    numbers = recommendation(huge, layers=8)
    assert numbers["recommendation"]["preset"] == "default"
    assert {layer: found["bits"] for layer, found in advice(numbers).items() if found["bits"]} == {LAYER: 4}
    config = OscarConfig.from_report(numbers)
    assert {index: (own["key_bits"], own["value_bits"]) for index, own in config.layers.items()} == {LAYER: (4, 4)}


def test_outlier_channels(healthy):
    def outliers(keys):
        keys[..., [5, 37]] *= 30.0  # channel 5 of both KV heads; RoPE mixes it with channel 21

    numbers = recommendation(outliers)
    found = advice(numbers)
    assert list(found) == [LAYER]
    assert any("outlier channels" in cause for cause in found[LAYER]["causes"])
    for head in numbers["layers"][LAYER]["heads"]:
        assert {5, 21} == set(head["channels"]["outliers"])
    assert any("1 of 3 layers have outlier channels" in reason for reason in numbers["recommendation"]["reasons"])
    assert all("outlier" not in reason for reason in healthy["recommendation"]["reasons"])


@pytest.mark.parametrize("count", [3, 7, 16])
def test_low_norm_sinks_at_the_start(healthy, count):
    def low(keys):
        keys[:, :count] *= 0.02

    numbers = recommendation(low)
    assert numbers["layers"][LAYER]["tokens"]["low_norm"] == list(range(count))
    config = OscarConfig.from_report(numbers)
    assert config.num_sinks == max(4, count)
    assert list(advice(numbers)) == [LAYER]
    errors = numbers["layers"][LAYER]["steps"]["none"]["classes"]["key"]
    scaled = numbers["layers"][LAYER]["steps"]["scaling"]["classes"]["key"]
    assert errors["low_norm"] > 100 * scaled["low_norm"]  # plain groups bury them, scaling saves them
    model = make_model("llama")
    assert OscarCache(model.config, config).oscar_config.num_sinks == config.num_sinks


def test_random_directions_have_no_cause(healthy):
    """Only the planted layers are blamed: the others of a planted model look like those of the healthy one."""

    def low(keys):
        keys[:, :8] *= 0.02

    numbers = recommendation(low)
    assert numbers["layers"][0] == healthy["layers"][0]


def test_token_norms_can_be_the_bottleneck():
    """Two thirds of a layer's keys have a fifth of the others' norm: then repairing norms is what helps."""

    def spread(keys):
        keys *= 12.0  # so that attention is sharp enough to suffer
        keys[:, torch.arange(LENGTH) % 3 != 0] *= 0.2

    numbers = recommendation(spread)
    layer = numbers["layers"][LAYER]["interventions"]
    assert layer["b: norms equalized"]["key_error"] < 0.9 * layer["a: none (KIVI)"]["key_error"]
    assert min(head["imbalance_gap"]["median"] for head in numbers["layers"][LAYER]["heads"]) > 0.5
