"""What the docs show works: links, commands, the tutorials' method and data set."""

import functools
import itertools
import re
import shlex
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override

from fedpfl import papers
from fedpfl.config.choices import list_choices
from fedpfl.methods import METHODS
from fedpfl.papers import filling, registry
from fedpfl.report.__main__ import main as report
from fedpfl.report.grouping import groups
from fedpfl.report.load import runs
from fedpfl.train import CONF
from tests.command import format_override, read_summary, run_command
from tests.conftest import ROOT, keep_quick
from tests.papers.test_experiments import assert_fits, swept
from tests.report.test_report import add_columns, write_run

sys.path.insert(0, str(ROOT / "scripts"))
import methods_table
import reproduction
import robustness
import status
import try_docs

BLOCK = try_docs.BLOCK
COMMANDS = try_docs.list_commands()
TRAIN = [command.text for command in COMMANDS if command.text.startswith(try_docs.TRAIN)]
SPREAD = [text for _, text in COMMANDS if text.startswith("torchrun")]
TRAIN += [f"python {text[text.index('-m fedpfl') :]}" for text in SPREAD]
PLAIN = ("experiment=", "data_dir=")
OWN = [
    text for text in TRAIN if any(not word.startswith(PLAIN) for word in try_docs.split_words(text))
]
PAGES = ("README.md", "data.md")
FIRST = [one.text for one in COMMANDS if one.page in PAGES and one.text in TRAIN]
OF_PAGES = [one.text for one in COMMANDS if one.page.endswith(".md")]
REPORT = [text for text in OF_PAGES if "fedpfl.report" in text]


def test_links_lead_to_a_file_and_a_heading():
    for page in try_docs.PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name}: {target}"
            if anchor:
                text = BLOCK.sub("", place.read_text())
                headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
                assert anchor in map(name_anchor, headings), f"{page.name}: {target}#{anchor}"


def name_anchor(heading: str) -> str:
    """The anchor that a code host and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_pages_show_commands():
    texts = [command.text for command in COMMANDS]
    assert len(texts) == len(set(texts)) > 150
    for experiment in list_choices("experiment"):
        shown = any(f"experiment={experiment} " in f"{text} " for text in texts)
        assert shown or experiment == "smoke"
    made = {f"make {name}" for name in ("demo", "smoke", "tables", "bench")}
    assert made | {"python -m fedpfl.report"} <= {*texts}
    assert not any("  " in text or "\\" in text or "#" in text for text in texts)


@pytest.mark.parametrize(
    "everything", [False, pytest.param(True, marks=pytest.mark.full)], ids=["first", "all"]
)
@pytest.mark.parametrize("command", keep_quick(OWN, 2))
def test_commands_compose(command: str, everything: bool, tmp_path, monkeypatch):
    """The first job of each, or so many that each value occurs."""
    if "submitit" in command or "launcher=ray" in command:
        for name in ("submitit", "ray"):
            module = f"hydra_plugins.hydra_{name}_launcher"
            pytest.importorskip(module, reason="needs the extras slurm and ray")
    require_packages(command)
    if "dataset=sites" in command:
        monkeypatch.chdir(tmp_path)
        try_docs.hospitals.write_hospitals(tmp_path / "hospitals")
    # So does Hydra, before the jobs
    parsed, composed = try_docs.compose_command(try_docs.fill_placeholders(command))
    # What the experiment sweeps over, the command may set.
    given = {override.key_or_group for override in parsed}
    choices = {name: values for name, values in swept(composed).items() if name not in given}
    choices |= {o.key_or_group: proposed(o) for o in parsed if o.is_sweep_override()}
    base = [override.input_line for override in parsed if not override.is_sweep_override()]
    with initialize_config_dir(CONF, version_base="1.3"):
        turns = range(max(map(len, choices.values()), default=1))  # each value once
        for turn in turns if everything else turns[:1]:
            job = [f"{name}={values[turn % len(values)]}" for name, values in choices.items()]
            assert_fits(compose("train", base + job))


def require_packages(command: str) -> None:
    """Skip a command that reads data by a package that is not installed."""
    if "dataset=hf" in command:
        pytest.importorskip("datasets", reason="needs the extra hf")


def proposed(override: Override) -> list[str]:
    """What a sweep takes its values from; of an interval both ends."""
    if override.is_discrete_sweep():
        return list(override.sweep_string_iterator())
    return [str(override.value().start), str(override.value().end)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer") / "checkout"
    try_docs.make_checkout(folder, ("mnist", "fmnist", "cifar100"))
    return folder


@pytest.mark.parametrize(
    ("command", "seeds"),
    [
        *keep_quick([(command, "seed=1") for command in FIRST]),
        *(
            pytest.param(command, "seed=1,2,3", marks=pytest.mark.full)
            for command in FIRST
            if "seed=1,2,3" in command
        ),
    ],
)
def test_commands_run(command: str, seeds: str, checkout):
    """A newcomer's first, those with three seeds with one; scripts/try_docs.py runs all."""
    if "experiment=fedobp/table3" in command:
        pytest.skip("104 runs: scripts/try_docs.py makes them")
    require_packages(command)
    before = set((checkout / "outputs").rglob("summary.json"))
    line = try_docs.make_runnable(command).text.replace("seed=1,2,3", seeds)
    place = format_override("data_dir", checkout / "made_up")
    result = run_command(*shlex.split(line)[3:], place, cwd=checkout)
    assert result.code == 0, result.err
    made = set((checkout / "outputs").rglob("summary.json")) - before
    assert made
    assert {read_summary(path.parent)["status"] for path in made} == {"finished"}


