"""Make texts of what every Python has, the docstrings of its packages, for docs/language.md.

docstrings/task has ten packages, docstrings/other the rest, to train a network on first;
docstrings/tokenizer.json is made of both. Needs the extras lm and hf.
"""

import ast
import sysconfig
from pathlib import Path

import datasets
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

TASK = "asyncio email http importlib logging multiprocessing tkinter unittest urllib xml"
LEFT_OUT = {"test", "tests", "site-packages", "lib2to3"}
LIBRARY = Path(sysconfig.get_path("stdlib"))

# ---- Step 1: texts of five words and more, with their packages.
rows = {"task": [], "other": []}
for file in sorted(LIBRARY.rglob("*.py")):
    package = file.relative_to(LIBRARY).parts[0].removesuffix(".py")
    for node in [] if LEFT_OUT & {*file.parts} else ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = " ".join((ast.get_docstring(node) or "").split())
            if text.count(" ") > 3:
                part = "task" if package in TASK.split() else "other"
                rows[part].append({"text": text, "package": package})
for part, own in rows.items():
    datasets.Dataset.from_list(own).save_to_disk(f"docstrings/{part}")

# ---- Step 2: a tokenizer.
tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=["[PAD]", "[UNK]", "[CLS]"])
tokenizer.train_from_iterator((row["text"] for own in rows.values() for row in own), trainer)
tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
tokenizer.save("docstrings/tokenizer.json")
print({part: len(own) for part, own in rows.items()})
