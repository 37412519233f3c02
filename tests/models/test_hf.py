"""Language models of transformers: their own answers, and training as transformers and peft do."""

import ast
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedpfl
from fedpfl import export, models
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.data.datasets.memory import hold_data
from fedpfl.data.federation import Shape
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.vision import load_torchvision
from tests.command import compose_once, format_override
from tests.conftest import assert_close, assert_same, read_cases

load_torchvision()
transformers = pytest.importorskip("transformers", reason="needs the extra lm")

LENGTH, VOCABULARY, CLASSES, PAD = 7, 30, 3, 1
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "intermediate_size": 32}
DISTILLED = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
WIDE = {"initializer_range": 0.3}  # with the usual one nothing moves in three rounds
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 9}
STILL = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
TEXTS = Shape((LENGTH,), kind="token ids", pad=PAD)
LINES = Shape((LENGTH,), kind="token ids", answer_axes=(LENGTH,), pad=PAD)
KINDS = {
    "bert": (SIZES, TEXTS),
    "distilbert": (DISTILLED, TEXTS),
    "deberta-v2": (SIZES, TEXTS),
    "gpt2": (GPT2, TEXTS),
    "gpt2 lines": (GPT2, LINES),
    "llama lines": (SIZES, LINES),
}


def draw_texts(count, seed=0, pad=PAD):
    """Ids `[count, LENGTH]` of texts of several lengths."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, LENGTH + 1, (count, 1))
    x = random.integers(2, VOCABULARY, (count, LENGTH)).astype(np.int32)
    return np.where(np.arange(LENGTH) < lengths, x, np.int32(pad))


def write_config(values):
    return "model.config=" + str(values).replace("'", "")


def build(kind, **options):
    config, shape = KINDS[kind]
    classes = VOCABULARY if shape is LINES else CLASSES
    arch = kind.split()[0]
    return models.build_network("hf", shape, classes, 0, arch=arch, config=config, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_answers_as_transformers_own_and_side_by_side_as_alone(kind):
    net = build(kind)
    x = torch.from_numpy(draw_texts(6))
    logits = net.bind({"main": net.buffers})(net.params, x)
    # ---- Transformers' own class, which sees one text after another, without any padding.
    module = net.copy_module().eval()
    with torch.no_grad():
        for ids, own in zip(x, logits, strict=True):
            text = ids[ids != PAD].long()[None]
            theirs = super(type(module), module).forward(input_ids=text).logits[0]
            assert_close(own[: len(theirs)] if theirs.dim() == 2 else own, theirs, atol=1e-5)

    # ---- Three clients' gradients at once.
    def loss(params, ids):
        return net.bind({"main": net.buffers})(params, ids).logsumexp(-1).sum()

    clients = [tree.map(lambda leaf, by=by: leaf + 0.01 * by, net.params) for by in range(3)]
    together = torch.func.vmap(torch.func.grad(loss))(tree.stack(clients), x.view(3, 2, LENGTH))
    for place, (one, ids) in enumerate(zip(clients, x.view(3, 2, -1), strict=True)):
        assert_close(tree.take(together, place), torch.func.grad(loss)(one, ids), atol=1e-5)


def save_network(folder, is_causal):
    """A folder as a user has one, made by transformers alone."""
    torch.manual_seed(1)
    if is_causal:
        config = transformers.GPT2Config(**GPT2, **STILL, **WIDE, eos_token_id=0)
        network = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(**SIZES, **NO_DROPOUT, **WIDE, num_labels=CLASSES)
        network = transformers.BertForSequenceClassification(config)
    network.save_pretrained(folder)
    return folder


def load_plainly(folder, is_causal):
    kind = transformers.AutoModelForSequenceClassification
    if is_causal:
        kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, attn_implementation="eager")


def train_plainly(folder, is_causal, start, clients):
    """Three rounds of FedAvg in transformers and peft: each client takes three steps on all it has."""
    peft = pytest.importorskip("peft", reason="compares with peft")
    targets, task = ["query", "value"], "SEQ_CLS"
    if is_causal:
        targets, task = ["c_attn"], "CAUSAL_LM"
    network = load_plainly(folder, is_causal)
    adapter = peft.LoraConfig(
        task, r=2, lora_alpha=6, target_modules=targets, fan_in_fan_out=is_causal
    )
    model = peft.get_peft_model(network, adapter)
    leaves = {}
    for name, leaf in model.named_parameters():
        if leaf.requires_grad:
            own = name.removeprefix("base_model.model.").replace(".default", "")
            own = own.replace(".modules_to_save", "")
            leaves[own.removesuffix(".weight") if "lora" in own else own] = leaf
    assert leaves.keys() == start.keys()
    server = {name: start[name].view(leaf.shape) for name, leaf in leaves.items()}
    total = sum(len(x) for x, _ in clients)
    for _ in range(3):
        mean = tree.map(torch.zeros_like, server)
        for x, y in clients:
            for name, leaf in leaves.items():
                leaf.data = server[name].clone()
            optimizer = torch.optim.SGD(leaves.values(), lr=0.3)
            for _ in range(3):
                optimizer.zero_grad()
                labels = x.long().masked_fill(x == 0, -100) if is_causal else y
                mask = (x != 0).long()
                model(input_ids=x.long(), attention_mask=mask, labels=labels).loss.backward()
                optimizer.step()
            for name, leaf in leaves.items():
                mean[name] += len(x) / total * leaf.detach()
        server = mean
    return server


def assert_scores_are_by_token(run):
    """Perplexity, loss and top-1 of the last row, by hand from predictions."""
    counts = []
    for client in "ab":
        x, y = run.samples(client)
        logits = run.predict(client, x)[y >= 0]
        loss = F.cross_entropy(logits, y[y >= 0], reduction="sum")
        counts.append([float(loss), int((logits.argmax(-1) == y[y >= 0]).sum()), len(logits)])
    losses, hits, tokens = torch.tensor(counts, dtype=torch.float64).T
    expected = {
        "perplexity": (losses / tokens).exp().mean(),
        "perplexity_pooled": (losses.sum() / tokens.sum()).exp(),
        "top1": 100 * (hits / tokens).mean(),
        "top1_pooled": 100 * hits.sum() / tokens.sum(),
        "loss": losses.sum() / tokens.sum(),
    }
    row = run.rounds.iloc[-1]
    assert {name: float(row[name]) for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-5
    )
    assert hits.sum()


@pytest.mark.parametrize("is_causal", [False, True], ids=["classes", "next tokens"])
def test_fedavg_of_low_rank_additions_is_that_of_plain_transformers_and_peft(is_causal, tmp_path):
    # ---- Clients with texts of several lengths, in a single minibatch.
    folder = save_network(tmp_path / "network", is_causal)
    data = {}
    for client, count in (("a", 24), ("b", 40)):
        x = draw_texts(count, seed=count, pad=0)
        y = x[:, 0].astype(np.int64) % CLASSES
        if is_causal:
            after = np.pad(x[:, 1:], ((0, 0), (0, 1)))
            y = np.where(after == 0, -1, after)
        data[client] = (x, y)
    layers = ["c_attn"] if is_causal else ["query", "value"]
    words = ["model=hf", format_override("model.arch", folder), "adapter=lora", "method=fedavg"]
    words += [format_override("adapter.layers", layers), "adapter.rank=2", "adapter.alpha=6"]
    words += ["participation=1", "local.lr=0.3", "local.epochs=3", "local.batch_size=64"]
    if is_causal:
        words += ["task=next_token", f"dataset.classes={VOCABULARY}"]

    # ---- Both backends.
    for backend in ("loop", "batched"):
        place = {"directory": tmp_path / backend, "progress": False}
        run = fedpfl.run(*words, f"engine={backend}", data=data, rounds=3, **place)
        assert run.summary["engine"]["backend"] == backend
        assert f"{folder}: samples that are tested here may be among" in run.summary["caveat"]
        clients = [run.samples(client, "train") for client in "ab"]
        start = {k: v for k, v in run.network().named_parameters() if v.requires_grad}
        plain = train_plainly(folder, is_causal, start, clients)
        ours = run.personal("a")
        for name, value in plain.items():
            assert not torch.equal(value, start[name].view(value.shape))
            assert_close(ours[name].view(value.shape), value, atol=1e-6)

        if is_causal:
            assert_scores_are_by_token(run)

    # ---- peft answers alike from the folder that export writes, and a run begins from it.
    export.main([*["--format", "peft", "--clients", "a"], str(run.path), str(tmp_path / "models")])
    peft = pytest.importorskip("peft")
    network = load_plainly(folder, is_causal)
    theirs = peft.PeftModel.from_pretrained(network, tmp_path / "models" / "a").eval()
    x = torch.from_numpy(draw_texts(5, pad=0))
    with torch.no_grad():
        answer = theirs(input_ids=x.long(), attention_mask=(x != 0).long()).logits
    assert_close(run.predict("a", x), answer, atol=1e-5)
    again = format_override("model.weights", tmp_path / "models" / "a")
    resumed = fedpfl.run(
        *words, again, data=data, rounds=1, directory=tmp_path / "on", progress=False
    )
    for name, value in resumed.network().named_parameters():
        assert torch.equal(value, ours[name])
    with pytest.raises(FedpflError, match=r"adapter\.rank=2 adapter\.alpha=6 "):
        fedpfl.run(*words, again, "adapter.rank=3", data=data, directory=tmp_path / "3")


def test_layers_are_named_as_in_peft_and_the_map_to_the_vocabulary_is_frozen():
    def adapt(*layers, **options):
        lora = partial(models.ADAPTERS["lora"], layers=layers, rank=4, alpha=8.0, **options)
        return build("llama lines", adapter=lora)

    named = {name.rpartition(".")[0] for name in adapt("q_proj", "1.mlp.up_proj").params}
    assert named == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)} | {
        "model.layers.1.mlp.up_proj"
    }
    everything = adapt("all-linear", rslora=True)
    assert len({name.rpartition(".")[0] for name in everything.params}) == 14
    assert all(".lora_" in name for name in everything.params)
    assert {layer.scale for layer in everything.module.modules() if hasattr(layer, "pairs")} == {
        4.0
    }


REFUSED = """
bertt | {} | TEXTS | arch=bertt is no folder .* did you mean bert
bert | {} | LINES | is of the kind bert; take a decoder such as gpt2
t5 | {"decoder_start_token_id": 0} | TEXTS | is of the kind t5; take an encoder or a decoder
gpt2 | {"n_positions": 5} | TEXTS | reads 5 tokens; set dataset.length=5
"""


@pytest.mark.parametrize(("arch", "config", "shape", "told"), read_cases(REFUSED, " | "))
def test_what_no_network_can_be_made_of_is_one_line(arch, config, shape, told):
    config = {"vocab_size": VOCABULARY, **ast.literal_eval(config)}
    samples = {"TEXTS": TEXTS, "LINES": LINES}[shape]
    with pytest.raises(FedpflError, match=f"^model=hf: .*{told}"):
        models.build_network("hf", samples, 3, 0, arch=arch, config=config)


def test_dropout_is_each_clients_own_and_ids_without_a_row_are_refused(tmp_path):
    data = {client: (draw_texts(9, seed), np.arange(9) % 3) for seed, client in enumerate("ab")}
    config = write_config(DISTILLED)
    words = ["model=hf", "model.arch=distilbert", "participation=1", "local.batch_size=4"]
    runs = []
    by_key = [f"model.config.{key}={value}" for key, value in DISTILLED.items()]
    for workers, sizes in (1, [config]), (2, by_key):
        place = {"directory": tmp_path / f"{workers}", "progress": False, "rounds": 2}
        runs.append(fedpfl.run(*words, *sizes, f"engine.workers={workers}", data=data, **place))
    assert_same(*[run.personal("b") for run in runs])
    still = write_config({**DISTILLED, "dropout": 0, "attention_dropout": 0})
    place["directory"] = tmp_path / "still"
    without = fedpfl.run(*words, still, data=data, **place)
    assert without.summary["digest"] != runs[0].summary["digest"]
    small = write_config({**DISTILLED, "vocab_size": 20})
    with pytest.raises(FedpflError, match="knows 20 tokens, and data set memory has id 29"):
        fedpfl.run(*words, small, data=data, directory=tmp_path / "small")


def test_what_is_frozen_is_one_storage_for_workers_and_runs_of_a_process():
    held = hold_data((draw_texts(40), np.arange(40) % 3))
    words = ["dataset=memory", f"dataset.digest={held.digest}", "model=hf", "adapter=head"]
    words += ["clients=2", "model.arch=distilbert", write_config(DISTILLED)]
    shared = {}
    places = set()
    for method in ("fedavg", "fedper"):
        plan = check_config(compose_once(*words, f"method={method}"))
        run = build_run(plan, lambda key, make: shared.setdefault(key, shared.get(key) or make()))
        for net in (run.net, run.net.copy(), run.net.copy().copy()):
            places.add(tuple(leaf.data_ptr() for leaf in net.frozen.values()))
    assert len(places) == 1
