"""A federation with a site at each node: the first exchange, on both sides.

The server asks each node what site it has, makes an agreement of it, asks for sums where samples
are scaled by computed constants, and sends the agreement with every message. A node builds the same
run from it, with its own samples in their place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ValidationError

from fedpfl.config.dealing import Share
from fedpfl.config.plan import Plan
from fedpfl.config.run import Run, build_run
from fedpfl.data import Federation
from fedpfl.data.datasets.shared.missing import BY_MEAN
from fedpfl.data.datasets.shared.parts import ReadOptions, label_columns
from fedpfl.data.datasets.shared.sums import ChannelSums, scale_channels, sum_channels
from fedpfl.data.datasets.sites import read_site, site_name
from fedpfl.data.units import note_units
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values
from fedpfl.ground.terminal import print_notice
from fedpfl.privacy import SamplePrivacy
from fedpfl.remote import agreement as agreements
from fedpfl.remote import wire
from fedpfl.remote.agreement import Agreement, SiteFacts, SiteReply, SiteSums
from fedpfl.remote.budget import make_plan_key, require_promise
from fedpfl.remote.messages import (
    AnyMessage,
    Request,
    pack_model,
    read_message,
    require_same_key,
)
from fedpfl.remote.node import Node, NodePolicy, answer_or_fault, make_run_node
from fedpfl.remote.server import Answered, FederateSettings, Grid, check_reply, require_reply
from fedpfl.remote.trust import MessageLimits

LIMITS = MessageLimits(message_bytes=2**22, entries=0)
"""Of a message of the first exchange, which has no tensors."""
POLL_SECONDS = 0.5
AGREEMENT_FILE = "sites.json"
NOTHING = (math.nan, math.nan)
"""Mean and deviation where a site has no value."""


def are_samples_at_nodes(config: Values) -> bool:
    """Tell configurations that leave the samples at nodes."""
    return config["dataset"]["name"] == "sites" and config["dataset"]["path"] is None


def require_sites_partition(plan: Plan) -> None:
    """Raise FedpflError for choices that need all sites in one place."""
    partition, dataset = plan.config["partition"], plan.config["dataset"]
    missing = dataset["missing"]
    refusals = {
        f"partition={partition['name']} deals samples to clients": partition["name"] != "groups",
        "shift lays anew what clients hold": plan.shift,
        "partition.together splits samples by groups": partition.get("together"),
        "dataset.only leaves out labels": dataset["only"] is not None,
        f"dataset.missing={missing} needs the values of all sites": missing in ("median", "mode"),
        "dataset.normalize=false leaves no mean to fill with": missing in BY_MEAN
        and not dataset.get("normalize", True),
    }
    for choice, is_made in refusals.items():
        if is_made:
            raise FedpflError(f"{choice}, and samples are at their nodes; leave it out")


def require_public_scale(plan: Plan) -> None:
    """Raise FedpflError where sums of a site's samples would leave it without noise."""
    if isinstance(plan.privacy, SamplePrivacy):
        raise FedpflError(
            "privacy=sample: sums of a site's samples, by which all are scaled, would leave it"
            " without noise; set dataset.mean and dataset.std"
        )


def share_agreement(plan: Plan, agreement: Agreement) -> Share:
    """Give a run the agreed samples where it would read some."""
    samples = agreement.make_samples(plan.dataset.options, plan.device)
    digest = agreement.digest

    def share(key: Hashable, make: Callable[[], Any]) -> Any:
        return samples, samples.y.to(plan.device), digest

    return share


# ---- The server


class StoredAgreement(BaseModel):
    """The agreement of a run that has begun."""

    configuration: str
    agreement: Agreement


def load_agreement(run_directory: Path, plan: Plan) -> Agreement | None:
    """Read the agreement of a run that has begun, or None.

    Raises:
        FedpflError: The file is damaged.
    """
    path = run_directory / AGREEMENT_FILE
    content = files.read_if_exists(path)
    if content is None or plan.settings.restart:
        return None
    try:
        stored = StoredAgreement.model_validate_json(content)
    except ValidationError:
        raise files.damaged_error(path) from None
    return stored.agreement if stored.configuration == plan.identity else None


def save_agreement(run_directory: Path, configuration: str, agreement: Agreement) -> None:
    """Write the agreement of the sites, and the identity of its configuration."""
    stored = StoredAgreement(configuration=configuration, agreement=agreement)
    with files.durable_write(run_directory / AGREEMENT_FILE) as file:
        file.write(f"{stored.model_dump_json(indent=1)}\n".encode())


