"""What each step changes, against real caches and fp64: by layer, head and class of token; and every group's bound."""

import pytest
import torch

from diagnose_cases import COUNTED, GROUP, HIGH, LOW, QUERIES, SINK, make_case, planted
from models import make_model
from oscar_kv.diagnose.capture import capture


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2", "gpt_oss"])
def case(request):
    return make_case(make_model(request.param, attention="eager", initializer_range=0.1))


@pytest.fixture(scope="module")
def unusual():
    return make_case(planted())


def relative(x, y, dims):
    return (x - y).square().sum(dims) / x.square().sum(dims)


@pytest.mark.parametrize("step", ["none", "rotation+scaling+sinks", "default", "quality", "four-bit"])
def test_errors_are_those_of_a_real_cache(case, step):
    """The same prompt in a real OscarCache, whose keys are then read back and compared in fp64."""
    packed = case.packed(step)
    for layer in case.layers:
        found, index = layer["steps"][step], layer["layer"]
        for side, x, y in zip(("key", "value"), case.exact(index), packed[index], strict=True):
            assert found[f"{side}_error"] == pytest.approx(float(relative(x, y, (0, 1, 2))), rel=2e-3)
            of_heads = [head[f"{side}_error"] for head in found["heads"]]
            assert of_heads == pytest.approx(relative(x, y, (1, 2)).tolist(), rel=2e-3)
        groups = (x.unflatten(1, (-1, GROUP)) for x in (case.exact(index)[0], packed[index][0]))
        errors = relative(*groups, (2, 3))
        for name, share in (("max", 1.0), ("median", 0.5)):
            of_heads = [head["group_error"][name] for head in found["heads"]]
            assert of_heads == pytest.approx(errors.quantile(share, dim=-1).tolist(), rel=5e-3)


def attention_by_hand(case, query, exact, packed, index):
    """KL of the attention weights and relative error of its output by KV head, query by query in fp64."""
    attention = case.model.model.layers[index].self_attn
    cap = getattr(attention, "attn_logit_softcapping", None)
    sinks = getattr(attention, "sinks", None)
    heads = len(exact[0])
    kl, wrong, norm = ([0.0] * heads for _ in range(3))
    for position in QUERIES:
        start = position // 128 * 128
        for h in range(query.shape[0]):
            kv = h * heads // query.shape[0]
            outputs, weights = [], []
            for history in (exact, packed):
                k, v = (
                    torch.cat((x[kv, :start], y[kv, start : position + 1])) for x, y in zip(history, exact, strict=True)
                )
                scores = k @ query[h, position] * attention.scaling
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                scores = scores if sinks is None else torch.cat((scores, sinks[h].double().view(1)))
                p = torch.exp(scores - scores.max())
                p = p / p.sum()
                weights.append(p)
                outputs.append(p[: position + 1] @ v)
            kl[kv] += float((weights[0] * (weights[0] / weights[1]).log()).sum())
            wrong[kv] += float((outputs[0] - outputs[1]).square().sum())
            norm[kv] += float(outputs[0].square().sum())
    count = len(QUERIES) * query.shape[0] / heads
    return [x / count for x in kl], wrong, norm


@torch.no_grad()
def test_attention_errors(case):
    states = {}
    capture(case.model, {"input_ids": case.ids}, lambda s: states.update({s.index: s}))
    layer = case.layers[-1]
    index = layer["layer"]
    for step in ("none", "default"):
        packed, query = case.packed(step)[index], states[index].query[0].double()
        kl, wrong, norm = attention_by_hand(case, query, case.exact(index), packed, index)
        found = layer["steps"][step]
        assert found["attention_kl"] == pytest.approx(sum(kl) / len(kl), rel=5e-3)
        assert found["output_error"] == pytest.approx(sum(wrong) / sum(norm), rel=5e-3)
        assert [head["attention_kl"] for head in found["heads"]] == pytest.approx(kl, rel=5e-3)
        expected = [a / b for a, b in zip(wrong, norm, strict=True)]
        assert [head["output_error"] for head in found["heads"]] == pytest.approx(expected, rel=5e-3)


