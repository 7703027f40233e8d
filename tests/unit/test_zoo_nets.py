"""Nets whose weights are PyTorch files: strict loading, and a clear word without torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright import zoo
from tilewright.diagnostics import TilewrightError
from tilewright.zoo import fetching, nets

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
PARAMETERS = {"efficientnet-lite0": 4_652_008, "mobilenet-v2": 3_504_872}


def test_without_torch_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(nets, "import_module", missing)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(fetching, "fetch", lambda recipe: b"weights")
    with pytest.raises(TilewrightError) as caught:
        zoo.prepare("mobilenet-v2")
    assert caught.value.code == "E0703"
    assert "tilewright[torch]" in (caught.value.hint or "")


def test_every_torch_recipe_has_a_net():
    assert {recipe.name for recipe in zoo.RECIPES if recipe.kind == "torch"} == set(nets.NETS)


@needs_torch
@pytest.mark.parametrize("name", list(PARAMETERS))
def test_parameters_and_export(name: str, tmp_path: Path):
    import onnxruntime
    import torch  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    net = nets.NETS[name]().eval()
    assert sum(item.numel() for item in net.parameters()) == PARAMETERS[name]
    path = tmp_path / "weights.pth"
    torch.save(net.state_dict(), path)
    model = nets.export(name, path, {"input": (1, 3, 224, 224)})
    assert model == nets.export(name, path, {"input": (1, 3, 224, 224)})
    x = np.random.default_rng(0).normal(0, 1, (1, 3, 224, 224)).astype(np.float32)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found: Any = session.run(None, {"input": x})[0]
    expected = net(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@needs_torch
def test_sentence_encoder_looks_at_unmasked_tokens_only(tmp_path: Path):
    import onnxruntime
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import save_file

    torch.manual_seed(0)
    net = nets.NETS["minilm"]().eval()
    assert sum(item.numel() for item in net.parameters()) == 22_713_216
    path = tmp_path / "weights.safetensors"
    save_file({key: value.numpy() for key, value in net.state_dict().items()}, path)
    shapes = {"input_ids": (1, 16), "attention_mask": (1, 16)}
    session = onnxruntime.InferenceSession(
        nets.export("minilm", path, shapes, "tokens"), providers=["CPUExecutionProvider"]
    )
    ids = np.arange(100, 116)[None]
    mask = np.repeat([1, 0], 8)[None]
    found: Any = session.run(["tokens"], {"input_ids": ids, "attention_mask": mask})[0]
    expected = net(torch.from_numpy(ids), torch.from_numpy(mask)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    ids[0, 8:] = 7
    again: Any = session.run(["tokens"], {"input_ids": ids, "attention_mask": mask})[0]
    np.testing.assert_allclose(again[0, :8], found[0, :8], atol=1e-5)
    assert np.abs(again[0, 8:] - found[0, 8:]).max() > 0.1


@needs_torch
def test_a_missing_key_is_refused(tmp_path: Path):
    import torch  # pyright: ignore[reportMissingImports]

    state = nets.mobilenet_v2().state_dict()
    del state["classifier.1.bias"]
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(TilewrightError, match="cannot be read"):
        nets.export("mobilenet-v2", tmp_path / "weights.pth", {"input": (1, 3, 224, 224)})