def agree_with_nodes(grid: Grid, plan: Plan, settings: FederateSettings) -> Agreement:
    """Ask all nodes what sites they have, and return what these agree on.

    Raises:
        FedpflError: Sites differ, too few come in time, or too many.
    """
    # ---- Step 1: the site of each node.
    key = make_plan_key(plan)
    site_by_node = _collect_sites(grid, key, plan.settings.clients, settings.timeout)
    agreement = agreements.agree_on_sites([*site_by_node.values()], plan.task)
    unscaled = _with_plain_scale(plan, agreement)
    if unscaled is agreement:
        return agreement

    # ---- Step 2: the sums of their training samples, and what these tell.
    require_public_scale(plan)
    federation = build_run(plan, share_agreement(plan, unscaled)).federation
    is_image = federation.x.dtype == torch.uint8
    sums_by_site = _ask_for_sums(
        grid,
        site_by_node,
        Request(key=key, wants="sums", agreement=agreement.model_dump()),
        federation,
        timeout=settings.timeout,
    )
    features = federation.feature_names
    if features:
        scales = [
            [own.find_scale(is_image) if own.number else NOTHING for own in sums]
            for sums in sums_by_site.values()
        ]
        means, deviations = np.moveaxis(np.array(scales), 2, 0)
        for note in note_units([*sums_by_site], features, means, deviations):
            print_notice(note)
    totals = [ChannelSums()] * federation.x.shape[1]
    for sums in sums_by_site.values():
        totals = [total.add_sums(own) for total, own in zip(totals, sums, strict=True)]
    mean, std = scale_channels(totals, is_image, features)
    return agreement.model_copy(update={"mean": [*mean], "std": [*std]})


def _ask_for_sums(
    grid: Grid,
    site_by_node: Mapping[int, SiteFacts],
    request: Request,
    federation: Federation,
    timeout: float,
) -> dict[str, list[ChannelSums]]:
    """Ask each node for the sums of its site, by channel. Raises FedpflError for impossible ones."""
    message = pack_model(request)
    replies = grid.send_and_receive([(node, message) for node in site_by_node], timeout)
    # How many values these are follows from the split, which both sides make of all sites' sizes.
    train_sizes = federation.train_sizes.tolist()
    values_per_sample = federation.x[0, 0].numel()
    is_image = federation.x.dtype == torch.uint8
    sums_by_site: dict[str, list[ChannelSums]] = {}
    # Without the sums of one site there is no scale, so that a fault here ends the beginning.
    for (node, site), reply in zip(site_by_node.items(), replies, strict=True):
        client = federation.client_names.index(site.name)
        count = train_sizes[client] * values_per_sample
        counts = range(0 if federation.fill else count, count + 1)
        try:
            answer = _open_reply(SiteSums, reply, request.key, timeout)
            sums_by_site[site.name] = answer.check(federation.x.shape[1], counts, is_image)
        except FedpflError as fault:
            raise FedpflError(f"{site.name} (node {node}): {fault}") from None
    return sums_by_site


def _with_plain_scale(plan: Plan, agreement: Agreement) -> Agreement:
    """Return an agreement that leaves samples unscaled until their sums are known."""
    samples = agreement.make_samples(plan.dataset.options, plan.device)
    if samples.mean is not None and samples.std is not None:
        return agreement
    channels = samples.x.shape[1]
    return agreement.model_copy(update={"mean": [0.0] * channels, "std": [1.0] * channels})


def _collect_sites(
    grid: Grid, key: Mapping[str, str], clients: int, timeout: float
) -> dict[int, SiteFacts]:
    """Return the sites by their nodes, once there are as many as clients.

    Raises:
        FedpflError: Too few come in time, or too many.
    """
    site_by_node: dict[int, SiteFacts] = {}
    left_out: set[int] = set()
    deadline = time.monotonic() + timeout
    request = Request(key=dict(key), wants="site")
    message = pack_model(request)
    is_in_time = True
    while len(site_by_node) < clients and is_in_time:
        is_in_time = time.monotonic() <= deadline
        new_nodes = [node for node in grid.node_ids() if node not in {*site_by_node} | left_out]
        seconds = max(POLL_SECONDS, deadline - time.monotonic())
        replies = grid.send_and_receive([(node, message) for node in new_nodes], seconds)
        for node, reply in zip(new_nodes, replies, strict=True):
            try:
                site = _open_reply(SiteReply, reply, key, timeout).site
            except FedpflError as fault:
                # Another node may come in its place, so that it alone is left out.
                left_out.add(node)
                print_notice(f"node {node} is left out: {fault}")
                continue
            site_by_node[node] = site
        if not new_nodes:
            time.sleep(min(POLL_SECONDS, timeout))
    # Too many may have come together.
    if len(site_by_node) != clients:
        names = ", ".join(sorted(site.name for site in site_by_node.values())) or "none"
        raise FedpflError(
            f"{len(site_by_node)} sites came within {timeout:g} seconds ({names}), and"
            f" clients={clients}; start or end nodes, or set clients={len(site_by_node)}, and give"
            " the same command again"
        )
    return site_by_node


