"""The settings of the five papers: what conf/ runs is what each paper or its public code says, and
where it says so.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import re
from typing import Any

import pytest

from fedpfl.config.plan import resolve_config
from fedpfl.methods import METHODS
from fedpfl.papers import published
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import QUANTILE, SOURCE
from fedpfl.report.names import DATASET_TITLES
from tests.conftest import ROOT, keep_quick
from tests.papers.test_experiments import EXPERIMENTS, composed, swept

SEVERAL = "fedobp/table3 fedobp/table4 fedobp/figure2 fedobp/figure3"
COMPARED = f"fedobp/paper fedobp/fmnist_dir01 {SEVERAL}"
WIDE = "fedobp/figure4 fedobp/figure7"
NARROW = "fedobp/figure4_mnist"
AS_MADE = "fedobp/figure4_as_published fedobp/figure4_mnist_as_published"
QUANTILES = f"{WIDE} {NARROW} {AS_MADE}"
TABLE_5 = "fedobp/table5 fedobp/table5_cls fedobp/table5_ema fedobp/figure5"
PLAIN = f"{COMPARED} fedobp/table2 fedobp/figure6 {WIDE} {NARROW}"
FILES = (
    f"fedobp/as_published fedobp/fmnist_as_published fedobp/table4_as_published {TABLE_5} {AS_MADE}"
)
FEDOBP = f"{PLAIN} {FILES} fedobp/one_momentum"
BASELINES = "fedobp/table3 fedobp/table4 fedobp/one_momentum"
FEDSELECT = (
    "fedselect/cifar10 fedselect/alpha fedselect/ablation fedselect/cifar10c fedselect/sizes "
    "fedselect/mini_imagenet fedselect/office_home"
)
SELECTING = (
    "fedselect/cifar10 fedselect/alpha fedselect/ablation fedselect/cifar10c fedselect/sizes"
)
FEDSPU = "fedspu/emnist fedspu/cifar10 fedspu/speech"
STOPPING = "fedspu/emnist_stopping fedspu/cifar10_stopping fedspu/speech_stopping"
PURIN_FMNIST, PURIN_CIFAR10, PURIN_CIFAR100 = (
    f"fedpurin/{name} fedpurin/{name}_ablation" for name in ("fmnist", "cifar10", "cifar100")
)
PURIN_CIFAR10 += " fedpurin/norm fedpurin/tau"
SMALL = f"{PURIN_FMNIST} {PURIN_CIFAR10}"
FEDPURIN = f"{SMALL} {PURIN_CIFAR100}"
CHOSEN = "fedpurin/norm fedpurin/tau"
VARIANTS = "fedpurin/fmnist_ablation fedpurin/cifar10_ablation fedpurin/cifar100_ablation"
COMPARING = "fedpurin/fmnist fedpurin/cifar10 fedpurin/cifar100"
LABELS = "subflot/cifar10 subflot/cifar100 subflot/tiny_imagenet subflot/ag_news subflot/ablation subflot/scalability"
ABLATION = "subflot/ablation subflot/ablation_digit5"
SUBFLOT = f"{LABELS} subflot/har subflot/digit5 subflot/pacs subflot/ablation_digit5"
WHOLE = f"{SUBFLOT} -subflot/ablation -subflot/ablation_digit5 -subflot/scalability"
EIGHT = "cifar10,cifar100,emnist,svhn,mnist,fmnist,organamnist,organcmnist"
FAULTY = "organamnist_as_published,organcmnist_as_published"
GRID = (
    "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.99,0.991,0.992,0.993,0.994,0.995,0.996,0.997,0.998,0.999,0.9991,0.9993,"
    "0.9995,0.9997,0.9999,0.99991,0.99993,0.99995,0.99997,0.99999,0.999999,1"
)
"""Folders of the public files in results/scores/ of CIFAR10 and CIFAR100."""
COARSE = "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.99,0.991,0.992,0.993,0.994,0.995,0.996,0.997,0.998,0.999,1"
"""Those of the other four data sets."""

LOGS = "published logs (github uglyghost/FedOBP_results)"
OPTIONS = "official code, utils/options.py"
FLING = "official code, flzoo/"
UNSAID = "not stated; here"


def minus(names: str) -> str:
    """Leave these experiments out."""
    return " ".join(f"-{name}" for name in names.split())


TABLE: list[tuple[str, str, Any, str]] = [
    # FedOBP, arXiv:2604.16574
    (
        f"{FEDOBP} -fedobp/figure6 -fedobp/fmnist_as_published {minus(QUANTILES)}",
        "rounds",
        400,
        "experimental setup",
    ),
    (QUANTILES, "rounds", 200, f"{LOGS}: scores/, common.global_epoch"),
    ("fedobp/figure6", "rounds", 450, "Figure 6: its axis"),
    ("fedobp/fmnist_as_published", "rounds", 100, "part of the published file, which has 400"),
    (FEDOBP, "clients", 100, "experimental setup"),
    (FEDOBP, "participation", 0.1, "experimental setup: 10 clients a round"),
    (FEDOBP, "local.epochs", 5, "experimental setup"),
    (FEDOBP, "local.batch_size", 32, "experimental setup"),
    (FEDOBP, "local.lr", 0.01, "experimental setup"),
    (
        *(PLAIN, "fedobp: local.momentum", 0.0),
        "local SGD, Algorithm 1; the later public code's default",
    ),
    (FILES, "fedobp: local.momentum", 0.7, f"{LOGS}: optimizer.momentum"),
    *(
        (SEVERAL, f"{name}: local.momentum", 0.7, f"{LOGS}: optimizer.momentum")
        for name in ("fedavg", "floco")
    ),
    ("fedobp/table4_as_published", "fedavg: local.momentum", 0.7, f"{LOGS}: optimizer.momentum"),
    ("fedobp/one_momentum", "local.momentum", "0.0,0.7", "not in the paper: one for all methods"),
    (FEDOBP, "local.weight_decay", 0.0, LOGS),
    (FEDOBP, "partition.name", "published", "public code, a fork of FL-bench"),
    (FEDOBP, "partition.test_fraction", 0.25, LOGS),
    (FEDOBP, "partition.min_samples", 10, LOGS),
    (FEDOBP, "model.name", "cnn4", "experimental setup: a CNN of four layers"),
    (
        f"{FEDOBP} -fedobp/fmnist_as_published {minus(TABLE_5)} {minus(QUANTILES)}",
        "eval.finetune_epochs",
        5,
        f"{LOGS}: accuracy/",
    ),
    (
        f"{QUANTILES} {TABLE_5}",
        "eval.finetune_epochs",
        0,
        f"{LOGS}: scores/, ablation/: common.test.client",
    ),
    (
        f"{FEDOBP} -fedobp/fmnist_as_published -fedobp/figure6 {minus(TABLE_5)} {minus(QUANTILES)}",
        "eval.finetune_every",
        100,
        f"{LOGS}: checkpoints",
    ),
    (
        *("fedobp/fmnist_as_published", "eval.finetune_epochs", 0),
        "the published curve is before fine-tuning",
    ),
    (
        f"{SEVERAL} fedobp/table4_as_published fedobp/one_momentum",
        "seed",
        "42,1,2,3",
        "Tables III and IV: means of four seeds; logs: 42",
    ),
    (
        f"{SEVERAL} -fedobp/figure2 -fedobp/figure3 fedobp/table4_as_published fedobp/one_momentum",
        "partition.alpha",
        "0.1,0.5",
        "Tables III and IV",
    ),
    ("fedobp/table2", "partition.alpha", "0.1,0.5", "Table II"),
    ("fedobp/as_published", "partition.alpha", "0.1,0.5", f"{LOGS}: accuracy/"),
    (
        f"{QUANTILES} {TABLE_5}",
        "partition.alpha",
        0.1,
        f"{LOGS}: scores/, ablation/: dataset.alpha",
    ),
    ("fedobp/figure6", "partition.alpha", 0.1, f"{UNSAID} 0.1"),
    (
        *("fedobp/fmnist_dir01 fedobp/fmnist_as_published fedobp/paper", "partition.alpha", 0.1),
        "Table IV",
    ),
    ("fedobp/figure2", "partition.alpha", "0.1", "Figure 2: all data sets at Dir(0.1)"),
    ("fedobp/figure3", "partition.alpha", "0.5", "Figure 3: all data sets at Dir(0.5)"),
    (
        "fedobp/table2 fedobp/figure2 fedobp/figure3 fedobp/figure6 fedobp/one_momentum",
        "dataset",
        EIGHT,
        "Tables II to IV, Figures 2, 3, 6",
    ),
    (
        "fedobp/table5 fedobp/figure5 fedobp/as_published",
        "dataset",
        f"cifar10,cifar100,emnist,svhn,mnist,fmnist,{FAULTY}",
        f"Table V, Figure 5; {LOGS}: ablation/, accuracy/",
    ),
    ("fedobp/table5_cls", "dataset", "cifar10,cifar100,emnist,svhn", f"{LOGS}: ablation/, CLS"),
    ("fedobp/table5_ema", "dataset", f"mnist,fmnist,{FAULTY}", f"{LOGS}: bak/mnist4datasets/"),
    ("fedobp/table3", "dataset", "cifar10,cifar100,emnist,svhn", "Table III"),
    ("fedobp/table4", "dataset", "mnist,fmnist,organamnist,organcmnist", "Table IV"),
    ("fedobp/table4_as_published", "dataset", FAULTY, "Table IV"),
    (
        f"{WIDE} fedobp/figure4_as_published",
        "dataset",
        "cifar10,cifar100",
        f"section V-D; {LOGS}: scores/",
    ),
    (NARROW, "dataset", "mnist,fmnist,organamnist,organcmnist", f"section V-D; {LOGS}: scores/"),
    (
        "fedobp/figure4_mnist_as_published",
        "dataset",
        f"mnist,fmnist,{FAULTY}",
        f"section V-D; {LOGS}: scores/",
    ),
    (
        *("fedobp/paper fedobp/fmnist_dir01 fedobp/fmnist_as_published", "dataset.name", "fmnist"),
        "Table IV",
    ),
    (f"{WIDE} fedobp/figure4_as_published", "quantile.q", GRID, f"Figure 4; {LOGS}: scores/"),
    (
        f"{NARROW} fedobp/figure4_mnist_as_published",
        "quantile.q",
        COARSE,
        f"Figure 4; {LOGS}: scores/",
    ),
    ("fedobp/figure4 fedobp/figure4_mnist", "score", "obp,gradient,fisher", "Figure 4"),
    ("fedobp/figure7", "score", "obp", "Section V-G"),
    (AS_MADE, "paper", "fedobp_obp,fedobp_gradient,fedobp_fisher", "Figure 4"),
    (
        AS_MADE,
        "paper=fedobp_obp: method.score",
        "obp_as_published",
        f"{LOGS}: method fedfew, before eq. 19",
    ),
    (AS_MADE, "paper=fedobp_obp: method.ema", 0.5, f"{LOGS}: scores/, EMAscore(0.5)"),
    (AS_MADE, "paper=fedobp_obp: method.norm", "global", f"{LOGS}: scores/, GlobalNorm"),
    *(
        (AS_MADE, f"paper=fedobp_{score}: method.{key}", value, "public code, the path of FedDPA")
        for score in ("gradient", "fisher")
        for key, value in (("score", score), ("scope", "tensor"), ("norm", "layer"), ("ema", 0.0))
    ),
    *(
        (
            AS_MADE,
            f"paper=fedobp_{score}: local.momentum",
            0.7,
            f"{LOGS}: scores/, optimizer.momentum",
        )
        for score in ("obp", "gradient", "fisher")
    ),
    ("fedobp/table5", "paper", "fedobp_none,fedobp_layer,fedobp_global", "Table V"),
    ("fedobp/table5_cls", "paper", "fedobp_cls", "Table V"),
    (
        "fedobp/table5_ema",
        "paper",
        "fedobp_ema",
        f"Table V; {LOGS}: bak/mnist4datasets/, EMAscore(0.5)_ALL",
    ),
    ("fedobp/figure5", "paper", "fedobp_none,fedobp_layer,fedobp_global,fedobp_cls", "Figure 5"),
    *(
        (
            name,
            f"paper=fedobp_{kind}: method.{key}",
            value,
            f"{LOGS}: ablation/, the arguments of {kind}",
        )
        for kind, names in (
            *((kind, "fedobp/table5 fedobp/figure5") for kind in ("none", "layer", "global")),
            ("cls", "fedobp/table5_cls fedobp/figure5"),
            ("ema", "fedobp/table5_ema"),
        )
        for name in names.split()
        for key, value in {
            "score": "obp_as_published",
            "norm": kind if kind in ("none", "layer") else "global",
            "classifier_only": kind == "cls",
            "ema": 0.5 if kind == "ema" else 0.0,
            "scope": "all",
        }.items()
    ),
    ("fedobp/figure6", "fedobp: method.q", 0.99995, "Figure 6: 44 entries on CIFAR10"),
    ("fedobp/fmnist_as_published", "method.q", 0.99992, LOGS),
    ("fedobp/fmnist_as_published", "method.ema", 0.3, LOGS),
    (
        *("fedobp/fmnist_as_published fedobp/as_published", "method.score", "obp_as_published"),
        "public code before eq. 19",
    ),
    ("fedobp/as_published", "method.norm", "global", f"{LOGS}: accuracy/, GlobalNorm"),
    (
        f"{BASELINES} fedobp/table2 fedobp/figure6 fedobp/figure7",
        "fedobp: method.score",
        "obp",
        "eq. 19",
    ),
    (
        f"{BASELINES} fedobp/table2 fedobp/figure6 fedobp/figure7",
        "fedobp: method.norm",
        "global",
        "method section",
    ),
    (
        f"{BASELINES} fedobp/table2 fedobp/figure6 fedobp/figure7",
        "fedobp: method.ema",
        0.0,
        "Algorithm 1 has none",
    ),
    (
        f"{BASELINES} fedobp/table2 fedobp/figure6 fedobp/figure7",
        "fedobp: method.cold_start",
        "paper",
        "Algorithm 1",
    ),
    (
        f"{BASELINES} fedobp/table2 fedobp/figure6 fedobp/figure7",
        "fedobp: method.classifier_only",
        False,
        "method section",
    ),
    (BASELINES, "lg_fedavg: method.layers", 1, LOGS),
    (BASELINES, "fedper: method.layers", 1, LOGS),
    (BASELINES, "fedrep: method.body_epochs", 1, LOGS),
    (BASELINES, "apfl: method.alpha", 0.5, LOGS),
    (BASELINES, "apfl: method.adaptive", True, LOGS),
    (BASELINES, "pfedfda: method.eps", 0.0001, LOGS),
    (BASELINES, "pfedfda: method.folds", 2, LOGS),
    (BASELINES, "flute: method.l1", 0.25, LOGS),
    (BASELINES, "flute: method.l2", 0.0025, LOGS),
    (BASELINES, "flute: method.l3", 0.0005, LOGS),
    (BASELINES, "flute: method.server_lr", 0.5, LOGS),
    (BASELINES, "flute: method.rep_epochs", 1, LOGS),
    (BASELINES, "feddpa: method.threshold", 0.4, LOGS),
    (
        *(BASELINES, "feddpa: method.lam1", 0.1),
        "FedDPA, NeurIPS 2023; the public code has no regularisers",
    ),
    (
        *(BASELINES, "feddpa: method.lam2", 0.05),
        "FedDPA, NeurIPS 2023; the public code has no regularisers",
    ),
    (BASELINES, "floco: method.endpoints", 10, LOGS),
    (BASELINES, "floco: method.tau", 10, LOGS),
    (BASELINES, "floco: method.rho", 0.1, LOGS),
    (BASELINES, "fedala: method.layers", 1, "FL-bench, defaults"),
    (BASELINES, "fedala: method.eta", 1.0, "FL-bench, defaults"),
    (BASELINES, "fedala: method.share", 0.8, "FL-bench, defaults"),
    # FedSelect, CVPR 2024
    (f"{FEDSELECT} -fedselect/office_home", "rounds", 200, "experimental setup"),
    ("fedselect/office_home", "rounds", 30, "experimental setup"),
    (SELECTING, "clients", 10, "experimental setup"),
    ("fedselect/mini_imagenet", "clients", 20, "experimental setup"),
    ("fedselect/office_home", "clients", 4, "experimental setup: a client per domain"),
    (FEDSELECT, "participation", 1.0, "experimental setup"),
    (FEDSELECT, "local.epochs", 3, "experimental setup: L"),
    (FEDSELECT, "local.batch_size", 32, f"{OPTIONS} local_bs"),
    (FEDSELECT, "local.lr", 0.05, f"{OPTIONS} lr; the paper's is in its appendix"),
    (FEDSELECT, "local.momentum", 0.0, "official code"),
    (FEDSELECT, "local.weight_decay", 0.0, "official code"),
    (FEDSELECT, "model.name", "resnet18", "experimental setup"),
    (FEDSELECT, "model.norm", "batch", "experimental setup: torchvision's"),
    (FEDSELECT, "model.stem", "large", "experimental setup: torchvision's"),
    (FEDSELECT, "eval.finetune_epochs", 3, f"{UNSAID} as many as local epochs"),
    (FEDSELECT, "seed", 42, f"{UNSAID} one run"),
    (f"{FEDSELECT}", "eval.finetune_every", 10, "Figure 2: its marks"),
    (
        f"{FEDSELECT} -fedselect/office_home",
        "partition.name",
        "shuffled_shards",
        "official code, utils/sampling.py",
    ),
    ("fedselect/office_home", "partition.name", "groups", "experimental setup"),
    (SELECTING, "partition.classes_per_client", 2, "Table 1"),
    (f"{SELECTING} -fedselect/sizes", "partition.samples_per_client", 100, "experimental setup"),
    ("fedselect/sizes", "partition.samples_per_client", "20,40,100,200", "Figure 3: its axis"),
    ("fedselect/mini_imagenet", "partition.classes_per_client", 10, "Table 1"),
    (
        *("fedselect/mini_imagenet", "partition.samples_per_client", 480),
        "experimental setup: 20 % of the training data (48,000), 20 clients",
    ),
    (
        "fedselect/mini_imagenet fedselect/cifar10c",
        "partition.test_fraction",
        0.2,
        f"{UNSAID} 0.2: the sets have no test part",
    ),
    (
        "fedselect/office_home",
        "partition.test_fraction",
        0.5,
        "experimental setup: about 2,000 training samples per client, of 3,897",
    ),
    (
        f"{SELECTING} -fedselect/cifar10c",
        "partition.test_fraction",
        None,
        "official code: CIFAR10's test part",
    ),
    (f"{SELECTING} -fedselect/cifar10c", "dataset.name", "cifar10", "Table 1"),
    ("fedselect/cifar10c", "dataset.name", "cifar10_c", "Table 1"),
    ("fedselect/cifar10c", "dataset.once", True, f"{UNSAID} each image under one corruption"),
    (
        "fedselect/office_home",
        "dataset.mean",
        [0.485, 0.456, 0.406],
        "experimental setup: pretrained on ImageNet",
    ),
    (
        "fedselect/office_home",
        "dataset.std",
        [0.229, 0.224, 0.225],
        "experimental setup: pretrained on ImageNet",
    ),
    ("fedselect/mini_imagenet", "dataset.name", "mini_imagenet", "Table 1"),
    ("fedselect/office_home", "dataset.name", "office_home", "Table 1"),
    (SELECTING, "dataset.mean", [0.485, 0.456, 0.406], "official code, utils/train_utils.py"),
    (SELECTING, "dataset.std", [0.229, 0.224, 0.225], "official code, utils/train_utils.py"),
    (SELECTING, "augment.flip", True, "official code, utils/train_utils.py"),
    (SELECTING, "augment.crop", 4, "official code, utils/train_utils.py"),
    (
        *("fedselect/office_home", "model.weights", "resnet18-f37072fd.pth"),
        "experimental setup: ImageNet's weights",
    ),
    (f"{FEDSELECT} -fedselect/alpha", "fedselect: method.p", 0.25, f"{OPTIONS} prune_percent"),
    (
        "fedselect/cifar10 fedselect/ablation fedselect/sizes fedselect/office_home",
        "fedselect: method.alpha",
        0.3,
        "Table 2: best",
    ),
    ("fedselect/cifar10c fedselect/mini_imagenet", "fedselect: method.alpha", 0.5, "Table 2: best"),
    ("fedselect/alpha", "method.alpha", "0.05,0.3,0.5,0.8", "Table 2"),
    (
        "fedselect/alpha fedselect/ablation",
        "paper",
        "fedselect_cifar10,fedselect_cifar10c,fedselect_mini_imagenet,fedselect_office_home",
        "Tables 2 and 3",
    ),
    (
        *("fedselect/ablation", "method.personalise", "least,random,0,5,10,15"),
        "Table 3; which layers is not stated",
    ),
    (
        *("fedselect/sizes", "method"),
        *("fedselect,fedavg,fedpac,fedrep,fedper,fedbabu,ditto,lg_fedavg", "Figure 3: legend"),
    ),
    *(
        (
            f"{FEDSELECT} {minus('fedselect/alpha fedselect/ablation')}",
            f"{method}: method.{key}",
            value,
            where,
        )
        for method, key, value, where in (
            ("ditto", "lam", 1.0, "Ditto, arXiv:2012.04221: default"),
            ("fedpac", "lam", 1.0, "FedPAC, arXiv:2306.11867"),
            ("fedpac", "head_lr", 0.1, "FedPAC, arXiv:2306.11867"),
        )
    ),
    (f"{FEDSELECT} -fedselect/alpha", "fedselect: method.delta", "round", "Algorithm GradSelect"),
    (f"{FEDSELECT} -fedselect/alpha", "fedselect: method.strict", True, "Algorithm GradSelect"),
    (
        f"{FEDSELECT} -fedselect/alpha",
        "fedselect: method.scope",
        "tensor",
        "official code, lottery_ticket.py",
    ),
    (
        f"{FEDSELECT} -fedselect/alpha -fedselect/ablation",
        "fedpac: method.head_epochs",
        1,
        "FedPAC, arXiv:2306.11867",
    ),
    (
        f"{FEDSELECT} -fedselect/alpha -fedselect/ablation",
        "fedpac: method.body_epochs",
        2,
        "three local epochs, one of the head",
    ),
    (
        f"{FEDSELECT} -fedselect/alpha -fedselect/ablation",
        "fedrep: method.body_epochs",
        1,
        "three local epochs",
    ),
    # FedSPU, AAAI 2025
    (f"{FEDSPU} {STOPPING}", "rounds", 500, "experimental setup: T"),
    (f"{FEDSPU} {STOPPING}", "clients", 100, "experimental setup"),
    (f"{FEDSPU} {STOPPING}", "participation", 0.1, "experimental setup: 10 clients a round"),
    (f"{FEDSPU} {STOPPING}", "local.epochs", 5, "experimental setup: E"),
    (
        *("fedspu/emnist fedspu/emnist_stopping", "local.lr", 0.0002),
        "experimental setup; the code has 0.0005",
    ),
    (
        *("fedspu/speech fedspu/speech_stopping", "local.lr", 0.0005),
        "experimental setup; the code has 0.001",
    ),
    (
        *("fedspu/cifar10 fedspu/cifar10_stopping", "local.lr", 0.1),
        "experimental setup; the code has 0.005",
    ),
    ("fedspu/emnist fedspu/emnist_stopping", "local.batch_size", 16, "experimental setup"),
    ("fedspu/speech fedspu/speech_stopping", "local.batch_size", 16, "experimental setup"),
    ("fedspu/cifar10 fedspu/cifar10_stopping", "local.batch_size", 128, "experimental setup"),
    (f"{FEDSPU} {STOPPING}", "local.momentum", 0.0, "experimental setup: plain SGD"),
    (f"{FEDSPU} {STOPPING}", "local.weight_decay", 0.0, "experimental setup: plain SGD"),
    (f"{FEDSPU} {STOPPING}", "eval.finetune_epochs", 0, "personal models as they stand"),
    (f"{FEDSPU} {STOPPING}", "seed", "1,2,3", "Tables 1 and 2: three runs"),
    (f"{FEDSPU} {STOPPING}", "partition.name", "dirichlet", "experimental setup"),
    (f"{FEDSPU} {STOPPING}", "partition.alpha", "0.1,0.5,1.0", "experimental setup"),
    (
        f"{FEDSPU} {STOPPING}",
        "partition.test_fraction",
        0.3,
        "experimental setup: split factor 0.7",
    ),
    (
        f"{FEDSPU} {STOPPING}",
        "partition.samples_per_client",
        None,
        "experimental setup: unequal sizes",
    ),
    (f"{FEDSPU} {STOPPING}", "validation", 0.0, "Algorithm 2: the test split"),
    (f"{FEDSPU} {STOPPING}", "stopping.lam", 0.7, "Algorithm 2: lambda"),
    (FEDSPU, "stopping.early", False, "Table 1"),
    (STOPPING, "stopping.early", "true", "Table 2"),
    *(
        (f"fedspu/{name} fedspu/{name}_stopping", key, value, "experimental setup")
        for name, data in (
            ("emnist", "emnist"),
            ("cifar10", "cifar10"),
            ("speech", "speech_commands"),
        )
        for key, value in (("dataset.name", data), ("model.name", f"fedspu_{name}"))
    ),
    ("fedspu/cifar10 fedspu/cifar10_stopping", "dataset.mean", [0.5] * 3, "public code, CIFAR10/"),
    ("fedspu/cifar10 fedspu/cifar10_stopping", "dataset.std", [0.5] * 3, "public code, CIFAR10/"),
    *(
        (
            f"{FEDSPU} {STOPPING}",
            f"{method}: method.{key}",
            value,
            "experimental setup: five clusters of 20 clients",
        )
        for method in ("fedspu", "hermes", "fedmp", "prunefl", "fjord", "random_dropout")
        for key, value in (("widths", [0.2, 0.4, 0.6, 0.8, 1.0]), ("assign", "blocks"))
    ),
    # FedPURIN, arXiv:2510.16065
    (SMALL, "rounds", 200, "experimental setup"),
    (PURIN_CIFAR100, "rounds", 300, "experimental setup"),
    (FEDPURIN, "clients", 20, "experimental setup"),
    (FEDPURIN, "participation", 1.0, "experimental setup"),
    (FEDPURIN, "local.epochs", 5, f"{FLING} local_eps"),
    (FEDPURIN, "local.batch_size", 100, f"{FLING} batch_size"),
    (FEDPURIN, "local.lr", 0.1, f"{FLING} optimizer"),
    (FEDPURIN, "local.momentum", 0.9, f"{FLING} optimizer; not in the paper"),
    (FEDPURIN, "local.weight_decay", 0.0, f"{FLING} optimizer"),
    (FEDPURIN, "eval.finetune_epochs", 0, "Table 1: right after local training"),
    (FEDPURIN, "seed", "1,2,3", "Table 1: three splits; official code, experiment_purin.sh"),
    (FEDPURIN, "partition.name", "fixed_dirichlet", f"{FLING} sample_method"),
    (FEDPURIN, "partition.train_samples", 500, f"{FLING} train_num"),
    (FEDPURIN, "partition.test_samples", 100, f"{FLING} test_num"),
    (SMALL, "partition.alpha", "0.1,0.5,1.0", "Table 1"),
    (PURIN_CIFAR100, "partition.alpha", "0.01,0.1,0.5", "Table 1"),
    (SMALL, "model.name", "resnet8", "experimental setup"),
    (PURIN_CIFAR100, "model.name", "resnet10", "experimental setup"),
    (PURIN_FMNIST, "dataset.name", "fmnist", "Table 1"),
    (PURIN_CIFAR10, "dataset.name", "cifar10", "Tables 1 and 2"),
    (PURIN_CIFAR100, "dataset.name", "cifar100", "Table 1"),
    (PURIN_FMNIST, "dataset.mean", [0.0], "official code: scaled to [0, 1]"),
    (PURIN_FMNIST, "dataset.std", [1.0], "official code: scaled to [0, 1]"),
    (PURIN_CIFAR10, "dataset.mean", [0.0] * 3, "official code: scaled to [0, 1]"),
    (PURIN_CIFAR10, "dataset.std", [1.0] * 3, "official code: scaled to [0, 1]"),
    (SMALL, "augment.flip", False, "official code"),
    (
        PURIN_CIFAR100,
        "dataset.mean",
        [0.5071, 0.4865, 0.4409],
        "official code: the usual constants",
    ),
    (PURIN_CIFAR100, "dataset.std", [0.2009, 0.1984, 0.2023], "official code: the usual constants"),
    (PURIN_CIFAR100, "augment.flip", True, "official code"),
    (PURIN_CIFAR100, "augment.rotate", 15, "official code"),
    (PURIN_CIFAR100, "augment.crop", 4, "official code"),
    (
        *(COMPARING, "method", "fedpurin,fedcac,pfedsd,fedbn,fedper,fedavg,local_only"),
        "Tables 1 and 3",
    ),
    (SMALL, "fedpurin: method.beta", 100, "experimental setup"),
    ("fedpurin/fmnist fedpurin/cifar10", "fedcac: method.beta", 100, "experimental setup"),
    (PURIN_CIFAR100, "fedpurin: method.beta", 170, "experimental setup"),
    ("fedpurin/cifar100", "fedcac: method.beta", 170, "experimental setup"),
    (f"{FEDPURIN} -fedpurin/tau", "fedpurin: method.tau", 0.5, "experimental setup"),
    ("fedpurin/tau", "method.tau", "0.2,0.3,0.4,0.5,0.6", "Figure 4"),
    ("fedpurin/norm", "method.include_norm", "false,true", "Figure 3: with and without BN"),
    (
        *(FEDPURIN, "fedpurin: method.cutoff", 1e-10),
        "official code: scores up to 1e-10 are as good as zero",
    ),
    (COMPARING, "fedcac: method.cutoff", 1e-10, "official code: as FedPURIN's"),
    (COMPARING, "pfedsd: method.lam", 0.5, f"{FLING} pFedSD's lambda"),
    (COMPARING, "fedcac: method.tau", 0.5, "experimental setup"),
    (f"{COMPARING} {CHOSEN}", "fedpurin: method.score", "gradient", "Table 1"),
    (f"{COMPARING} {CHOSEN}", "fedpurin: method.hessian", False, "Table 1"),
    (
        f"{FEDPURIN} -fedpurin/norm",
        "fedpurin: method.include_norm",
        False,
        "official code, experiment_purin.sh",
    ),
    (FEDPURIN, "fedpurin: method.judge", "sparse", "official code"),
    (COMPARING, "fedavg: method.statistics", "local", f"{FLING} include_non_param=False"),
    (COMPARING, "fedper: method.statistics", "local", f"{FLING} include_non_param=False"),
    (VARIANTS, "method.score", "gradient,delta", "Table 2"),
    (VARIANTS, "method.hessian", "false,true", "Table 2"),
    # SubFLOT, arXiv:2604.06631, from public descriptions
    (SUBFLOT, "rounds", 200, "experimental setup"),
    ("subflot/scalability", "clients", "10,100", "scalability"),
    (f"{SUBFLOT} -subflot/har -subflot/scalability", "clients", 20, "experimental setup"),
    ("subflot/har", "clients", 30, f"{UNSAID} a client per person"),
    (SUBFLOT, "participation", 1.0, "experimental setup: join ratio"),
    (SUBFLOT, "local.epochs", 5, "experimental setup"),
    (SUBFLOT, "local.batch_size", 256, "experimental setup"),
    (SUBFLOT, "local.lr", 0.001, "experimental setup"),
    (SUBFLOT, "local.momentum", 0.0, f"{UNSAID} plain SGD"),
    (SUBFLOT, "local.weight_decay", 0.0, f"{UNSAID} none"),
    (SUBFLOT, "eval.finetune_epochs", 0, "tables: local models as trained"),
    (SUBFLOT, "seed", 42, f"{UNSAID} one run"),
    (
        f"{LABELS} -subflot/tiny_imagenet",
        "partition.name",
        "dirichlet",
        "experimental setup: practical label shift",
    ),
    (f"{LABELS} -subflot/tiny_imagenet", "partition.alpha", 0.1, "experimental setup: beta"),
    (
        *("subflot/cifar10 subflot/cifar100", "partition", "dirichlet,shards"),
        "experimental setup: both label shifts",
    ),
    ("subflot/ablation", "partition", "dirichlet", "ablation table"),
    ("subflot/ablation_digit5", "partition", "groups", "ablation table: feature shift"),
    (
        *("subflot/tiny_imagenet", "partition.name", "shards"),
        "experimental setup: pathological label shift",
    ),
    ("subflot/tiny_imagenet", "partition.classes_per_client", 20, f"{UNSAID} 20 of 200"),
    (
        *("subflot/har subflot/digit5 subflot/pacs subflot/ablation_digit5", "partition.name"),
        *("groups", "experimental setup: feature shift, real world"),
    ),
    (SUBFLOT, "partition.test_fraction", 0.25, f"{UNSAID} 0.25"),
    (
        f"{SUBFLOT} -subflot/har -subflot/ag_news",
        "model.name",
        "cnn4",
        f"{UNSAID} the usual CNN of four layers",
    ),
    ("subflot/har", "model.name", "har_cnn", UNSAID),
    ("subflot/ag_news", "model.name", "text", UNSAID),
    *(
        (f"subflot/{name}", "dataset.name", name, "tables")
        for name in ("cifar10", "cifar100", "tiny_imagenet")
    ),
    *(
        (f"subflot/{name}", "dataset.name", name, "tables")
        for name in ("ag_news", "har", "digit5", "pacs")
    ),
    ("subflot/ablation", "dataset.name", "cifar10", "ablation table"),
    ("subflot/scalability", "dataset.name", "cifar100", f"{UNSAID} CIFAR100"),
    ("subflot/ablation_digit5", "dataset.name", "digit5", "ablation table"),
    (ABLATION, "method.positions", "first", f"{UNSAID} the first neurons"),
    (WHOLE, "method", "subflot,flexfl,heterofl,fedrolex", "tables: among its baselines"),
    (SUBFLOT, "subflot: method.rates", [0.0, 0.25, 0.5, 0.75], "experimental setup: rho, uniform"),
    (SUBFLOT, "subflot: method.assign", "random", "experimental setup: rho, uniform"),
    (SUBFLOT, "subflot: method.alpha", 0.5, "experimental setup"),
    (SUBFLOT, "subflot: method.lam", 1.0, "experimental setup"),
    (WHOLE, "flexfl: method.levels", [0.25, 0.5, 0.75, 1.0], "experimental setup: rates"),
    (WHOLE, "flexfl: method.devices", [1, 1, 1, 1], "experimental setup: uniform"),
    (WHOLE, "flexfl: method.assign", "random", "experimental setup: uniform"),
    *(
        (WHOLE, f"{method}: method.{key}", value, "experimental setup: rates, uniform")
        for method in ("heterofl", "fedrolex")
        for key, value in (("widths", [1.0, 0.75, 0.5, 0.25]), ("assign", "random"))
    ),
    (
        *(ABLATION, "paper", "subflot,subflot_without_otp,subflot_without_sar,subflot_without_ota"),
        "ablation table",
    ),
    *(
        (
            ABLATION,
            f"paper=subflot{without and '_without_'}{without}: method.{part}",
            part != without,
            "ablation table",
        )
        for without in ("", "otp", "sar", "ota")
        for part in ("otp", "sar", "ota")
    ),
]
"""Experiments (without those behind a minus), key, value, and where it stands; `floco: method.tau`
is with that method, `paper=subflot: method.ota` with that choice. Values of a sweep are one text.
"""

OTHERS = {
    *("adapters/cifar100", "fedobp/all_methods", "fedobp/alpha_sweep", "fedobp/q_sweep", "demo"),
    "smoke",
}  # are in no paper
PAPERS = [name for name in EXPERIMENTS if name not in OTHERS]
ALWAYS = (
    *("rounds", "clients", "participation", "partition.name", "model.name", "eval.finetune_epochs"),
    *("local.epochs", "local.batch_size", "local.lr", "local.momentum", "local.weight_decay"),
)


def rows() -> list[tuple[str, str, Any, str]]:
    """One per experiment."""
    found = []
    for names, key, value, where in TABLE:
        words = dict.fromkeys(names.split())
        left = {word[1:] for word in words if word.startswith("-")}
        found += [
            (word, key, value, where)
            for word in words
            if not word.startswith("-") and word not in left
        ]
    return found


@functools.cache
def sweep(experiment: str) -> dict[str, list[str]]:
    """What an experiment sweeps over."""
    return swept(composed(f"experiment={experiment}"))


@functools.cache
def settings(experiment: str, choice: str = "") -> dict[str, Any]:
    """An experiment's first job, or that of a method, or of a choice such as `paper=subflot`."""
    group, _, name = choice.rpartition("=")
    own = {key: values[0] for key, values in sweep(experiment).items()} | (
        {group or "method": name} if name else {}
    )
    return resolve_config(
        composed(f"experiment={experiment}", *(f"{key}={value}" for key, value in own.items()))
    )


