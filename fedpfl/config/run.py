"""A run: the plan with its data loaded and its network built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedpfl import engine, models
from fedpfl.config import origin
from fedpfl.config.dealing import DealtData, Share, deal_data, share_nothing
from fedpfl.config.origin import WeightsOrigin
from fedpfl.config.plan import Plan
from fedpfl.config.schema import Settings
from fedpfl.data import Federation, ShiftedClients
from fedpfl.data.fingerprint import fingerprint_sequence
from fedpfl.data.heterogeneity import Heterogeneity
from fedpfl.engine import Clock
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.dealing import Assign, deal_choices
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values
from fedpfl.ground.tasks import SURVIVAL
from fedpfl.methods import METHODS, Method
from fedpfl.models import ADAPTERS, MixedNet, Net
from fedpfl.models.adapter import lora, lora_with_residue
from fedpfl.privacy import Account, SampleAccount, SamplePrivacy, SampleProtection, Secret
from fedpfl.robust import Adversary, Attack, Defence, make_adversary
from fedpfl.system import draw_devices, draw_stragglers


@dataclass(frozen=True)
class Run(Plan):
    """Hold all that a run needs.

    Attributes:
        federation: the clients that take part; as the partition deals them, and in the run of a
            round as the shift has them then.
        newcomers: clients that never take part; None without any.
        shifted: what clients hold in each world; None where nothing is laid over.
        world: that `federation` is of; None: as the partition deals them.
        clock: of simulated time, None without it.
        net: the network.
        samples_digest: of the data set.
        data_digest: of all that was read from files, the same for all seeds.
        fingerprint: also of who holds which samples, and of what of the network is frozen.
        account: of privacy, None without it.
        adversary: who attacks, None where attack=none.
        origin: where the network's values are from.
        secret: of a private run, once it has its directory.
        kinds: of the network of each client of the partition; () where they have one.
        notes: lines for the user about how the data were dealt.
    """

    federation: Federation
    newcomers: Federation | None
    shifted: ShiftedClients | None
    clock: Clock | None
    net: Net
    samples_digest: str
    data_digest: str
    fingerprint: str
    account: Account | SampleAccount | None
    adversary: Adversary | None
    origin: WeightsOrigin
    secret: Secret | None = None
    kinds: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    world: int | None = None

    def in_round(self, round_number: int) -> Run:
        """Return the run with what its clients hold in a round."""
        world = self.shift.find_world(round_number)
        if self.shifted is None or world == self.world:
            return self
        federation, newcomers = self.shifted.in_world(world)
        return replace(
            self,
            federation=federation,
            newcomers=newcomers,
            # The seed alone decides the attackers; they poison the samples of the new world.
            adversary=_make_adversary(self, federation, newcomers),
            world=world,
        )

    def find_net(self, federation: Federation) -> Net:
        """Return the network of the clients of a federation."""
        return _join_kinds(self.net.nets, self.kinds, federation)

    @property
    def horizon(self) -> float | None:
        """Return the time at which survival is judged, None in other tasks."""
        if self.task is not SURVIVAL:
            return None
        if self.eval.horizon:
            return self.eval.horizon
        times = self.federation.y[torch.cat(list(self.federation.train)), 0]
        return float(times.median())

    @property
    def client_account(self) -> Account | None:
        """Return the account of a run that hides clients, None for any other run."""
        return self.account if isinstance(self.account, Account) else None

    @property
    def sample_account(self) -> SampleAccount | None:
        """Return the account of a run that hides samples, None for any other run."""
        return self.account if isinstance(self.account, SampleAccount) else None

    @property
    def heterogeneity(self) -> Heterogeneity:
        """Return the clients' differences, without those of labels where the run hides samples."""
        measured = self.federation.heterogeneity
        return replace(measured, label_skew=None) if self.sample_account else measured

    @property
    def sample_protection(self) -> SampleProtection | None:
        """Return the protection of clients' samples, None without any."""
        account = self.sample_account
        if account is None:
            return None
        return SampleProtection(account.privacy.clip_length, account.client_noises, self.secret)

    def make_draws(self, purpose: str, round_number: int) -> Draws:
        """Return the random draws of a round for a purpose."""
        return Draws(self.settings.seed, purpose, round_number, self.sample_protection)

    def draw_cohorts(self) -> Iterator[list[int]]:
        """Draw the clients of one round after the other; of a private run in secret."""
        clients = self.federation.clients
        rounds = self.settings.rounds
        if self.secret and self.client_account and self.client_account.noise:
            return engine.draw_secret_cohorts(
                self.secret, clients, self.drawn_share, rounds, self.is_poisson_sampled
            )
        return engine.draw_cohorts(
            self.settings.seed, clients, self.drawn_share, rounds, self.is_poisson_sampled
        )

    @property
    def is_poisson_sampled(self) -> bool:
        """Return True if each client is drawn independently."""
        return self.privacy is not None and self.privacy.sampling == "poisson"

    @property
    def cohort(self) -> int:
        """Return the nominal size of a cohort."""
        return _count_cohort(self.settings, self.federation)

    @property
    def drawn_share(self) -> float:
        """Return the share of the clients that is drawn for a round.

        With `system.over` it is more than the cohort, as some may not come through.
        """
        if self.system is None:
            return min(1.0, self.settings.participation)
        return min(1.0, self.settings.participation * self.system.over)


