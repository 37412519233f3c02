"""Make a text set of what every Python has: docstrings of ten of its packages, and a tokenizer.

Then fine-tune a small BERT by LoRA, each client with packages of its own. Needs the extras lm and hf.
"""

import ast
import sysconfig
from pathlib import Path

import datasets
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import fedpfl

FOLDER = Path("docstrings")
PACKAGES = "asyncio email http importlib logging multiprocessing tkinter unittest urllib xml"

rows = []
for package in PACKAGES.split():
    for file in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text.split()) > 4 and "test" not in file.parts:
                    rows.append({"text": " ".join(text.split()), "package": package})
if not FOLDER.exists():
    datasets.Dataset.from_list(rows).save_to_disk(FOLDER)
tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=["[PAD]", "[UNK]"])
tokenizer.train_from_iterator([row["text"] for row in rows], trainer)
tokenizer.save(str(FOLDER / "tokenizer.json"))

words = f"dataset=hf dataset.path={FOLDER} dataset.tokenizer={FOLDER} dataset.input=text"
words += " dataset.label=package partition=dirichlet clients=20 dataset.length=32 model=hf"
sizes = "hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 128"
words += " adapter=lora adapter.layers=[all-linear] method=fedper rounds=20 local.lr=0.1"
run = fedpfl.run(*words.split(), f"model.config={{{sizes}, vocab_size: 2000}}", seed=0)
print(f"{run.rounds['accuracy'].iloc[-1]:.1f} % of docstrings told by their package, {run.path}")