@pytest.mark.parametrize("experiment", keep_quick(PAPERS, 4))
def test_an_experiment_has_the_papers_settings(experiment: str) -> None:
    wrong = {}
    for key, wanted, where in (
        (key, value, where) for name, key, value, where in rows() if name == experiment
    ):
        method, _, path = key.rpartition(": ")
        values, several = settings(experiment, method), sweep(experiment)
        found: Any = values
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not method and path in several:
            found = ",".join(several[path]).lower()
        if found != wanted:
            wrong[key] = f"{found} instead of {wanted} ({where})"
        group, _, name = method.rpartition("=")
        if method and (group or "method") in several:
            assert name in several[group or "method"], key
    assert not wrong


@pytest.mark.parametrize("experiment", keep_quick(PAPERS, 4))
def test_no_setting_of_an_experiment_is_left_out(experiment: str) -> None:
    told = {key for name, key, _, _ in rows() if name == experiment}
    assert set(ALWAYS) <= told | {
        key.rpartition(": ")[2] for key in told if key.endswith("momentum")
    }
    assert told & {"dataset", "dataset.name"}
    assert told >= {key for key in sweep(experiment) if key not in ("method", "seed")}
    if "alpha" in settings(experiment)["partition"]:
        assert "partition.alpha" in told
    assert ("seed" in told) == ("seed" in sweep(experiment)) or experiment.startswith(
        ("fedselect", "subflot")
    )