def build_run(plan: Plan, share: Share = share_nothing) -> Run:
    """Load the data and build the network. Raises FedpflError.

    Args:
        plan: a checked configuration.
        share: makes the samples, which runs of one process may have in common.
    """
    if not {*plan.settings.metrics} <= {*engine.measures.PLUGIN_MEASURES}:
        engine.measures.import_torchmetrics()  # raises where it is absent

    # ---- Step 1: who holds which samples.
    dealt_data = deal_data(plan, share)
    federation = dealt_data.federation

    # ---- Step 2: the network, from its weights if there are any.
    model_options = dict(plan.model.options)
    overlap = model_options.pop("overlap", False)
    folder = Path(plan.settings.data_dir)
    weights = origin.find_weights(folder, model_options, plan.adapter.options)
    weights_origin = origin.trace_origin(weights, dealt_data, overlap, plan.privacy)
    model_options["weights"] = (weights and weights.values) or None
    kinds = _assign_kinds(plan, dealt_data)
    nets = _build_nets(plan, dealt_data, model_options, share)
    net = _join_kinds(nets, kinds, federation)
    _require_known_tokens(federation, net)
    _require_fit(plan, federation, net)
    _require_fit_of_uploads(plan, federation, net)

    # ---- Step 3: what goes on beside training, and what numbers come from.
    account = _make_account(plan, federation, net)
    clock = _make_clock(plan, federation)
    weight_values = model_options["weights"] or (weights and net.params)
    data_digest, fingerprint = _digest_data(dealt_data, weight_values, net, clock)
    run = Run(
        **vars(plan),
        federation=federation,
        newcomers=dealt_data.newcomers,
        kinds=kinds,
        shifted=dealt_data.shifted,
        clock=clock,
        net=net,
        samples_digest=dealt_data.samples_digest,
        data_digest=data_digest,
        fingerprint=fingerprint,
        account=account,
        adversary=_make_adversary(plan, federation, dealt_data.newcomers),
        origin=weights_origin,
        notes=dealt_data.notes,
    )
    _require_drawn_attacker(run)
    return run


def _digest_data(
    dealt_data: DealtData, weight_values: Any, net: Net, clock: Clock | None
) -> tuple[str, str]:
    """Return a digest of the data read, and one of their split among clients.

    The first is the same for all seeds.

    Args:
        dealt_data: the samples, and who holds which.
        weight_values: that the network begins with, None where they are drawn.
        net: the network.
        clock: of simulated time.
    """
    read_parts: list[Any] = [dealt_data.samples_digest, weight_values]
    split_parts: list[Any] = [dealt_data.samples_digest, dealt_data.splits, weight_values]
    # They are in no checkpoint, and may be drawn.
    split_parts += [kind.fixed for kind in net.nets if kind.fixed]
    # Devices are read from a file too, if there is one.
    if clock and clock.system.file:
        read_parts.append(clock.devices)
        split_parts.append(clock.devices)
    return fingerprint_sequence(read_parts), fingerprint_sequence(split_parts)