@pytest.mark.parametrize("every", keep_quick([60, 1]))
def test_the_table_of_methods_is_up_to_date(every: int):
    """Of some of the methods, and of all."""
    rows = methods_table.read_costs()
    advice = "run python scripts/methods_table.py --write"
    assert [row["method"] for row in rows] == list(METHODS), advice
    some = dict(list(METHODS.items())[::every])
    assert rows[::every] == methods_table.count_costs(some), advice
    assert methods_table.make_table(rows) in (ROOT / "docs" / "methods.md").read_text(), advice


def test_the_measured_tables_are_what_the_files_say(tmp_path):
    """A file that changes changes the page."""
    page = reproduction.PAGE.read_text()
    made = {name: table() for name, table in reproduction.PAGE_TABLES.items()}
    assert reproduction.fill_page(page, made) == page, "run python scripts/reproduction.py --write"
    assert reproduction.fill_page(page, {"settings": "| no |"}) != page
    of_site = {name: table() for name, table in reproduction.SITE_TABLES.items()}
    assert "| CIFAR100 | FedAvg | 25.21 (-0.27) | 26.04 (-0.21) |" in of_site["agreement"]
    assert [path.name for path in reproduction.draw(tmp_path / "figure.png")] == ["figure.png"]


@pytest.mark.parametrize("name", robustness.TABLES)
def test_the_tables_of_robustness_are_what_the_file_says(name: str):
    page = (ROOT / "docs" / name).read_text()
    rows = robustness.read_rows(robustness.ROWS_FILE)
    made = robustness.replace_table(page, robustness.TABLES[name](rows))
    assert made == page, "run python scripts/robustness.py --write"
    fewer_rows = {key: row for key, row in rows.items() if "FedAvg" not in key}
    assert robustness.replace_table(page, robustness.TABLES[name](fewer_rows)) != page


