"""Result files of PFLlib and FL-bench are rows of other code; no other file is one."""

import sys
from types import SimpleNamespace

import pytest

from fedpfl.report.__main__ import main
from tests.report import test_report

root = test_report.root
ACCURACIES = [0.1, 0.9, 0.8]
METRICS = "epoch,accuracy_test_before,accuracy_test_after\n0,10.5,60.25\n1,40.0,70.0\n"


class OpenFile(dict):
    """As h5py opens the file that `save_results` of PFLlib's servers writes."""

    def __init__(self, path: object):
        super().__init__(rs_test_acc=ACCURACIES, rs_test_auc=[], rs_train_loss=[2.0, 1.0, 0.5])

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_their_results_are_marked_rows_below_the_runs(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "h5py", SimpleNamespace(File=OpenFile))
    of_pfllib = tmp_path / "MNIST_FedAvg_test_0.h5"
    of_pfllib.touch()
    of_flbench = tmp_path / "fedper/cifar10/today/metrics.csv"
    of_flbench.parent.mkdir(parents=True)
    of_flbench.write_text(METRICS)
    words = ["tables", str(root), "--format", "csv", "--beside", f"{of_pfllib},{of_flbench}"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("dataset,partition,method,accuracy_pooled,cohort_before")
    assert lines[-2:] == [
        'MNIST,"PFLlib, other code","FedAvg, run 0",80.0,,,2',
        'cifar10,"FL-bench, other code","fedper, today",,40.0,70.0,2',
    ]
    assert main([*words, "--select", "best-checkpoint"]) == 0
    assert ",90.0,,,1" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "epoch,loss\n0,1\n", METRICS[:46]])
def test_other_files_are_refused_in_one_line(root, tmp_path, capsys, text):
    (tmp_path / "metrics.csv").write_text(text)
    assert main(["tables", str(root), "--beside", str(tmp_path / "metrics.csv")]) == 2
    assert "metrics.csv" in capsys.readouterr().err