def _build_nets(
    plan: Plan, dealt_data: DealtData, model_options: Values, share: Share
) -> list[Net]:
    """Build the network of each kind, and tell it of clients, their ranks and rounds."""
    federation = dealt_data.federation
    adapter = ADAPTERS[plan.adapter.name]
    if adapter is lora and plan.method.has_residue:
        adapter = lora_with_residue
    build = partial(
        models.build_network,
        shape=federation.shape,
        classes=federation.classes,
        seed=plan.settings.seed,
        adapter=partial(adapter, **tree.drop(plan.adapter.options, ["assign"])),
    )
    if plan.mixed_model:
        nets = models.build_kinds(plan.mixed_model, build)
    else:
        nets = [build(plan.model.name, **model_options)]
    ranks = _assign_ranks(plan, dealt_data)
    facts = {"clients": federation.clients, "rounds": plan.settings.rounds, "ranks": ranks}
    nets = [net.with_facts(**facts).to(plan.device) for net in nets]
    return nets if federation.is_elsewhere else [_share_fixed(net, share) for net in nets]


def _share_fixed(net: Net, share: Share) -> Net:
    """Let all runs of the process have one copy of a network's fixed values."""
    if not net.fixed:
        return net
    return net.with_fixed(share(("fixed", fingerprint_sequence([net.fixed])), lambda: net.fixed))


def _assign_kinds(plan: Plan, dealt_data: DealtData) -> tuple[int, ...]:
    """Return each client's kind by its number in the partition; () with one network."""
    mixed = plan.mixed_model
    if mixed is None or len(mixed.kinds) == 1:
        return ()
    choice = "model.assign", mixed.assign, mixed.labels
    return tuple(_deal_choices(plan, dealt_data, choice, mixed.shares))


def _assign_ranks(plan: Plan, dealt_data: DealtData) -> tuple[int, ...]:
    """Return the rank of each client, newcomers last; () where all have the same."""
    ranks = plan.adapter.options.get("rank")
    if ranks is None:
        return ()
    ranks = ranks if isinstance(ranks, tuple) else (ranks,)
    assign = plan.adapter.options.get("assign", "cycle")
    if assign == "device":
        ranks = sorted(ranks)
    if isinstance(assign, dict):
        assign = {name: str(rank) for name, rank in assign.items()}
    choice = "adapter.assign", assign, [str(rank) for rank in ranks]
    places = _deal_choices(plan, dealt_data, choice)
    assigned = []
    for clients in filter(None, (dealt_data.federation, dealt_data.newcomers)):
        numbers = map(clients.partition_number, range(clients.clients))
        assigned += [ranks[places[number]] for number in numbers]
    return tuple(assigned) if len({*assigned}) > 1 else ()


def _deal_choices(
    plan: Plan,
    dealt_data: DealtData,
    choice: tuple[str, Assign, Sequence[str]],
    shares: Sequence[float] | None = None,
) -> list[int]:
    """Deal a choice, given by key, way and labels, to the clients of the partition."""
    settings = plan.settings
    names = [str(number) for number in range(settings.clients)]
    for clients in filter(None, (dealt_data.federation, dealt_data.newcomers)):
        for client, name in enumerate(clients.client_names):
            names[clients.partition_number(client)] = name
    speeds = []
    if plan.system:
        folder = Path(settings.data_dir)
        devices = draw_devices(plan.system, range(settings.clients), settings.seed, folder)
        speeds = [device.speed for device in devices]
    key, assign, labels = choice
    return deal_choices(key, assign, labels, names, settings.seed, speeds, shares)


def _join_kinds(nets: Sequence[Net], kinds: Sequence[int], federation: Federation) -> Net:
    """Return the networks of a federation's clients as one Net."""
    numbers = [federation.partition_number(client) for client in range(federation.clients)]
    return MixedNet(nets, [kinds[number] for number in numbers]) if kinds else nets[0]


def _require_known_tokens(federation: Federation, net: Net) -> None:
    """Raise FedpflError where texts have ids for which a network of transformers has no row."""
    vocabulary = getattr(getattr(net.module, "config", None), "vocab_size", None)
    if vocabulary and (largest := int(federation.x.max())) >= vocabulary:
        raise FedpflError(
            f"model={net.name} knows {vocabulary:,} tokens, and data set {federation.name} has id"
            f" {largest:,}; name the model's own tokenizer as dataset.tokenizer, or"
            f" set model.config={{vocab_size: {largest + 1}}}"
        )


