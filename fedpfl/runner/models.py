"""The models of a run's clients and of its server, after a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.data.datasets.shared.missing import name_indicator
from fedpfl.data.datasets.shared.texts import to_array
from fedpfl.engine.backends.backend import reproducible_arithmetic
from fedpfl.engine.backends.selection import make_backend
from fedpfl.engine.calls import EvalCall, with_before_turn
from fedpfl.engine.keys import track_global_draws
from fedpfl.engine.training.clients import OneClient
from fedpfl.engine.training.jobs import EvalJob
from fedpfl.engine.training.participation import run_evaluation
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, choices_text, error_text
from fedpfl.models import Net
from fedpfl.runner.deploy import (
    InputScaling,
    InputScalingHook,
    PersonalNetwork,
    PersonalRule,
    copy_to_cpu,
    make_batch,
    name_entries,
)
from fedpfl.runner.evaluate import collect_server_parameters, make_adaptation, make_newcomer_state
from fedpfl.runner.everyone import list_client_names, locate_clients


class Models(ABC):
    """Answer with the models that are in a run's state.

    A client is given by its number in the partition or, where clients have names, by its name.
    Raises FedpflError, in one line, for an unknown client.
    """

    @property
    @abstractmethod
    def _run(self) -> Run:
        """Give the run's data, network and method."""

    @property
    @abstractmethod
    def _state(self) -> engine.State:
        """Give the state after the round."""

    def personal(self, client: int | str, finetuned: bool = False) -> dict[str, Tensor]:
        """Return the model that a client is evaluated with, as a `state_dict` of `network`.

        Of methods that predict with more than one network (APFL, FedRoD, masked HeteroFL) all their
        entries, with dots: `w.fc.weight`, `buffers.w.norm.running_mean`.

        Args:
            client: its number or name.
            finetuned: whether it is the model after fine-tuning.
        """
        run = self._run
        job = self._evaluated_job(client, finetuned)
        net = self._find_net(client)
        return name_entries(run.method, net, job.params, job.buffers, run.federation)

    def mask(self, client: int | str) -> dict[str, Tensor]:
        """Return masks of a client's personal entries by names of parameters."""
        _, state, number = self._locate(client)
        masks = self._run.method.masks(state.server, state.client(number))
        if not masks:
            raise FedpflError(f"{self._method_word} has no mask of single entries")
        return copy_to_cpu(masks)

    def predict(self, client: int | str, samples: Any, finetuned: bool = False) -> Tensor:
        """Return the logits `[samples, classes]` of a client's personal model, float32 on the CPU.

        samples: `[samples, ...]`, an array or a tensor, of the data set's shape and type (images:
        uint8); they are normalised as in training. Or a data frame with a column per feature, in
        any order. finetuned: as in `personal`.
        """
        run = self._run
        if hasattr(samples, "columns"):
            samples = _order_features(samples, run.federation.feature_names)
        x = _require_form(samples, run.federation)
        logits = [torch.empty(0, *run.federation.shape.answer_axes, run.federation.classes)]
        with self._as_judged(client, finetuned) as job, torch.no_grad(), self._autocast():
            bound = self._find_net(client).bind(job.buffers)
            everything = make_batch(run.method, run.federation, x.to(run.device))
            for batch in everything.split() if len(x) else ():
                logits.append(run.method.predict(bound, job.params, batch).float().cpu())
        return torch.cat(logits)

    def samples(self, client: int | str, split: str = "test") -> tuple[Tensor, Tensor]:
        """Return a client's samples and labels of a split, as the data set has them.

        Args:
            client: its number or name.
            split: train, test or validation.
        """
        federation, _, number = self._locate(client)
        names = [name for name in ("train", "test", "validation") if getattr(federation, name)]
        if split not in names:
            raise FedpflError(f"split must be one of {', '.join(names)}, got {split!r}")
        indices = getattr(federation, split)[number].to(self._run.device)
        data = self._run.federation
        return data.x[indices].cpu(), data.y[indices].cpu()

    def global_model(self) -> dict[str, Tensor]:
        """Return the server's part of the network as a `state_dict`.

        What stays with the clients is not in it. Raises FedpflError where that is everything.
        """
        run = self._run
        values = collect_server_parameters(run, self._state)
        if not values:
            raise FedpflError(
                f"{self._method_word} has no global model: all stays with the clients"
            )
        buffers: Mapping[str, Tensor] = next(iter(self._state.server_buffers.values()), {})
        return copy_to_cpu(run.net.state_dict({**run.net.fixed, **values, **buffers}))

    def network(self, client: int | str = 0) -> nn.Module:
        """Return a copy of the network as it was before round 1, for `load_state_dict`.

        It takes samples as the data set holds them (images: uint8), and scales them as in training.

        Args:
            client: its number or name, where clients have networks of several kinds.
        """
        network = self._make_network(self._find_net(client))
        network.register_forward_pre_hook(InputScalingHook(self._run.federation))
        return network

    def personal_module(
        self, client: int | str, finetuned: bool = False
    ) -> PersonalNetwork | PersonalRule:
        """Return a client's personal model as a module, on the CPU.

        It answers samples as the data set holds them with logits, by the method's own rule where it
        has one. finetuned: as in `personal`.

        Raises:
            FedpflError: There is no such client.
        """
        run = self._run
        scaling = InputScaling(run.federation)
        job = self._evaluated_job(client, finetuned)
        net = self._find_net(client)
        if job.params.keys() == net.params.keys():
            network = self._make_network(net)
            network.load_state_dict(self.personal(client, finetuned))
            return PersonalNetwork(scaling, network).eval()
        rule = PersonalRule(scaling, run.method, net.copy(), job.params, job.buffers)
        return rule.cpu().eval()

    def client_number(self, client: int | str) -> int:
        """Return the number of a client in the partition, by its number or its name."""
        names = list_client_names(self._run)
        if client in names:
            return names.index(client)
        if isinstance(client, str) and names:
            raise FedpflError(f"client: {choices_text(names, client)}")
        clients = self._run.settings.clients
        if isinstance(client, str) or client not in range(clients):
            raise FedpflError(
                f"client must be a whole number from 0 to {clients - 1}, got {client!r}"
            )
        return int(client)

    @property
    def _method_word(self) -> str:
        return f"method={self._run.config['method']['name']}"

    def _find_net(self, client: int | str) -> Net:
        """Return the network of a client's kind."""
        _, state, number = self._locate(client)
        return self._run.net.nets[state.rows.kinds[number]]

    def _make_network(self, net: Net) -> nn.Module:
        """Return a copy of the network before round 1; it takes scaled samples."""
        net = net.copy()
        net.module.load_state_dict(net.state_dict({**net.fixed, **net.params, **net.buffers}))
        return net.module.cpu().eval()

    @property
    def _autocast(self) -> Any:
        return partial(
            torch.autocast,
            self._run.device.type,
            torch.bfloat16,
            self._run.engine.precision == "bf16",
        )

    @contextmanager
    def _as_judged(self, client: int | str, finetuned: bool) -> Iterator[EvalJob]:
        """Yield the personal model and statistics that the engine evaluates.

        Within, the network draws the numbers that the loop backend would give it.
        """
        run = self._run
        federation, state, number = self._locate(client)
        adaptation = make_adaptation(run, state)
        call = with_before_turn(
            EvalCall(run.method, federation, state, [number], before_evaluation=adaptation)
        )
        key = call.draws.hook_key(number)
        tuned_model = self._fine_tune(call) if finetuned else {}
        net = self._find_net(client)
        with (
            reproducible_arithmetic(run.device, run.engine.precision),
            track_global_draws(run.method, key, net.traits.draws),
        ):
            job = next(run_evaluation(call, OneClient(number), net, self._autocast))
            assert isinstance(job, EvalJob)
            yield replace(job, **tuned_model)

    def _evaluated_job(self, client: int | str, finetuned: bool) -> EvalJob:
        """Return the evaluation job of a client."""
        with self._as_judged(client, finetuned) as job:
            return job

    def _fine_tune(self, call: EvalCall) -> dict[str, tree.Tree]:
        """Return the model of a call's one client after fine-tuning, as the engine tunes it.

        Raises:
            FedpflError: The run does not fine-tune.
        """
        run = self._run
        if not run.eval.finetune_epochs:
            raise FedpflError(
                f"{self._method_word} was not fine-tuned; run it with eval.finetune_epochs=5"
            )
        key = call.state.round, call.federation.partition_number(call.clients[0])
        if key not in self._tuned_models:
            # A private run's account has its own fine-tunings alone: without its secret none is made.
            draws = replace(run, secret=None).make_draws("finetune", call.state.round)
            tuning = run.eval.plan_tuning(run.local, draws)
            threads = torch.get_num_threads()
            try:
                backend = make_backend(replace(run.engine, workers=1), run.net, run.device)
                answer = backend.run_one(replace(call, tuning=tuning, wants_models=True))
            finally:
                torch.set_num_threads(threads)  # a backend sets its own
            self._tuned_models.clear()  # an export asks for the last one thrice
            self._tuned_models[key] = tree.take(answer["model"], 0)
        return self._tuned_models[key]

    @cached_property
    def _tuned_models(self) -> dict[tuple[int, int], dict[str, tree.Tree]]:
        return {}

    def _locate(self, client: int | str) -> tuple[Federation, engine.State, int]:
        """Return where a client is: its federation, that one's state, and the number there."""
        run = self._run
        federation, number = locate_clients(run)[self.client_number(client)]
        state = self._newcomers if federation is run.newcomers else self._state
        return federation, state, number

    @cached_property
    def _newcomers(self) -> engine.State:
        return make_newcomer_state(self._run, self._state)