def hadamard(dim):
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < dim:
        h = torch.kron(h, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return h / dim**0.5


@pytest.mark.parametrize(
    ("step", "rotated", "scaled"), [("rotation", 1, 0), ("scaling", 0, 1), ("rotation+scaling", 1, 1)]
)
def test_imbalance_and_channels_after_a_step(case, step, rotated, scaled):
    for layer in case.layers:
        x = case.exact(layer["layer"])[0]
        x = x @ hadamard(x.shape[-1]) if "rotation" in step else x
        x = x / x.square().mean((0, 2), keepdim=True).sqrt() if "scaling" in step else x
        for h, head in enumerate(layer["steps"][step]["heads"]):
            norms = x[h].norm(dim=-1)
            groups = norms.unflatten(0, (-1, GROUP))
            ratio = (groups.amax(-1) / groups.amin(-1)).max()
            assert head["imbalance_ratio"]["max"] == pytest.approx(float(ratio), rel=1e-2)  # stored norms are bfloat16
            middle = norms.quantile(0.5)
            for name, end in (("max", norms.max()), ("min", norms.min())):
                assert head["norms"][f"{name}_over_median"] == pytest.approx(float(end / middle), rel=1e-2)
            keys = x[h].unflatten(0, (-1, GROUP))
            ranges = (keys.amax(1) - keys.amin(1)).mean(0).sort().values
            middle = ranges[(len(ranges) - 1) // 2]
            assert head["channels"]["max_over_median"] == pytest.approx(float(ranges[-1] / middle), rel=1e-2)


def members(layer):
    """Tokens of each class, from the sinks and norms that the layer reports."""
    sink = {s["position"] for s in layer["tokens"]["sinks"]}
    low, high = (set(layer["tokens"][name]) for name in ("low_norm", "high_norm"))
    groups = {i // GROUP for i in sink | low}
    near = {i for i in range(COUNTED) if i // GROUP in groups} - sink - low
    rest = set(range(COUNTED)) - sink - low - near - high
    return {"sink": sink, "low_norm": low, "neighbour": near, "high_norm": high, "other": rest}


@torch.no_grad()
def test_sinks_are_those_of_transformers_attention(unusual):
    unusual.model.set_attn_implementation("eager")
    weights = unusual.model(unusual.ids, output_attentions=True).attentions
    queries = torch.tensor(QUERIES)
    for layer in unusual.layers:
        rows = weights[layer["layer"]][0].double().mean(0)[queries]
        assert [s["position"] for s in layer["tokens"]["sinks"]] == [SINK]
        expected = float(rows[queries >= SINK + 128, SINK].mean())
        assert layer["tokens"]["sinks"][0]["attention"] == pytest.approx(expected, rel=1e-2)
        assert (layer["tokens"]["low_norm"], layer["tokens"]["high_norm"]) == ([LOW], [HIGH])
        of_heads = weights[layer["layer"]][0].double().unflatten(0, (len(layer["heads"]), -1)).mean(1)[:, queries]
        far = queries[:, None] >= torch.arange(COUNTED) + 128
        counts = far.sum(0)
        shares = (of_heads[..., :COUNTED] * far).sum(1) / counts.clamp(min=1)
        expected = [((share >= 0.02) & (counts >= 16)).nonzero().flatten().tolist() for share in shares]
        assert [head["sinks"] for head in layer["heads"]] == expected


@pytest.mark.parametrize("step", ["none", "rotation", "scaling", "rotation+scaling", "default"])
def test_errors_by_class_of_token(unusual, step):
    packed = unusual.packed(step)
    for layer in unusual.layers:
        found = layer["steps"][step]["classes"]
        classes = members(layer)
        assert layer["tokens"]["count"] == {name: len(own) for name, own in classes.items()}
        for side, x, y in zip(("key", "value"), unusual.exact(layer["layer"]), packed[layer["layer"]], strict=True):
            for name, own in classes.items():
                mine = sorted(own)
                expected = float(relative(x[:, mine], y[:, mine], (0, 1, 2)))
                assert found[side][name] == pytest.approx(expected, rel=5e-3, abs=1e-9)


def test_every_group_has_its_bound(unusual):
    for layer in unusual.layers:
        keys = unusual.exact(layer["layer"])[0].unflatten(1, (-1, GROUP)).flatten(0, 1)
        norms = keys.norm(dim=-1)
        modelled = (keys.amax(1) - keys.amin(1)).square().sum(-1) / 108
        gap = (norms.amax(-1) - norms.amin(-1)).square() / 108
        found = layer["theory"]["none"]
        assert found["groups"] == len(keys)
        assert found["violations"] == int((gap > modelled).sum()) == 0
        for name, share in (("min", 0.0), ("median", 0.5), ("max", 1.0)):
            assert found["gap"][name] == pytest.approx(float((gap / modelled).quantile(share)), rel=1e-3)


def test_repairs_are_those_of_the_steps_where_they_agree(unusual):
    """Keys of (a) and (c) are those of the steps "none" and "rotation"; what (h) keeps is counted."""
    for layer in unusual.layers:
        repairs = layer["interventions"]
        for letter, step in (("a: none (KIVI)", "none"), ("c: rotation", "rotation")):
            for name in ("key_error", "attention_kl"):
                assert repairs[letter][name] == pytest.approx(layer["steps"][step][name], rel=1e-3)
            assert repairs[letter]["extra_bits"] == 0
        assert repairs["h: all sinks exact"]["extra_bits"] == pytest.approx(16 * 2 / COUNTED, rel=1e-3)