def test_what_has_been_reproduced_is_what_the_files_say(tmp_path, monkeypatch):
    """Each table and figure of the papers has a row; one more or less is an error."""
    page, script = status.PAGE.read_text(), "scripts/status.py"
    for name in ("read_whole", "read_small"):  # once, not for each of the tables
        cells = [*getattr(status, name)()]
        monkeypatch.setattr(status, name, functools.partial(iter, cells))
    made = {"status": status.make_table()}
    assert reproduction.fill_page(page, made, script) == page, (
        "run python scripts/status.py --write"
    )
    assert {"fedobp/table3", "fedobp/figure4"} < {*re.findall(r"\w+/\w+", made["status"])}
    cells = [cell for cell, _ in status.read_small() if status.find_published(cell) is not None]
    assert len(cells) == len(set(cells)), "two configurations are taken for one published number"
    lines = status.RESULTS.read_text().splitlines()
    monkeypatch.setattr(status, "RESULTS", tmp_path / "status.csv")
    status.RESULTS.write_text("\n".join(lines[:-1]))
    with pytest.raises(ValueError, match="subflot/scalability"):
        status.make_table()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A folder with runs such as the docs' commands speak of."""
    root = tmp_path_factory.mktemp("user")
    obp = {"name": "fedobp", "score": "obp", "norm": "global"}
    for number, q in enumerate((0.9, 0.999, 1.0)):
        write_run(root / f"outputs/fmnist/fedobp/{number}/seed1", method=obp | {"q": q})
    write_run(root / "outputs/fmnist/fedavg/0/seed1", method="fedavg")
    for folder in ("digits", "federated/digits"):
        write_run(root / f"outputs/{folder}/fedavg/0/seed1", method="fedavg")
    experiments = ("demo", "fedobp_quick", "idea", "equal/final", "paper/final")
    methods = {"fedavg": {"name": "fedavg"}, "fedobp": obp | {"q": 0.999}}
    for experiment, (name, method), seed in itertools.product(
        experiments, methods.items(), (1, 2, 3)
    ):
        folder = root / f"outputs/{experiment}/{name}/key/seed{seed}"
        write_run(folder, method=method, seed=seed, dataset="digits")
    names = ("fedavg", "fedper", "fedobp", "local_only")
    for place, (method, dataset) in enumerate(itertools.product(names, ("cifar10", "svhn"))):
        folder = root / f"outputs/fedobp/{method}/{dataset}/seed1"
        write_run(folder, {4: 60.0 + place}, method=method, dataset=dataset)
    for name in ("fedavg", "fedper"):  # their commands name these directories
        write_run(root / name, method={"name": name})
    as_published = obp | {"q": 0.99992, "ema": 0.3}
    for name, method in (("dir01", {"name": "fedavg"}), ("as_published", as_published)):
        folder = root / f"outputs/fmnist_{name}/method/key/seed1"
        write_run(folder, partition=("published", 0.1), method=method)
    write_run(root / "outputs/fmnist/shifted/0/seed1", method="fedavg", shift={"rotation": 360.0})
    attacked = root / "outputs/fmnist/attacked/0/seed1"
    attack = {"name": "backdoor", "share": 0.2, "clients": None}
    write_run(attacked, method="fedavg", attack=attack)
    add_columns(attacked, asr=[None, 40.0, None, 60.0])
    logged = {"method": "fedavg", "partition": ("published", 0.1), "seed": 42}
    write_run(root / "outputs/fedobp/logged/seed42", {100: 80.0}, reached=100, rounds=400, **logged)
    rows = "method,round,accuracy_before,accuracy_after\nfedavg,1,50,60\nfedavg,2,51,61\n"
    (root / "published_curves.csv").write_text(rows)
    (root / "docs").symlink_to(ROOT / "docs")
    return root


@pytest.mark.parametrize("command", keep_quick(REPORT, 2))
def test_report_commands_run(command, outputs, monkeypatch, capsys):
    monkeypatch.chdir(outputs)
    assert report(shlex.split(command)[3:]) == 0, capsys.readouterr().err


def shown(page: str, mark: str) -> str:
    """The one block of Python on a page that holds `mark`."""
    blocks = try_docs.BLOCK.findall((ROOT / page).read_text())
    (block,) = (text for kind, text in blocks if kind == "python" and mark in text)
    return block


def test_the_tutorials_paper_is_found_and_filled(outputs, tmp_path, monkeypatch):
    (tmp_path / "doe").mkdir()
    (tmp_path / "doe/__init__.py").touch()
    (tmp_path / "doe/tables.py").write_text(shown("docs/extend.md", "Doe 2026"))
    monkeypatch.setattr(papers, "__path__", [*papers.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "PAPERS", [*registry.PAPERS, "doe"])
    tables = registry._collect_from_papers("TABLES")
    for name in ("fedpfl.papers.doe", "fedpfl.papers.doe.tables"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(filling, "TABLES", tables)
    frame = filling.fill_table("doe/table1", groups(runs(outputs / "outputs/fedobp"))).frame
    assert frame[["row", "own"]].values.tolist() == [["FedAvg", 60.0], ["FedOBP", 64.0]]


def test_the_index_of_tests_has_every_folder():
    index = (ROOT / "tests/README.md").read_text()
    for path in (ROOT / "tests").rglob("__init__.py"):
        folder = path.parent.relative_to(ROOT / "tests").as_posix()
        assert folder == "." or f"| `{folder}` |" in index, folder


def count_prose(text: str) -> int:
    """Words that somebody wrote, outside of code, tables and what a script made."""
    made = re.compile(r"<!-- [^>]*made by.*?<!-- to here -->", re.DOTALL)
    lines = made.sub("", BLOCK.sub("", text)).splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def test_the_pages_are_short():
    """A ceiling that may only fall: say each thing once."""
    pages = (ROOT / "docs").glob("*.md")
    assert sum(count_prose(page.read_text()) for page in pages) <= 14_500
    assert len((ROOT / "README.md").read_text().split()) <= 800