def test_every_row_is_of_an_experiment() -> None:
    assert {name for name, *_ in rows()} == set(PAPERS)
    pairs = [(name, key) for name, key, *_ in rows()]
    assert len(set(pairs)) == len(pairs)


def test_subflots_pathological_split() -> None:
    """How many classes a client has is not stated; here a tenth of them, of CIFAR10's a fifth."""
    for name, classes in (("cifar10", 2), ("cifar100", 10), ("tiny_imagenet", 20)):
        for method in sweep(f"subflot/{name}")["method"]:
            split = composed(
                f"experiment=subflot/{name}", "partition=shards", f"method={method}"
            ).partition
            assert (split.name, split.classes_per_client) == ("shards", classes)


def test_fedspus_code_is_at_hand() -> None:
    """Its step sizes are said beside the paper's."""
    for name, lr in (("emnist", 0.0005), ("speech", 0.001), ("cifar10", 0.005)):
        assert f"local.lr={lr}" in head(f"fedspu/{name}")


@pytest.mark.parametrize("experiment", ["fedpurin/fmnist", "fedpurin/cifar100"])
def test_no_method_of_fedpurins_comparison_sends_running_statistics(experiment: str) -> None:
    for name in sweep(experiment)["method"]:
        values = {
            key: value
            for key, value in settings(experiment, name)["method"].items()
            if key != "name"
        }
        assert METHODS[name](**values).buffers() == {"main": "local"}, name