def _require_fit(plan: Plan, federation: Federation, net: Net) -> None:
    """Raise FedpflError for a method that this network or these clients are not for."""
    method = plan.method
    method_name = plan.config["method"]["name"]
    # A method that counts on pairs of A and B would average values of other layers as if they were.
    if method.pairs and method.pairs != net.parts.pairs:
        pairs_word = ""
        if max(method.pairs, net.parts.pairs) > 1:
            pairs_word = f" adapter.pairs={method.pairs}"
        raise FedpflError(
            f"method={method_name} is about low-rank pairs; choose adapter=lora{pairs_word}"
        )
    if net.parts.ranks and not method.takes_ranks:
        names = ", ".join(name for name, other in METHODS.items() if other.takes_ranks)
        raise FedpflError(
            f"method={method_name} has one rank for all clients; give adapter.rank one number, or"
            f" choose {names}"
        )
    # Refuses what this network does not have, while nothing is written.
    method.init(net.params, net.parts)
    if len(net.nets) > 1:
        _require_fit_of_kinds(method, method_name, net)
    if method.validates and not any(map(len, federation.validation)):
        raise FedpflError(
            f"method={method_name} chooses by held-out samples, and there are none; set "
            "validation=0.1"
        )


def _require_fit_of_kinds(method: Method, method_name: str, net: Net) -> None:
    """Raise FedpflError for a method that joins what networks of several kinds do not share."""
    choice = f"method={method_name} and model=mixed"
    if not method.takes_kinds:
        takers = [name for name, taker in METHODS.items() if taker.takes_kinds]
        raise FedpflError(
            f"{choice}: it joins what clients of one network send, and these have several; use"
            f" {', '.join(takers)}, or one network"
        )
    first_form: Values = {}
    for kind in net.nets:
        shared = {"server": method.init(kind.params, kind.parts)[0]}
        if "aggregate" in method.buffers().values():
            shared["BatchNorm"] = kind.buffers
        form = tree.specs(shared)
        first_form = first_form or form
        if entries := sorted(entry for entry, _ in form.items() ^ first_form.items()):
            raise FedpflError(
                f"{choice}: the server's {entries[0]} has no one form for all kinds; heads have"
                " (method.layers=1), and statistics may stay local (method.statistics=local)"
            )


def _require_fit_of_uploads(plan: Plan, federation: Federation, net: Net) -> None:
    """Raise FedpflError where a defence or an attack cannot deal with a method's uploads."""
    method = plan.method
    defence = plan.defence

    # ---- Step 1: the form of uploads.
    rules: tuple[Attack | Defence | None, ...] = (plan.attack, defence)
    for rule in rules:
        if rule:
            engine.check_upload_form(rule, method, net)
    if defence is None:
        return

    # ---- Step 2: nothing may come past the defence.
    # Averaged statistics bypass every rule, and attackers can send any.
    _require_local_statistics("defence", method, net)

    # ---- Step 3: enough uploads in every round.
    cohort_size = _count_cohort(plan.settings, federation)
    if cohort_size < defence.least_clients:
        raise FedpflError(
            f"defence={plan.config['defence']['name']} needs {defence.least_clients} uploads in"
            f" every round, and a cohort is {cohort_size} clients; raise participation or lower"
            " defence.f"
        )


def _make_clock(plan: Plan, federation: Federation) -> Clock | None:
    """Return clients' devices in simulated time, and stragglers. Raises FedpflError."""
    if plan.system is None:
        return None
    seed = plan.settings.seed
    clients = federation.clients
    # Index devices by partition number, which splitting off newcomers does not change.
    partition_numbers = [federation.partition_number(client) for client in range(clients)]
    devices = draw_devices(
        plan.system,
        partition_numbers,
        seed,
        Path(plan.settings.data_dir),
    )
    stragglers = draw_stragglers(plan.system, clients, plan.local.amount, seed)
    return Clock(plan.system, devices, stragglers)


def _make_adversary(
    plan: Plan, federation: Federation, newcomers: Federation | None
) -> Adversary | None:
    """Draw the attackers, and poison their samples. Raises FedpflError."""
    if plan.attack is None:
        return None
    federations = [federation]
    if newcomers:
        federations.append(newcomers)
    return make_adversary(plan.attack, federations, plan.settings.seed)


def _require_drawn_attacker(run: Run) -> None:
    """Raise FedpflError where no attacker is drawn in any round of the attack."""
    adversary = run.adversary
    # Who takes part in a run that hides clients is drawn in secret, which it has later.
    if adversary is None or not adversary.attackers or run.client_account:
        return
    for round_number, cohort in enumerate(run.draw_cohorts(), start=1):
        is_drawn = not {*adversary.attackers}.isdisjoint(cohort)
        if is_drawn and adversary.attack.is_active(round_number):
            return
    # An attack without attackers would be reported as survived.
    raise FedpflError(
        f"attack: none of its {len(adversary.attackers)} clients is drawn in a round of the attack,"
        f" from attack.from_round={adversary.attack.from_round} to rounds={run.settings.rounds};"
        " raise rounds, participation or attack.share"
    )


