"""Files that the pages' commands read, written into the working folder."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

import flce

CONFIG = {"hidden_size": 64, "vocab_size": 500, "dtype": "float32", "tie_word_embeddings": False, "model_type": "qwen3"}
Path("config.json").write_text(json.dumps(CONFIG))
Path("kernels.json").write_text(json.dumps({"hf_configs": ["config.json"], "devices": ["cpu"]}))
Path("train.py").write_text(
    "import torch, flce\n"
    "h, w = torch.randn(4, 64, requires_grad=True), torch.randn(500, 64, requires_grad=True)\n"
    "flce.linear_cross_entropy(h, w, torch.randint(0, 500, (4,))).backward()\n"
)
tensors = {"hidden": torch.randn(4, 768), "weight": torch.randn(5025, 768), "target": torch.randint(0, 5025, (4,))}
save_file(tensors, "tensors.safetensors")
records = sorted((Path(__file__).resolve().parents[3] / "records/shipped").glob("*.json"))
for number, record in enumerate(records[:2], 1):
    Path(f"node{number}").mkdir()
    shutil.copy(record, f"node{number}")
for name in ("before.json", "after.json"):
    shutil.copy(records[0], name)
assert flce.__version__