def test_q_is_table_2s() -> None:
    table = composed("quantile=paper").quantile.table
    for dataset, by_alpha in table.items():
        for alpha, q in by_alpha.items():
            known = published.lookup(
                (SOURCE + "II", QUANTILE, "fedobp", str(dataset), f"Dir({alpha:g})")
            )
            assert known is not None
            assert known.value == q
    assert len(table) == 8


@pytest.mark.parametrize(
    ("name", "files", "kind"),
    [
        ("as_published", "tables", {}),
        ("ablation", "ablation", {"classifier_only": False}),
        ("ablation_cls", "ablation", {"classifier_only": True}),
        ("ablation", "moving average", {"classifier_only": False, "ema": 0.5}),
    ],
)
def test_q_is_that_of_the_public_files(name: str, files: str, kind: dict[str, Any]) -> None:
    table = composed(f"quantile={name}", "dataset=mnist").quantile.table
    fitting = [
        log
        for log in logs.read_logs()
        if log.files == files and all(getattr(log, k) == v for k, v in kind.items())
    ]
    known = {(log.dataset, log.setting): log.q for log in fitting if log.method == "fedobp"}
    own = {
        (DATASET_TITLES[key], f"Dir({alpha:g})"): q
        for key, row in table.items()
        for alpha, q in row.items()
    }
    assert {key: own[key] for key in known} == known
    assert {dataset for dataset, _ in own} == {dataset for dataset, _ in known} | {"Digits"}