def _make_account(plan: Plan, federation: Federation, net: Net) -> Account | SampleAccount | None:
    """Return the account of a private run, None without privacy.

    Raises:
        FedpflError: for a network or a method that it cannot answer for.
    """
    settings = plan.settings
    method = plan.method
    if plan.privacy is None:
        return None
    # ---- Step 1: a run that hides samples counts each client's steps.
    if isinstance(plan.privacy, SamplePrivacy):
        return _make_sample_account(plan, plan.privacy, federation, net)

    # ---- Step 2: a run that hides clients may upload clipped entries alone.
    _require_local_statistics("privacy=client", plan.method, net)
    server, client = method.init(net.params, net.parts)
    # Raises where an upload holds more than training moves, as no clipping would protect that.
    engine.untrained_upload(
        method,
        server,
        client,
        dict.fromkeys(method.buffers(), net.buffers),
    )

    # ---- Step 3: the account.
    plan.privacy.check_clients(federation.clients)
    # Who takes part is drawn in secret.
    cohort_size = _count_cohort(settings, federation)
    return Account(plan.privacy, federation.clients, cohort_size, settings.rounds)


def _count_cohort(settings: Settings, federation: Federation) -> int:
    """Return the nominal size of a cohort."""
    cohorts = engine.draw_cohorts(settings.seed, federation.clients, settings.participation, 1)
    return len(next(cohorts))


def _require_local_statistics(choice: str, method: Method, net: Net) -> None:
    """Raise FedpflError where averaged statistics would bypass a defence or the clipping."""
    if net.buffers and "aggregate" in method.buffers().values():
        raise FedpflError(
            f"{choice}: the server would average BatchNorm statistics as they are; use"
            " method.statistics=local, or a network without BatchNorm"
        )


def _make_sample_account(
    plan: Plan,
    privacy: SamplePrivacy,
    federation: Federation,
    net: Net,
) -> SampleAccount:
    """Return the account of a run that hides samples, after a rehearsal.

    Raises:
        FedpflError: for a network or a method that would tell of samples without noise.
    """
    settings = plan.settings

    # ---- Step 1: one world, so that a client's samples stay the same.
    if plan.shift.at:
        raise FedpflError(
            "privacy=sample keeps account of one world, in which clients hold the same samples"
            " throughout; use shift.at=[]"
        )

    # ---- Step 2: rehearse training.
    # Refusals come before anything is written; phases are those of the clients.
    rehearse = partial(engine.SamplingRehearsal, plan.method)
    rehearsals = [rehearse(kind, federation, privacy.clip_length) for kind in net.nets]
    # Networks of all kinds take the same steps.
    *_, training = (rehearsal.plan_training(plan.local) for rehearsal in rehearsals)

    # ---- Step 3: rehearse fine-tuning, and tell in which rounds it is.
    tuning: engine.ClientSteps = tuple(() for _ in training)
    tuned_rounds: tuple[int, ...] = ()
    if plan.eval.finetune_epochs:
        tuning = _rehearse_tuning(plan, rehearsals)
        rounds = range(1, settings.rounds + 1)
        tuned_rounds = tuple(
            number for number in rounds if plan.eval.should_finetune(number, len(rounds))
        )
    cohorts = engine.draw_cohorts(
        settings.seed, federation.clients, settings.participation, settings.rounds
    )
    return SampleAccount(
        privacy=privacy,
        sizes=tuple(federation.train_sizes.tolist()),
        training=training,
        tuning=tuning,
        cohorts=tuple(map(tuple, cohorts)),
        tuned_rounds=tuned_rounds,
    )


def _rehearse_tuning(
    plan: Plan, rehearsals: Sequence[engine.SamplingRehearsal]
) -> engine.ClientSteps:
    """Return clients' steps of fine-tuning. Raises FedpflError where newcomers take some."""
    # They are a separate federation, and their steps are not counted.
    if plan.settings.newcomers:
        raise FedpflError(
            "privacy=sample keeps no account of newcomers that are fine-tuned; use unseen=0 or"
            " eval.finetune_epochs=0"
        )
    plan_tuning = partial(plan.eval.plan_tuning, plan.local)
    *_, tuning = (rehearsal.plan_tuning(plan_tuning) for rehearsal in rehearsals)
    return tuning