def _order_features(frame: Any, features: tuple[str, ...]) -> np.ndarray:
    """Return columns as float32, in the order of the network's features.

    Raises:
        FedpflError: A feature is absent, is no number, or has no name here.
    """
    if not features:
        raise FedpflError(
            "samples are a data frame, but the run's data are no table; give an array"
        )
    told = {name_indicator(name): frame[name].isna() for name in frame.columns}
    frame = frame.assign(**{name: told[name] for name in features if name in told})
    try:
        return frame[list(features)].to_numpy(np.float32, copy=True)
    except (KeyError, TypeError, ValueError) as error:
        raise FedpflError(
            f"samples cannot be read: {error_text(error)}; features are {', '.join(features[:8])}, "
            "numbers all of them; `ward=a` is 1 where column `ward` has `a`, else 0"
        ) from None


def _require_form(samples: Any, federation: Federation) -> Tensor:
    """Return samples as a tensor. Raises FedpflError for another form than the data set's."""
    array = to_array(samples, "the array of samples")
    if not hasattr(samples, "dtype") and array.dtype == np.float64:  # Python's own numbers
        array = array.astype(np.float32)
    like = federation.x
    dtype = f"{like.dtype}".removeprefix("torch.")
    if array.shape[1:] != like.shape[1:] or array.dtype.name != dtype:
        sample_axes = str(list(like.shape[1:]))[1:]
        raise FedpflError(
            f"samples must be {dtype} [samples, {sample_axes} as those of data set"
            f" {federation.name}, got {array.dtype} {list(array.shape)}"
        )
    is_right = np.isfinite(array) | (bool(federation.fill) & np.isnan(array))
    if array.dtype.kind == "f" and not is_right.all():
        raise FedpflError(
            "samples hold values that are not finite; mend or leave out those samples"
        )
    return torch.from_numpy(np.ascontiguousarray(array))