def test_the_weight_of_past_scores_is_that_of_the_public_files() -> None:
    """0.1 on CIFAR10, 0.3 on Fashion-MNIST at Dir(0.1), 0.5 else."""
    for dataset, alpha in itertools.product(("cifar10", "cifar100", "fmnist"), (0.1, 0.5)):
        job = ("experiment=fedobp/as_published", f"dataset={dataset}", f"partition.alpha={alpha}")
        where = "tables", "fedobp", DATASET_TITLES[dataset], f"Dir({alpha})"
        [known] = [log.ema for log in logs.read_logs() if log[:4] == where]
        assert resolve_config(composed(*job))["method"]["ema"] == known


SCALED = {
    "mnist": ([0.1307], [0.3015]),
    "fmnist": ([0.286], [0.3205]),
    "emnist": ([0.1736], [0.3248]),
    "svhn": ([0.4377, 0.4438, 0.4728], [0.1201, 0.1231, 0.1052]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.201]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2009, 0.1984, 0.2023]),
    "organamnist_as_published": ([118.7546], [62.3489]),
    "organcmnist_as_published": ([124.424], [58.8092]),
}
"""Constants of FedOBP's public code, a fork of FL-bench."""


@pytest.mark.parametrize("name", SCALED)
def test_images_are_scaled_as_in_the_public_code(name: str) -> None:
    dataset = composed(f"dataset={name}").dataset
    assert (dataset.mean, dataset.std) == SCALED[name]


