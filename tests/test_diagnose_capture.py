"""What diagnose sees of a model: the keys and values that transformers' own cache would hold, and nothing changed."""

import pytest
import torch

from models import dynamic_cache, forward, make_model, tokens
from oscar_kv.diagnose.capture import capture, packed_layers
from oscar_kv.diagnose.tokens import modalities

LENGTH = 400
FAMILIES = {  # the layers that keep their whole history
    "llama": [0, 1],
    "qwen3": [0, 1],
    "phi3": [0, 1],
    "gemma2": [1, 2],
    "gemma3": [1, 2],
    "gpt_oss": [1, 2],
    "lfm2": [1, 2],
    "gemma4": [1],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_cache(family):
    model = make_model(family, attention="eager")
    ids, _ = tokens(LENGTH)
    cache = dynamic_cache(model)
    logits = forward(model, ids, cache)
    states = {}
    capture(model, {"input_ids": ids}, lambda s: states.update({s.index: s}))
    assert list(states) == packed_layers(model.config) == FAMILIES[family]
    for index, found in states.items():
        torch.testing.assert_close(found.key, cache.layers[index].keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.value, cache.layers[index].values, rtol=1e-4, atol=1e-4)
    assert model.config.get_text_config()._attn_implementation == "eager"
    assert torch.equal(forward(model, ids, dynamic_cache(model)), logits)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_watched_pass_computes_the_same(family):
    """Soft caps and learned sinks included: the states of the last layer depend on all attention before it."""
    model = make_model(family, attention="eager")
    ids, _ = tokens(LENGTH)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output))
    capture(model, {"input_ids": ids}, lambda s: None)
    forward(model, ids, None)
    handle.remove()
    watched, plain = (x[:, -1] for x in seen)
    torch.testing.assert_close(watched, plain, rtol=1e-3, atol=1e-3)


def test_an_error_in_between_leaves_the_model_as_it_was():
    model = make_model("llama", attention="sdpa")
    ids, _ = tokens(LENGTH)

    def fail(states):
        raise ArithmeticError("stop")

    with pytest.raises(ArithmeticError, match="stop"):
        capture(model, {"input_ids": ids}, fail)
    assert model.config._attn_implementation == "sdpa"
    forward(model, ids, dynamic_cache(model))  # would fail if the collector were still called


@pytest.mark.parametrize(("rows", "length"), [(1, 255), (2, 300)])
def test_too_short_or_several_rows(rows, length):
    ids, _ = tokens(*[length] * rows)
    with pytest.raises(ValueError, match="at least 256 tokens"):
        capture(make_model(), {"input_ids": ids}, lambda s: None)


def test_padding_is_refused():
    ids, mask = tokens(300)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="without padding"):
        capture(make_model(), {"input_ids": ids, "attention_mask": mask}, lambda s: None)


def test_modalities_by_placeholder():
    config = make_model().config
    config.image_token_id, config.audio_token_id, config.video_token_id = 90, 91, None
    ids = torch.tensor([1, 90, 90, 2, 91])
    found = modalities(config, ids)
    assert {name: own.nonzero().flatten().tolist() for name, own in found.items()} == {
        "text": [0, 3],
        "image": [1, 2],
        "audio": [4],
    }
