"""FedAvg by BlazeFL, a process for each core."""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer
from blazefl.core import IPCMode
from torch.utils.data import DataLoader, TensorDataset
from workload import DEVICE, ORDER, accuracy, clients, cnn4


class Sites:
    """The clients' samples as BlazeFL asks for them."""

    def get_dataset(self, type_, cid):
        return TensorDataset(*clients().own(cid, str(type_)))

    def set_dataset(self, type_, cid, dataset):
        pass

    def get_dataloader(self, type_, cid, batch_size, generator):
        return DataLoader(
            self.get_dataset(type_, cid), batch_size, shuffle=True, generator=generator
        )


class Models:
    """The network by any name."""

    def select_model(self, model_name):
        return cnn4()


assert sys.argv[1] == "FedAvg"
torch.set_num_threads(1)
common = {"model_selector": Models(), "model_name": "cnn4", "dataset": Sites(), "device": DEVICE}
common |= {"num_clients": len(clients().split), "batch_size": ORDER["batch"], "seed": 42}
server = FedAvgBaseServerHandler(
    global_round=ORDER["rounds"], sample_ratio=ORDER["share"], **common
)
with tempfile.TemporaryDirectory() as folder:
    trainer = FedAvgProcessPoolClientTrainer(
        share_dir=Path(folder, "share"),
        state_dir=Path(folder, "state"),
        epochs=ORDER["epochs"],
        lr=ORDER["lr"],
        num_parallels=os.cpu_count(),
        ipc_mode=IPCMode.SHARED_MEMORY,
        **common,
    )
    for cohort in ORDER["cohorts"]:
        began = time.perf_counter()
        trainer.local_process(server.downlink_package(), cohort)
        for package in trainer.uplink_package():
            server.load(package)
        print("round", time.perf_counter() - began, flush=True)
print("accuracy", accuracy(server.model, *clients().tested()), flush=True)