def test_figure_6_has_as_many_personal_entries_as_its_code_divides_by() -> None:
    sizes = {"cifar10": 878_538, "svhn": 878_538, "cifar100": 924_708, "emnist": 608_702}
    sizes |= {
        "mnist": 582_026,
        "fmnist": 582_026,
        "organamnist": 582_539,
        "organcmnist": 582_539,
        "digits": 582_026,
    }
    counts = dict(zip(EIGHT.split(","), (44, 93, 61, 36, 6, 30, 30, 30), strict=True)) | {
        "digits": 583
    }
    table = composed("quantile=figure6").quantile.table
    for dataset, count in counts.items():
        size = sizes[dataset]
        assert size - 1 - math.floor(round(table[dataset][0.1] * (size - 1), 9)) == count


# Published numbers

QUOTED = {
    "fedselect/cifar10": "82.25 77.65 77.20 75.45 75.40 75.30 74.60 72.75 67.60 27.70",  # Table 1
    "fedselect/alpha": (  # Table 2
        "80.10 82.25 82.20 81.40 68.30 70.60 72.05 71.40 37.60 37.84 38.69 34.51 78.46 80.51 76.08 76.65"
    ),
    "fedselect/ablation": (  # Table 3
        "79.87 79.73 79.96 78.36 79.24 78.08 64.20 61.12 65.76 62.81 64.82 62.50 "
        "35.65 33.28 35.43 32.74 33.33 34.91 78.23 76.33 77.06 79.08 79.64 79.11"
    ),
    "fedselect/cifar10c": "72.05 69.50 69.50 68.55 66.65 21.35",
    "fedselect/mini_imagenet": "38.69 37.72 36.68 34.98 30.78 8.06",
    "fedselect/office_home": "80.51 80.07 78.75 77.99 75.60 74.35",
    "fedspu/emnist": "73.42 69.09 67.42 67.34 66.26 7.66",  # Table 1
    "fedspu/cifar10": "51.81 47.83 40.52 36.65 33.48 24.95",
    "fedspu/speech": "39.1 34.06 32.03 21.5 21.08 11.20",
    # Table 1
    "fedpurin/fmnist": "96.55 92.15 89.50 96.80 92.12 89.42 97.17 92.80 90.23 95.65 88.52 85.30",
    "fedpurin/cifar10": (
        "85.90 71.53 65.50 86.48 71.10 63.23 85.52 69.47 62.62 84.75 67.38 61.97 81.97 60.78 52.42"
    ),
    "fedpurin/cifar100": (
        "83.07 54.23 34.92 82.87 52.47 33.73 82.63 54.98 34.78 82.07 52.93 31.55 83.60 51.47 33.67 81.32 46.93 23.43"
    ),
    # Table 2
    "fedpurin/fmnist_ablation": (
        "96.50 92.08 89.27 96.55 92.15 89.50 96.48 92.30 89.60 96.57 92.27 89.62"
    ),
    "fedpurin/cifar10_ablation": (
        "85.27 72.13 65.08 85.90 71.53 65.50 85.62 70.77 65.27 86.27 71.45 65.63"
    ),
    "fedpurin/cifar100_ablation": (
        "82.33 53.48 33.05 83.07 54.23 34.92 82.25 53.42 32.58 82.55 54.03 34.87"
    ),
    "subflot/cifar10": "86.89 85.13 84.54 83.78",
    "subflot/cifar100": "44.88 35.27 58.37 49.21 40.95",
    "subflot/tiny_imagenet": "29.30 22.23 19.68",
    "subflot/ag_news": "87.88 86.02 84.12",
    "subflot/har": "79.72 76.24 69.80",
    "subflot/digit5": "92.58",
    "subflot/pacs": "41.58 20.17 19.27",
    "subflot/scalability": "39.20 32.61",
    "subflot/ablation": "83.78 83.21 82.77 81.41",
    "subflot/ablation_digit5": "92.58 90.37 89.73 78.74",
    "fedobp/table3": "87.02 70.22",  # Table III
    "fedobp/table5": "87.36 85.00 87.36",  # Table V
    "fedobp/table5_cls": "87.37",
    "fedobp/table5_ema": "99.39",
    "fedobp/fmnist_dir01": "96.89 87.29 96.24 94.93",  # Table IV
}


