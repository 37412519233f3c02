"""Fine-tune a small BERT by LoRA on text that every Python has, the docstrings of its packages.

Ten packages are the task; on all others the network is trained first. Needs the extras lm and hf.
"""

import ast
import sysconfig
from pathlib import Path

import datasets
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

import fedpfl

TASK = "asyncio email http importlib logging multiprocessing tkinter unittest urllib xml".split()
LIBRARY = Path(sysconfig.get_path("stdlib"))
WORDS = [
    "dataset=hf",
    "dataset.tokenizer=docstrings",
    "dataset.input=text",
    "dataset.label=package",
]
WORDS += ["dataset.length=32", "model=hf", "local.optimizer=adam", "local.lr=0.001", "seed=0"]
WORDS += [
    "model.config={hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, vocab_size: 2000}"
]

rows = {"task": [], "other": []}
for file in sorted(LIBRARY.rglob("*.py")):
    package = file.relative_to(LIBRARY).parts[0].removesuffix(".py")
    if not {"test", "tests", "site-packages", "lib2to3"} & {*file.parts}:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                if text.count(" ") > 3:
                    rows["task" if package in TASK else "other"].append(
                        {"text": text, "package": package}
                    )
for name, own in rows.items():
    datasets.Dataset.from_list(own).save_to_disk(f"docstrings/{name}")
tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=["[PAD]", "[UNK]", "[CLS]"])
tokenizer.train_from_iterator([row["text"] for own in rows.values() for row in own], trainer)
tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
tokenizer.save("docstrings/tokenizer.json")

first = fedpfl.run(
    *WORDS, "dataset.path=docstrings/other", "method=centralized", "partition=iid", rounds=10
)
words = ["partition=dirichlet", "clients=20", f"model.weights={first.path}", "adapter=lora"]
run = fedpfl.run(
    *WORDS,
    *words,
    "dataset.path=docstrings/task",
    "adapter.layers=[all-linear]",
    "method=fedsa_lora",
    rounds=10,
)
print(f"{run.rounds['accuracy'].iloc[-1]:.1f} % of docstrings told by their package")