def _open_reply(
    kind: type[AnyMessage], reply: Answered, key: Mapping[str, str], timeout: float
) -> AnyMessage:
    """Return the values of an answer. Raises FedpflError."""
    fields, _ = LIMITS.unpack_message(require_reply(reply, timeout))
    check_reply(fields, key)
    return read_message(kind, fields)


# ---- A node


class SiteNode:
    """Answer for a node's own site: first its facts, then as any node.

    Args:
        plan: The configuration.
        path: The site, anything that a folder of sites may have.
        name: Its name; "" for the file's or folder's name.
        folder: Where its client's states are stored, in a folder for each run.
        policy: The permissions of the node.

    Raises:
        FedpflError: It cannot be read, or the run promises less than the node asks for.
    """

    def __init__(self, plan: Plan, path: Path, name: str, folder: Path, policy: NodePolicy):
        # ---- Step 1: is the run one of sites, and does it promise enough?
        if not are_samples_at_nodes(plan.config):
            raise FedpflError(
                "this federation's data are the same at all nodes (dataset.path); leave out data= "
                "and name= of this node"
            )
        require_sites_partition(plan)
        require_promise(plan, policy.epsilon)

        # ---- Step 2: the site. Its samples are read again once all have agreed.
        dataset = plan.dataset.options
        self._plan = plan
        self._path = path
        self._options = ReadOptions(
            labels=label_columns(dataset["label"]),
            categories=tuple(dataset["categories"]),
            size=dataset["size"],
            missing=dataset["missing"],
            task=plan.task,
        )
        site, columns = read_site(path, self._options)
        self._facts = agreements.describe_site(
            site, name or site_name(path), columns, self._options
        )
        # In silence its training and test samples would be dealt anew.
        if site.test_from is not None and plan.config["partition"]["test_fraction"] is not None:
            raise FedpflError(
                f"{path} has a test part of its own; set partition.test_fraction=null to use it"
            )
        self._folder = folder
        self._policy = policy
        self._key = make_plan_key(plan)
        self._node_by_digest: dict[str, Node] = {}

    def answer_message(self, message: bytes) -> bytes:
        """Return the answer to a message; a failure is an answer, too."""
        return answer_or_fault(self._answer_request, message)

    def _answer_request(self, message: bytes) -> bytes:
        """Return the answer to a message. Raises FedpflError."""
        fields = wire.unpack_fields(message)
        require_same_key(fields.get("key"), self._key, "the server", "this node")
        wants = read_message(Request, fields).wants if "wants" in fields else "an answer"
        if wants == "site":
            reply = SiteReply(key=self._key, site=self._facts)
            return pack_model(reply)
        agreement = read_message(Agreement, fields.get("agreement"))
        change = agreement.find_change(self._facts)
        if change:
            raise FedpflError(change)
        if wants == "sums":
            sums = SiteSums(key=self._key, sums=self._sum_samples(agreement))
            return pack_model(sums)
        # A new agreement is a new federation, with a new folder of states.
        if agreement.digest not in self._node_by_digest:
            run, client = self._build_run(agreement)
            node = make_run_node(run, [client], self._folder, self._policy)
            self._node_by_digest = {agreement.digest: node}
        return self._node_by_digest[agreement.digest].answer_message(message)

    def _sum_samples(self, agreement: Agreement) -> list[list[int]]:
        """Return the sums of the training samples, by channel."""
        require_public_scale(self._plan)
        run, client = self._build_run(_with_plain_scale(self._plan, agreement))
        federation = run.federation
        return [[*channel] for channel in sum_channels(federation.x, federation.train[client])]

    def _build_run(self, agreement: Agreement) -> tuple[Run, int]:
        """Return the run with this site's samples alone, and which client it is."""
        run = build_run(self._plan, share_agreement(self._plan, agreement))
        client = agreement.names.index(self._facts.name)
        site, _ = read_site(self._path, self._options, agreement.form.columns)
        samples = agreement.check_samples(
            x=site.x,
            y=agreement.number_labels(site, self._plan.task),
            options=self._plan.dataset.options,
            origin=str(self._path),
        )
        if samples.x.shape[1:] != run.federation.x.shape[1:]:
            raise FedpflError(f"{self._path} has other categories than it had before")
        federation = run.federation.with_samples_of(
            client,
            (agreement.groups == client).nonzero()[:, 0],
            samples.x.to(run.device),
            samples.y.to(run.device),
        )
        return replace(run, federation=federation), client