def head(experiment: str) -> str:
    return (ROOT / f"conf/experiment/{experiment}.yaml").read_text().split("defaults:")[0]


def quoted(experiment: str) -> list[str]:
    """The accuracies behind `Published` or `(published)`."""
    lines = re.findall(r"^# .*[Pp]ublished\b[^:]*: ?(.*)$", head(experiment), re.MULTILINE)
    plain = re.sub(r"\(?alpha [\d.]+|Dir\([\d.]+\)|q = [\d.]+", "", "\n".join(lines))
    return re.findall(r"(?<![\d.=])\d{1,2}\.\d{1,2}(?!\d)", plain)


@pytest.mark.parametrize("experiment", PAPERS)
def test_heads_quote_the_published_numbers(experiment: str) -> None:
    assert quoted(experiment) == QUOTED.get(experiment, "").split()


def test_quoted_numbers_are_among_those_the_report_shows() -> None:
    """Of the papers that its table has."""
    known: dict[str, set[float]] = {}
    for path in (ROOT / "fedpfl/papers").glob("*/published.csv"):
        with open(path, encoding="utf-8", newline="") as file:
            known[path.parent.name] = {float(row["value"]) for row in csv.DictReader(file)}
    assert "fedobp" in known
    for experiment, numbers in QUOTED.items():
        assert {float(number) for number in numbers.split()} <= known[experiment.partition("/")[0]]
